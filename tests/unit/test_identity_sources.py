# SPDX-License-Identifier: Apache-2.0
"""Where weights come from, and the digester's thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit._weights import DEADLINE, digest_of, make_model, result
from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import folder, hashing, sources, weights
from vllm_tiered_kv.identity.hashing import Cancelled, FileHasher
from vllm_tiered_kv.identity.memory import DigestMemory
from vllm_tiered_kv.identity.namespace import Established, Unestablished, WeightsResult
from vllm_tiered_kv.identity.sources import Part, Plan, Refused, Source
from vllm_tiered_kv.identity.weights import WeightsDigester

pytestmark = pytest.mark.usefixtures("own_cache", "no_vllm")


def engine(
    model: str = "m", load_format: str = "auto", auto_map: object = None, **changes: Any
) -> Any:
    """What is read of a ``VllmConfig``."""
    content = {"hidden_size": 8, "model_type": "llama"}
    hf_config = SimpleNamespace(auto_map=auto_map, to_dict=lambda: content)
    model_config = SimpleNamespace(
        model=model,
        model_weights="",
        revision=None,
        code_revision=None,
        hf_config=hf_config,
        dtype="bfloat16",
        quantization=None,
        seed=0,
        trust_remote_code=False,
        multimodal_config=None,
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        data_parallel_size=1,
        enable_expert_parallel=False,
    )
    load = SimpleNamespace(load_format=load_format, download_dir=None)
    for name, value in changes.items():
        for part in (model_config, parallel, load, hf_config):
            if hasattr(part, name):
                setattr(part, name, value)
    return SimpleNamespace(
        model_config=model_config,
        parallel_config=parallel,
        load_config=load,
        speculative_config=changes.get("speculative_config"),
    )


def dummy(**changes: Any) -> str:
    found = WeightsDigester(sources.plan(engine(load_format="dummy", **changes))).result()
    assert isinstance(found, Established)
    return found.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": "float16"},
        {"quantization": "fp8"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"to_dict": lambda: {"hidden_size": 16}},
    ],
    ids=lambda c: next(iter(c)),
)
def test_random_weights_are_identified_by_what_makes_them(changes):
    assert dummy() == dummy(model="elsewhere") == dummy(data_parallel_size=2)
    assert dummy(**changes) != dummy()


@pytest.mark.parametrize("part", ["device_name", "torch_version"])
def test_random_weights_depend_on_their_generator(monkeypatch, part):
    before = dummy()
    monkeypatch.setattr(compat, part, lambda: "other")
    assert dummy() != before


@pytest.mark.parametrize(
    "load_format",
    [
        "bitsandbytes",
        "ipc_cache",
        "modelexpress",
        "my_own_loader",
        "runai_streamer",
        "runai_streamer_sharded",
        "sharded_state",
        "tensorizer",
    ],
)
def test_streamed_weights_are_refused(load_format):
    with pytest.raises(Refused, match=load_format):
        sources.plan(engine(load_format=load_format))


@pytest.mark.parametrize(
    "changes", [{"model": "s3://bucket/model"}, {"model_weights": "s3://bucket/model"}]
)
def test_weights_in_object_storage_are_refused(changes):
    with pytest.raises(Refused, match="s3://bucket/model"):
        sources.plan(engine(**changes))


def test_modelscope_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "uses_modelscope", lambda: True)
    found = result("owner/model")
    assert isinstance(found, Unestablished)
    assert "ModelScope" in found.reason


def test_remote_code_elsewhere_is_a_source_of_its_own():
    auto_map = {"AutoModel": "owner/code--m.Model", "AutoTokenizer": ["x.Y", "other/z--t.T", None]}
    trusting = sources.plan(engine(auto_map=auto_map, trust_remote_code=True, code_revision="r"))
    assert [(s.model, s.part) for s in trusting.target] == [
        ("m", Part.ALL),
        ("other/z", Part.CODE),
        ("owner/code", Part.CODE),
    ]
    own = engine(auto_map={"AutoModel": "m--m.Model"}, trust_remote_code=True)
    assert len(sources.plan(own).target) == 1
    assert trusting.target[1].revision == "r"
    assert len(sources.plan(engine(auto_map=auto_map)).target) == 1


def test_parts_and_scales_kept_elsewhere_are_sources():
    config = engine()
    config.model_config.hf_config.text_model_id = "owner/text"
    config.model_config.multimodal_config = SimpleNamespace(mm_encoder_fp8_scale_path="/s.json")
    assert [s.model for s in sources.plan(config).target] == ["m", "owner/text", "/s.json"]


def test_settings_in_the_usual_cache_count_beside_a_download_folder(tmp_path, monkeypatch):
    made = sources.plan(engine(model="owner/model", download_dir="/weights")).target
    assert [(s.cache_folder, s.part) for s in made] == [
        ("/weights", Part.ALL),
        (None, Part.SETTINGS),
    ]
    assert len(sources.plan(engine(model=str(tmp_path), download_dir="/weights")).target) == 1
    model = make_model(tmp_path / "model", **{"preprocessor_config.json": b"{}"})
    _, found = folder.loaded_files(Source("m", "auto", part=Part.SETTINGS), model)
    assert set(found) == {"modeling.py", "preprocessor_config.json"}


@pytest.mark.parametrize(
    ("method", "expected"), [("eagle", ("draft",)), ("ngram", None), ("suffix", None)]
)
def test_a_draft_counts_where_it_keeps_kv(method, expected):
    speculative = SimpleNamespace(
        method=method,
        draft_model_config=engine(model="draft").model_config,
        draft_load_config=None,
    )
    found = sources.plan(engine(speculative_config=speculative)).draft
    assert (found and tuple(s.model for s in found)) == expected


# The background


def wait_for(calls: list[Any], event: threading.Event) -> Any:
    assert event.wait(DEADLINE)
    assert len(calls) == 1
    return calls[0]


def test_the_result_is_delivered_once_on_another_thread(tmp_path):
    model = make_model(tmp_path / "model")
    calls: list[Any] = []
    done = threading.Event()

    def deliver(found: WeightsResult) -> None:
        calls.append((found, threading.current_thread()))
        done.set()

    digester = WeightsDigester(Plan((Source(str(model), "auto"),)))
    digester.start(deliver)
    found, thread = wait_for(calls, done)
    assert found == Established(digest_of(model))
    assert thread is not threading.current_thread()
    assert digester.join(DEADLINE)
    with pytest.raises(RuntimeError):
        digester.start(deliver)


def test_cancelling_stops_within_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(hashing, "BLOCK_BYTES", 1000)

    class AfterThree(threading.Event):
        asked = 0

        def is_set(self) -> bool:
            self.asked += 1
            return self.asked > 3

    path = make_model(tmp_path / "model") / "model.safetensors"
    hasher = FileHasher(DigestMemory.default(), AfterThree())
    with pytest.raises(Cancelled):
        hasher.digest(path)
    assert hasher.bytes_read == 3000


def test_a_cancelled_digest_is_not_delivered(tmp_path, monkeypatch):
    model = make_model(tmp_path / "model")
    reading, go_on = threading.Event(), threading.Event()
    listing = folder.loaded_files

    def slow(*arguments: Any) -> Any:
        reading.set()
        assert go_on.wait(DEADLINE)
        return listing(*arguments)

    monkeypatch.setattr(folder, "loaded_files", slow)
    calls: list[WeightsResult] = []
    digester = WeightsDigester(Plan((Source(str(model), "auto"),)))
    digester.start(calls.append)
    assert reading.wait(DEADLINE)
    assert not digester.join(0)
    digester.cancel()
    go_on.set()
    assert digester.join(DEADLINE)
    assert calls == []
    assert "cancelled" in digester.result().reason


def test_a_digest_that_never_started_is_over():
    assert WeightsDigester(Plan()).join(0)


def test_a_callback_that_fails_harms_nobody(tmp_path, caplog):
    def fail(_: WeightsResult) -> None:
        raise RuntimeError("no")

    digester = WeightsDigester(Plan((Source(str(make_model(tmp_path / "m")), "auto"),)))
    digester.start(fail)
    assert digester.join(DEADLINE)
    assert "could not be delivered" in caplog.text


def test_a_surprise_is_a_reason(tmp_path, monkeypatch):
    def explode(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(folder, "loaded_files", explode)
    found = result(make_model(tmp_path / "model"))
    assert isinstance(found, Unestablished)
    assert "boom" in found.reason


@pytest.mark.parametrize("config", [None, SimpleNamespace(), engine(load_format="tensorizer")])
def test_starting_never_raises(config):
    calls: list[WeightsResult] = []
    done = threading.Event()
    digester = weights.start_weights(config, lambda r: (calls.append(r), done.set()))
    found = wait_for(calls, done)
    assert isinstance(found, Unestablished)
    assert found.reason
    assert digester.join(DEADLINE)
