# SPDX-License-Identifier: Apache-2.0
"""Where a model's files are found, and what they say of its weights and parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.sizing import _configs as c
from vllm_tiered_kv.sizing.dtypes import Dtype
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.families import with_defaults
from vllm_tiered_kv.sizing.find import find_config
from vllm_tiered_kv.sizing.hf_config import MAX_CONFIG_BYTES, read_config
from vllm_tiered_kv.sizing.parameters import Parameters, estimate
from vllm_tiered_kv.sizing.read import Choices, read_model
from vllm_tiered_kv.sizing.weights import (
    INDEX,
    Weights,
    estimate_weights,
    find_parameters,
    find_weights,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_snapshot(hub: Path, name: str, commit: str = COMMIT, *, ref: str | None = COMMIT) -> Path:
    model = hub / ("models--" + name.replace("/", "--"))
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(c.SMALL))
    if ref is not None:
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / "main").write_text(ref)
    return snapshot / "config.json"


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(c.SMALL))
    assert find_config(str(tmp_path), {}) == find_config(str(path), {}) == path
    assert read_config(path).num_hidden_layers == 8


@pytest.mark.parametrize(
    ("variable", "below"),
    [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_a_name_in_the_hub_cache(tmp_path: Path, variable: str, below: str) -> None:
    found = make_snapshot(tmp_path / below, "org/Some-Model.v1")
    assert find_config("org/Some-Model.v1", {variable: str(tmp_path)}) == found
    with pytest.raises(SizingError, match=f"nor such a name in the local hub cache, {tmp_path}"):
        find_config("org/other", {variable: str(tmp_path)})


def test_the_snapshot_of_main_else_the_only_one(tmp_path: Path) -> None:
    environ = {"HF_HUB_CACHE": str(tmp_path)}
    main = make_snapshot(tmp_path, "org/two")
    make_snapshot(tmp_path, "org/two", "f" * 40)
    assert find_config("org/two", environ) == main
    only = make_snapshot(tmp_path, "org/one", ref=None)
    assert find_config("org/one", environ) == only
    make_snapshot(tmp_path, "org/one", "f" * 40, ref="../../../elsewhere")
    with pytest.raises(SizingError, match=r"holds no config\.json of it"):
        find_config("org/one", environ)


@pytest.mark.parametrize("name", ["../up", "a/b/c", "org/..", "/no/such/path", "", "a\0b"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SizingError):
        find_config(name if name else str(tmp_path / "empty"), {"HF_HUB_CACHE": str(tmp_path)})


def test_a_file_that_is_too_long_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(SizingError, match="is longer than"):
        read_config(path)
    with pytest.raises(SizingError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.json")


def test_modelopts_file_beside_an_older_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(c.SMALL))
    beside = tmp_path / "hf_quant_config.json"
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    assert read_model(read_config(path), Choices()).kv_dtype is Dtype.FP8
    path.write_text(json.dumps({**c.SMALL, "quantization_config": {"quant_method": "fp8"}}))
    assert read_model(read_config(path), Choices()).kv_dtype is Dtype.BF16
    path.write_text(json.dumps(c.SMALL))
    beside.write_text("{")
    with pytest.raises(SizingError, match=r"hf_quant_config\.json is not JSON"):
        read_config(path)


def test_weights_from_the_index_else_from_the_files(tmp_path: Path) -> None:
    assert find_weights(None) is None
    assert find_weights(tmp_path) is None
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 23)
    assert find_weights(tmp_path) == Weights(123, "sizes of *.safetensors")
    index = {"metadata": {"total_size": 141107412992}, "weight_map": {"a": "b"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert find_weights(tmp_path) == Weights(141107412992, f"total_size in {INDEX}")
    for broken in ("{", '{"metadata": {"total_size": "many"}}', '{"metadata": {"total_size": -1}}'):
        (tmp_path / INDEX).write_text(broken)
        assert find_weights(tmp_path) == Weights(123, "sizes of *.safetensors")


def test_parameters_from_the_index(tmp_path: Path) -> None:
    config = with_defaults(c.decode(c.DEEPSEEK_V3))
    estimated = find_parameters(tmp_path, config)
    assert estimated == estimate(config)
    assert estimated is not None
    (tmp_path / INDEX).write_text('{"metadata": {"total_parameters": 1000000}}')
    found = find_parameters(tmp_path, config)
    share = round(1_000_000 * estimated.active / estimated.total)
    assert found == Parameters(1_000_000, share, f"total_parameters in {INDEX}")


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (c.LLAMA_3_70B, 70.55, 70.55),
        (c.LLAMA_3_8B, 8.03, 8.03),
        (c.LLAMA_31_405B, 405.9, 405.9),
        (c.DEEPSEEK_V3, 671.0, 37.6),
        (
            {
                "model_type": "mixtral",
                "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
                "num_local_experts": 8, "num_experts_per_tok": 2,
            },
            46.7,
            12.9,
        ),
        (
            {
                "model_type": "qwen3_moe",
                "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
                "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
                "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
                "moe_intermediate_size": 768, "decoder_sparse_step": 1,
            },
            30.5,
            3.35,
        ),
        (
            {
                "model_type": "jamba",
                "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 65536,
                "num_experts": 16, "num_experts_per_tok": 2, "attn_layer_period": 8,
                "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1,
                "mamba_d_state": 16, "mamba_expand": 2,
            },
            51.6,
            12.0,
        ),
        (
            {
                "model_type": "ernie4_5_moe",
                "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28,
                "num_attention_heads": 20, "num_key_value_heads": 4, "vocab_size": 103424,
                "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
                "moe_intermediate_size": 1536, "moe_layer_start_index": 1,
                "tie_word_embeddings": True,
            },
            21.8,
            3.35,
        ),
        (
            {
                "model_type": "dbrx",
                "d_model": 6144, "n_layers": 40, "n_heads": 48, "vocab_size": 100352,
                "attn_config": {"kv_n_heads": 8},
                "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
            },
            131.6,
            36.5,
        ),
    ],
    ids=[
        *("Llama-3-70B", "Llama-3-8B", "Llama-3.1-405B", "DeepSeek-V3"),
        *("Mixtral", "Qwen3", "Jamba", "Ernie 4.5", "DBRX"),
    ],
)  # fmt: skip
def test_estimates_are_near_published_counts(config: c.Json, total: float, active: float) -> None:
    found = estimate(with_defaults(c.decode(config)))
    assert found is not None
    assert found.total / 1e9 == pytest.approx(total, rel=0.01)
    assert found.active / 1e9 == pytest.approx(active, rel=0.01)


def test_no_estimate_where_the_file_says_too_little() -> None:
    assert estimate(c.decode({**c.SMALL, "vocab_size": None})) is None
    assert estimate(c.decode({"hidden_size": 8, "vocab_size": 8})) is None


@pytest.mark.parametrize(
    ("quantisation", "nbytes"),
    [
        (None, 2000),
        ({"quant_method": "fp8"}, 1000),
        ({"quant_method": "mxfp4"}, 531),
        ({"quant_method": "gptq", "bits": 4}, 500),
        ({"quant_method": "awq", "w_bit": 4}, 500),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 1000),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 1000),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, 562),
        ({"quant_method": "of tomorrow"}, 2000),
        ({"bits": "many", "config_groups": [1]}, 2000),
    ],
)
def test_weights_estimated_from_parameters(quantisation: c.Json | None, nbytes: int) -> None:
    config = c.decode({**c.SMALL, "quantization_config": quantisation})
    parameters = Parameters(1000, 1000, "a test")
    assert estimate_weights(parameters, config, Dtype.BF16).nbytes == nbytes
