# SPDX-License-Identifier: Apache-2.0
"""The tools that the engine tests and the demo lean on."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

from demo.compare import equal, largest_difference
from demo.scenario import MAX_TOKENS, Scenario, Transcript
from tools.serving import Completion, Metrics
from tools.tinymodels import MODEL_VARIANTS, build_lora, build_model

SCRAPE = """\
# TYPE vllm:hits counter
vllm:hits_total{engine="0",tier="cpu"} 3.0
vllm:hits_total{engine="1",tier="cpu"} 4.0
vllm:hits_total{engine="0",tier="disk"} 10.0
"""


def test_metrics_sum_over_the_labels_not_named() -> None:
    metrics = Metrics(SCRAPE)
    assert metrics.value("vllm:hits_total", tier="cpu") == 7
    assert metrics.value("vllm:hits_total") == 17
    assert metrics.value("vllm:absent_total") == 0
    assert metrics.as_dict("vllm:hits")['vllm:hits_total{engine="0",tier="disk"}'] == 10


def completion(tokens: tuple[int, ...], logprobs: tuple[float, ...]) -> Completion:
    return Completion(
        token_ids=tokens,
        logprobs=logprobs,
        text="",
        ttft_s=0.0,
        total_s=0.0,
        prompt_tokens=1,
        cached_tokens=0,
        finish_reason="length",
    )


def test_outputs_are_equal_only_with_the_same_tokens_and_probabilities() -> None:
    reference = completion((1, 2), (-0.5, -1.0))
    assert equal(reference, completion((1, 2), (-0.5, -1.0005)))
    assert not equal(reference, completion((1, 2), (-0.5, -1.01)))
    assert not equal(reference, completion((1, 3), (-0.5, -1.0)))
    assert largest_difference(reference, completion((1,), (-0.5,))) is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("llama-tiny", tmp_path_factory.mktemp("models") / "llama-tiny")


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_a_model_is_the_same_for_the_same_seed(tiny: Path, tmp_path: Path) -> None:
    again = build_model("llama-tiny", tmp_path / "again")
    other = build_model("llama-tiny", tmp_path / "other", seed=1)
    assert digest(again) == digest(tiny)
    assert digest(other)["model.safetensors"] != digest(tiny)["model.safetensors"]
    assert digest(other)["tokenizer.json"] == digest(tiny)["tokenizer.json"]


def test_a_model_is_built_once_and_again_for_other_parameters(tiny: Path, tmp_path: Path) -> None:
    folder = build_lora(tmp_path / "lora", seed=1)
    first = (folder / "adapter_model.safetensors").stat()
    assert build_lora(folder, seed=1) == folder
    assert (folder / "adapter_model.safetensors").stat().st_ino == first.st_ino
    build_lora(folder, seed=2)
    assert (folder / "adapter_model.safetensors").stat().st_ino != first.st_ino
    assert [path.name for path in tmp_path.iterdir()] == ["lora"]


def test_unknown_variant(tmp_path: Path) -> None:
    assert "llama-huge" not in MODEL_VARIANTS
    with pytest.raises(KeyError, match="llama-huge"):
        build_model("llama-huge", tmp_path / "model")


def test_a_scenario_repeats_and_every_request_fits(tiny: Path) -> None:
    scenario = Scenario(tiny, seed=3)
    transcript = Transcript()
    prompts = []
    for step in scenario.steps(transcript):
        transcript.answers[step.name] = (5, 6, 7)
        prompts.append(step.prompt)
        assert len(step.prompt) < MAX_TOKENS - 24
    again = [step.prompt for step in Scenario(tiny, seed=3).steps(transcript)]
    assert again == prompts
    turns = [prompt for prompt in prompts if len(prompt) < 3000]
    assert len(turns) > 2
    for earlier, later in itertools.pairwise(turns):
        assert later[: len(earlier)] == earlier
