# SPDX-License-Identifier: Apache-2.0
"""Our bytes against those of the specs that vLLM itself builds of the same configurations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.unit.sizing._configs import ARCHITECTURES, read
from vllm_tiered_kv.sizing import families
from vllm_tiered_kv.sizing.dtypes import Dtype
from vllm_tiered_kv.sizing.hf_config import HfConfig
from vllm_tiered_kv.sizing.kinds import layer_kinds

ROOT = Path(__file__).parents[3]
IGNORES_FP8 = {"falcon 7B", "falcon 40B"}
"""vLLM's classes for them keep the model's format, whatever is asked for."""


@pytest.fixture(scope="module")
def specs() -> dict[tuple[str, int, str], dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.sizing._vllm_specs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("SPECS ")]
    found = [json.loads(line) for line in lines]
    assert done.returncode == 0, done.stderr[-2000:]
    return {(each["name"], each["tp"], each["kv_dtype"]): each for each in found}


@pytest.mark.parametrize(("tp", "kv_dtype"), [(1, "auto"), (4, "auto"), (1, "fp8")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_bytes_are_those_of_vllm(
    specs: dict[tuple[str, int, str], dict[str, Any]], name: str, tp: int, kv_dtype: str
) -> None:
    vllm = specs[name, tp, kv_dtype]
    assert "error" not in vllm, vllm["error"]
    kv = Dtype.FP8 if kv_dtype == "fp8" and name not in IGNORES_FP8 else None
    # vLLM's CPU platform keeps recurrent memory in 32 bits.
    ours = read(ARCHITECTURES[name], kv, Dtype.FP32).shape.on_rank(tp)
    windows = [[window.tokens, window.bytes_per_token] for window in ours.windows]
    assert (ours.bytes_per_token, windows, ours.state_bytes) == (
        vllm["full"],
        vllm["windows"],
        vllm["states"],
    )


@pytest.mark.parametrize("family", families.DEFAULTS)
def test_what_a_family_adds_is_what_transformers_adds(family: str) -> None:
    transformers = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = transformers.CONFIG_MAPPING[family]()
    if family == "gemma4_text":  # its heads differ by layer; the first has a window
        config = config.per_layer_config[0]
    for name, value in families.DEFAULTS[family].items():
        assert getattr(config, name) == value, name


@pytest.mark.parametrize("family", sorted(families.HEADS_ALIKE))
def test_families_with_a_kv_head_for_each_query_head(family: str) -> None:
    transformers = pytest.importorskip("transformers.models.auto.configuration_auto")
    config = transformers.CONFIG_MAPPING[family]()
    heads = config.num_attention_heads
    assert getattr(config, "num_key_value_heads", heads) == heads


@pytest.mark.parametrize("family", [*families.WINDOW_PATTERN, *families.FULL_INTERVAL])
def test_which_layers_have_windows_or_states_is_what_transformers_says(family: str) -> None:
    transformers = pytest.importorskip("transformers.models.auto.configuration_auto")
    theirs = transformers.CONFIG_MAPPING[family](num_hidden_layers=14, num_kv_shared_layers=0)
    window = None if family in families.FULL_INTERVAL else 64
    config = HfConfig(model_type=family, num_hidden_layers=14, sliding_window=window)
    expected = {
        "full_attention": "FULL",
        "sliding_attention": "WINDOW",
        "linear_attention": "STATE",
    }
    assert [kind.name for kind in layer_kinds(config)] == [
        expected[name] for name in theirs.layer_types
    ]
