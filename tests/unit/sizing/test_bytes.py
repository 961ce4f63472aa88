# SPDX-License-Identifier: Apache-2.0
"""Bytes of KV: known answers, kinds of layers, and how they are spread over GPUs."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.sizing import _configs as c
from vllm_tiered_kv.sizing.capacity import (
    Device,
    conversations_that_fit,
    requests_that_fit,
    tokens_that_fit,
)
from vllm_tiered_kv.sizing.dtypes import Dtype, parse_dtype
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.hf_config import HfConfig, decode_config
from vllm_tiered_kv.sizing.layers import (
    AttentionLayers,
    Footprint,
    Reach,
    Shape,
    StateLayers,
    WindowBytes,
)
from vllm_tiered_kv.sizing.parameters import estimate
from vllm_tiered_kv.sizing.read import Choices, read_model
from vllm_tiered_kv.sizing.timing import Work
from vllm_tiered_kv.sizing.work import attention_pairs


def token_bytes(config: c.Json, kv: Dtype | None = None) -> int:
    return c.read(config, kv).shape.one_copy().bytes_per_token


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (c.LLAMA_3_70B, 327_680),
        (c.LLAMA_31_405B, 516_096),
        (c.LLAMA_3_8B, 131_072),
        (c.LLAMA_2_7B, 524_288),
        (c.DEEPSEEK_V3, 61 * 576 * 2),
    ],
    ids=["Llama-3-70B", "Llama-3.1-405B", "Llama-3-8B", "Llama-2-7B", "DeepSeek-V3"],
)
def test_known_bytes_a_token_and_half_of_them_in_fp8(config: c.Json, expected: int) -> None:
    assert token_bytes(config) == expected
    assert token_bytes(config, Dtype.FP8) == expected // 2
    assert token_bytes(config, Dtype.FP32) == expected * 2


def test_known_bytes_of_a_request() -> None:
    footprint = c.read(c.LLAMA_3_70B).shape.one_copy()
    assert footprint.request_bytes(131_072) == 42_949_672_960
    # 40 GB is a figure in circulation for this one.
    assert footprint.request_bytes(8_192) == 2_684_354_560


def test_one_kv_head() -> None:
    config = {**c.SMALL, "num_key_value_heads": 1}
    assert token_bytes(config) == 8 * 2 * 1 * 32 * 2


def test_sliding_windows_are_a_fixed_part() -> None:
    gemma = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "torch_dtype": "bfloat16",
    }
    footprint = c.read(gemma).shape.one_copy()
    layer = 2 * 4 * 256 * 2
    assert footprint.bytes_per_token == 5 * layer
    assert footprint.windows == (WindowBytes(1024, 29 * layer),)
    assert footprint.fixed_bytes == 1024 * 29 * layer
    assert footprint.request_bytes(100) == 100 * 34 * layer
    assert footprint.request_bytes(4096) == 4096 * 5 * layer + 1024 * 29 * layer
    assert footprint.tier_bytes_per_token == 34 * layer


def test_a_window_that_no_prompt_outgrows_is_none() -> None:
    phi = {**c.SMALL, "model_type": "phi3", "sliding_window": 4096}
    assert c.read(phi).shape.one_copy() == c.read(c.SMALL).shape.one_copy()
    assert c.read({**phi, "sliding_window": 4095}).shape.one_copy().bytes_per_token == 0
    named = {**phi, "layer_types": ["sliding_attention"] * 8}
    assert c.read(named).shape.one_copy() == c.read(c.SMALL).shape.one_copy()


def test_a_text_model_inside_another_is_found_with_what_stands_outside() -> None:
    whole = {
        "model_type": "gemma3",
        "torch_dtype": "float16",
        "text_config": {**c.SMALL, "model_type": "llama", "torch_dtype": None},
        "vision_config": {"num_hidden_layers": 99},
    }
    model = c.read(whole)
    assert model.shape.one_copy().bytes_per_token == 8 * 2 * 2 * 32 * 2
    assert model.dtype is Dtype.FP16
    omni = {"thinker_config": {"text_config": c.SMALL}}
    assert token_bytes(omni) == 8 * 2 * 2 * 32 * 2


def test_sparse_latent_attention_keeps_an_indexers_keys_too() -> None:
    config = {**c.DEEPSEEK_V3, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
    # vLLM: 576 numbers, and 128 bytes of keys with a scale of four; packed in 8 bits, 656 bytes.
    assert token_bytes(config) == 61 * (576 * 2 + 132)
    assert token_bytes(config, Dtype.FP8) == 61 * (656 + 132)


def test_names_for_the_width_of_a_token() -> None:
    bloom = {"model_type": "bloom", "n_layer": 70, "n_embed": 14336, "num_attention_heads": 112}
    assert token_bytes(bloom) == 70 * 2 * 112 * 128 * 2


def test_kimi_linear_has_latent_layers_and_states() -> None:
    config = {
        **c.SMALL,
        "model_type": "kimi_linear",
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "num_heads": 8,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    }
    footprint = c.read(config).shape.one_copy()
    assert footprint.bytes_per_token == 2 * 576 * 2
    assert footprint.state_bytes == 6 * (3 * 8 * 32 * 3 * 2 + 8 * 32 * 32 * 4)


def test_layers_pruned_one_by_one() -> None:
    def block(group: int | None) -> dict[str, Any]:
        return {"attention": {"no_op": group is None, "n_heads_in_group": group}}

    config = {**c.SMALL, "block_configs": [block(4), block(None), block(8)], "num_hidden_layers": 3}
    assert token_bytes(config) == (2 + 1) * 2 * 32 * 2


def test_all_names_for_layers_without_keys_and_values() -> None:
    zamba = {**c.ARCHITECTURES["zamba2"], "layers_block_type": None}
    assert c.read(zamba).shape == c.read(c.ARCHITECTURES["zamba2"]).shape
    nemotron = {**c.ARCHITECTURES["nemotron_h"], "hybrid_override_pattern": None}
    nemotron["layers_block_type"] = ["mamba", "mlp", "mamba", "attention"] * 2
    pattern = {**c.ARCHITECTURES["nemotron_h"], "hybrid_override_pattern": "M-M*M-M*"}
    assert c.read(nemotron).shape == c.read(pattern).shape
    assert estimate(c.decode(nemotron)) == estimate(c.decode(pattern))
    bamba = {
        **c.ARCHITECTURES["granitemoehybrid"],
        "layer_types": None,
        "attn_layer_indices": [3, 7],
    }
    granite = c.read(c.ARCHITECTURES["granitemoehybrid"]).shape
    assert c.read(bamba).shape == granite
    lfm = {**c.ARCHITECTURES["lfm2"], "layer_types": None, "full_attn_idxs": [2, 6]}
    assert c.read(lfm).shape == c.read(c.ARCHITECTURES["lfm2"]).shape
    minimax = {**c.SMALL, "attn_type_list": [0, 0, 0, 1] * 2}
    footprint = c.read(minimax).shape.one_copy()
    assert footprint.bytes_per_token == 2 * 2 * 2 * 32 * 2
    assert footprint.state_bytes == 6 * 8 * 32 * 32 * 2


def test_the_format_of_a_state_is_what_is_asked_for_else_what_the_file_says() -> None:
    config = c.ARCHITECTURES["granitemoehybrid"]
    half = c.read(config).shape.one_copy().state_bytes
    whole = c.read(config, state=Dtype.FP32).shape.one_copy().state_bytes
    memory = 6 * 8 * 64 * 16
    assert whole - half == 2 * memory
    said = {**config, "mamba_ssm_dtype": "float32"}
    assert c.read(said).shape.one_copy().state_bytes == whole
    nemotron = c.ARCHITECTURES["nemotron_h"]
    assert c.read(nemotron).shape == c.read(nemotron, state=Dtype.FP32).shape


@pytest.mark.parametrize(
    ("tp", "heads_each"), [(1, 8), (2, 4), (8, 1), (16, 1), (64, 1)], ids=lambda v: str(v)
)
def test_few_heads_are_copied_over_many_gpus(tp: int, heads_each: int) -> None:
    shape = c.read(c.LLAMA_3_70B).shape
    head = 80 * 2 * 128 * 2
    assert shape.on_rank(tp).bytes_per_token == heads_each * head
    assert shape.on_all_ranks(tp).bytes_per_token == heads_each * head * tp
    assert shape.one_copy().bytes_per_token == 8 * head


def test_a_latent_vector_is_whole_on_every_gpu() -> None:
    shape = c.read(c.DEEPSEEK_V3).shape
    assert shape.on_rank(8) == shape.one_copy()
    assert shape.on_all_ranks(8).bytes_per_token == 8 * 70_272


@pytest.mark.parametrize("tp", [3, 12])
def test_heads_that_cannot_be_spread_evenly(tp: int) -> None:
    with pytest.raises(SizingError, match=f"8 KV heads cannot be spread over {tp} GPUs"):
        c.read(c.LLAMA_3_70B).shape.on_rank(tp)


def test_states_that_cannot_be_spread_evenly() -> None:
    with pytest.raises(SizingError, match="mamba2 state"):
        StateLayers(1, "mamba2", 100).bytes_on_rank(3)
    with pytest.raises(SizingError, match="6 mamba2 groups"):
        StateLayers(1, "mamba2", 96, 6, 10).bytes_on_rank(4)


@pytest.mark.parametrize(
    ("change", "missing"),
    [
        ({"num_hidden_layers": None}, "number of layers is missing.*--layers"),
        ({"num_attention_heads": None, "num_key_value_heads": None}, "is missing; give --heads"),
        ({"head_dim": None, "hidden_size": None}, "head_dim is missing.*--head-dim"),
        ({"head_dim": None, "hidden_size": 7}, "hidden_size 7 is less than one number"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing; give --rope-dim"),
        ({"layer_types": ["full_attention", "perceiver"] * 4}, "layer 1 is of type 'perceiver'"),
        ({"layer_types": ["full_attention"] * 7}, "types of 7 of 8 layers are given"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window is missing"),
        ({"hybrid_override_pattern": "M?"}, "'\\?' is not known"),
        ({"attn_layer_period": 2}, "mamba_d_state is missing"),
        ({"compress_ratios": [1, 4]}, "compressed cache"),
        ({"is_encoder_decoder": True}, "an encoder"),
        ({"num_hidden_layers": 5000}, "more than a model has"),
        ({"torch_dtype": "int3"}, "'int3' is not a format"),
        ({"num_hidden_layers": "80"}, "json: num_hidden_layers: '80' is not valid: expected"),
        ({"num_hidden_layers": -1}, "-1 is not valid: expected a whole number of at least 0"),
        ({"num_key_value_heads": 1 << 40}, "a whole number of at most 4294967296"),
        ({"layer_types": ["full_attention"] * 5000}, "a list of at most 4096"),
        ({"quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}},
         "'NVFP4' is not known here; give --kv-dtype"),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named(change: c.Json, missing: str) -> None:
    with pytest.raises(SizingError, match=missing):
        c.read({**c.SMALL, **change})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "is not JSON"),
        (b"[]", "does not hold an object"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"num_hidden_layers": ' + b"9" * 5_000 + b"}", "is not JSON"),
        (
            b'{"text_config": {"num_hidden_layers": true}}',
            "x, text_config: num_hidden_layers: True is",
        ),
        (b"\xff\xfe\xfd", "is not JSON"),
        (rb'{"\ud800": 1}', "half of a character"),
    ],
)
def test_a_file_that_is_no_configuration(data: bytes, reason: str) -> None:
    with pytest.raises(SizingError, match=reason):
        decode_config(data, "x")


WORDS = st.sampled_from(["auto", "mamba", "full_attention", "llama", "M*-E", ""])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([1 << 80, 0.5, math.inf, math.nan])
    | WORDS
)
JSON = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(WORDS, SCALARS, max_size=2)
FIELDS = st.sampled_from(HfConfig.__struct_fields__)


@given(field=FIELDS, value=JSON, base=st.sampled_from([*c.ARCHITECTURES]))
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
def test_whatever_a_field_holds_is_an_answer_or_a_sizing_error(
    field: str, value: object, base: str
) -> None:
    data = json.dumps({**c.ARCHITECTURES[base], field: value}).encode()
    try:
        model = read_model(decode_config(data, "config.json"), Choices())
    except SizingError:
        return
    assert model.shape.one_copy().request_bytes(1000) >= 0
    counted = estimate(model.config)
    assert counted is None or counted.total >= counted.active > 0
    with contextlib.suppress(SizingError):
        assert Work(1, attention_pairs(model)).flops(10) >= 20


def test_a_checkpoint_may_set_the_caches_format() -> None:
    quantised = {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}}
    model = c.read({**c.SMALL, "quantization_config": quantised})
    assert (model.kv_dtype, model.kv_dtype_source) == (Dtype.FP8, "quantization_config")
    older = {"producer": {"name": "modelopt"}, "quantization": {"kv_cache_quant_algo": "FP8"}}
    assert c.read({**c.SMALL, "quantization_config": older}).kv_dtype is Dtype.FP8
    weights_alone = {"quant_method": "compressed-tensors", "kv_cache_scheme": None}
    assert c.read({**c.SMALL, "quantization_config": weights_alone}).kv_dtype is Dtype.BF16


def test_llm_compressors_format_of_a_cache_counts_but_for_latent_attention() -> None:
    config = c.ARCHITECTURES["llama, 8-bit cache"]
    assert c.read(config).kv_dtype is Dtype.FP8
    old_name = {**config, "quantization_config": None}
    old_name["compression_config"] = config["quantization_config"]
    assert c.read(old_name).kv_dtype is Dtype.FP8
    latent = {**c.DEEPSEEK_V3, "quantization_config": config["quantization_config"]}
    assert token_bytes(latent) == 61 * 576 * 2
    scheme = {"num_bits": 8, "type": "int"}
    other = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    with pytest.raises(SizingError, match=r"format .* is not known here; give --kv-dtype"):
        c.read({**c.SMALL, "quantization_config": other})


def test_a_text_model_inside_another_leaves_out_what_its_family_says() -> None:
    text = {**c.SMALL, "num_key_value_heads": None, "head_dim": None, "num_attention_heads": 64}
    qwen = {"text_config": {**text, "model_type": "qwen2_5_vl_text", "hidden_size": 8192}}
    assert token_bytes(qwen) == 8 * 2 * 8 * 128 * 2
    llama = {"text_config": {**text, "model_type": "llama", "hidden_size": 8192}}
    assert token_bytes(llama) == 8 * 2 * 64 * 128 * 2
    unknown = {"text_config": {**text, "model_type": "of_tomorrow"}}
    with pytest.raises(SizingError, match=r"what of_tomorrow has then is not known.*--kv-heads"):
        c.read(unknown)
    assert token_bytes({**text, "model_type": "of_tomorrow"}) == 8 * 2 * 64 * 4 * 2


def test_names_of_formats() -> None:
    assert parse_dtype("torch.bfloat16") is Dtype.BF16
    assert parse_dtype("fp8_e5m2") is Dtype.FP8
    assert c.read({**c.SMALL, "torch_dtype": "float32"}).kv_dtype is Dtype.BF16
    assert c.read({**c.SMALL, "torch_dtype": None}).kv_dtype_source.startswith("no format")


ATTENTION = st.builds(
    AttentionLayers,
    count=st.integers(1, 100),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    key_dim=st.integers(1, 512),
    value_dim=st.integers(0, 512),
    element_bytes=st.sampled_from([1, 2, 4]),
    reach=st.sampled_from(Reach),
    window=st.integers(1, 4096),
)


@given(
    attention=st.lists(ATTENTION, min_size=1, max_size=4),
    tp=st.sampled_from([1, 2, 4, 8, 16]),
    tokens=st.integers(1, 100_000),
)
def test_no_byte_is_lost_over_gpus_and_every_token_costs(
    attention: list[AttentionLayers], tp: int, tokens: int
) -> None:
    shape = Shape(tuple(attention))
    one, everywhere = shape.one_copy(), shape.on_all_ranks(tp)
    assert everywhere.request_bytes(tokens) >= one.request_bytes(tokens)
    if all(group.kv_heads % tp == 0 for group in attention):
        assert everywhere == one
    assert one.request_bytes(tokens) <= one.stored_bytes(tokens)
    assert one.request_bytes(tokens + 1) >= one.request_bytes(tokens)


@given(
    footprint=st.builds(
        Footprint,
        bytes_per_token=st.integers(1, 1 << 20),
        windows=st.just((WindowBytes(128, 64),)),
        state_bytes=st.integers(0, 1 << 20),
    ),
    capacity=st.integers(0, 1 << 40),
    tokens=st.integers(1, 1 << 20),
)
def test_what_fits_fits_and_one_more_does_not(
    footprint: Footprint, capacity: int, tokens: int
) -> None:
    held = tokens_that_fit(footprint, capacity)
    if held:
        assert footprint.stored_bytes(held) <= capacity
    if capacity >= footprint.state_bytes:
        assert footprint.stored_bytes(held + 1) > capacity
    count = conversations_that_fit(footprint, capacity, tokens)
    assert count * footprint.stored_bytes(tokens) <= capacity
    assert (count + 1) * footprint.stored_bytes(tokens) > capacity


def test_requests_on_gpus_after_the_weights() -> None:
    shape = c.read(c.LLAMA_3_70B).shape
    device = Device(memory=80_000_000_000, utilisation=0.9, weights=141_107_412_992, tp=8)
    assert device.free == 72_000_000_000 - 17_638_426_624
    assert requests_that_fit(shape, device, 131_072) == device.free // (40_960 * 131_072) == 10
    full = Device(memory=80_000_000_000, utilisation=0.9, weights=141_107_412_992, tp=1)
    assert (full.free, requests_that_fit(shape, full, 1)) == (0, 0)
