# SPDX-License-Identifier: Apache-2.0
"""The state that a recurrent layer keeps for a request: a convolution's last inputs and a memory.

The formulas are those of the layers' definitions: Mamba (Gu and Dao, 2023), Mamba-2 (Dao and Gu,
2024), gated DeltaNet (Yang et al., 2024), Kimi Delta Attention (Kimi Team, 2025), short convolution
(LFM2), linear attention (Lightning Attention, MiniMax-01).
"""

from __future__ import annotations

from vllm_tiered_kv.sizing.dtypes import Dtype, parse_dtype
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.hf_config import HIDDEN, HfConfig
from vllm_tiered_kv.sizing.layers import StateLayers


def state_layers(config: HfConfig, count: int, model: Dtype, asked: Dtype | None) -> StateLayers:
    """What ``count`` recurrent layers keep.

    Args:
        config: of the model.
        count: of the layers.
        model: format of the model's activations, which the convolution keeps.
        asked: format of the memory; None: as the file says, or the model's.

    Raises:
        SizingError: a dimension is missing.
    """
    memory = asked or _memory_dtype(config, model)
    if config.linear_attn_config is not None:
        return _kimi_delta(config, count, model)
    if config.linear_num_value_heads:
        return _gated_delta(config, count, model, memory)
    if config.conv_L_cache:
        width = _need(config, "--", "conv_dim", "hidden_size")
        return StateLayers(count, "convolution", width * (config.conv_L_cache - 1) * model.nbytes)
    if config.attn_type_list or (config.model_type or "").startswith("minimax"):
        heads = _need(config, "--heads", "num_attention_heads")
        dim = config.head_dim or _need(config, "--", "hidden_size") // heads
        return StateLayers(count, "linear attention", heads * dim * dim * memory.nbytes)
    mamba_heads = config.first("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads")
    if mamba_heads is None:
        return _mamba1(config, count, model, memory)
    return _mamba2(config, count, mamba_heads, model, memory)


def inner_width(config: HfConfig) -> int:
    """Numbers a token inside a Mamba layer.

    Raises:
        SizingError: a dimension is missing.
    """
    heads = config.first("mamba_num_heads")
    if heads and config.mamba_head_dim:
        return heads * config.mamba_head_dim
    if config.mamba_d_ssm:
        return config.mamba_d_ssm
    hidden = _need(config, "--", *HIDDEN)
    return int((config.mamba_expand or config.expand or 2) * hidden)


def _mamba1(config: HfConfig, count: int, model: Dtype, memory: Dtype) -> StateLayers:
    width = inner_width(config)
    convolution = width * (_taps(config) - 1) * model.nbytes
    return StateLayers(count, "mamba", convolution + width * _depth(config) * memory.nbytes)


def _mamba2(config: HfConfig, count: int, heads: int, model: Dtype, memory: Dtype) -> StateLayers:
    width, depth, taps = inner_width(config), _depth(config), _taps(config)
    head_dim = config.first("mamba_head_dim", "mamba_headdim", "mamba_d_head") or width // heads
    groups = config.first("mamba_n_groups", "mamba_ngroups", "n_groups") or 1
    split = width * (taps - 1) * model.nbytes + heads * head_dim * depth * memory.nbytes
    group = 2 * depth * (taps - 1) * model.nbytes
    return StateLayers(count, "mamba2", split, groups, group)


def _gated_delta(config: HfConfig, count: int, model: Dtype, memory: Dtype) -> StateLayers:
    keys = _need(config, "--", "linear_num_key_heads")
    values = _need(config, "--", "linear_num_value_heads")
    key_dim = _need(config, "--", "linear_key_head_dim")
    value_dim = _need(config, "--", "linear_value_head_dim")
    width = 2 * keys * key_dim + values * value_dim
    taps = config.linear_conv_kernel_dim or 4
    state = values * value_dim * key_dim * memory.nbytes
    return StateLayers(count, "gated delta net", width * (taps - 1) * model.nbytes + state)


def _kimi_delta(config: HfConfig, count: int, model: Dtype) -> StateLayers:
    linear = config.linear_attn_config
    if linear is None or not linear.num_heads or not linear.head_dim:
        raise SizingError("linear_attn_config lacks num_heads or head_dim")
    width = 3 * linear.num_heads * linear.head_dim
    taps = linear.short_conv_kernel_size or 4
    # vLLM keeps this memory in 32 bits whatever the model's format is.
    state = linear.num_heads * linear.head_dim**2 * Dtype.FP32.nbytes
    return StateLayers(count, "kimi delta attention", width * (taps - 1) * model.nbytes + state)


def _memory_dtype(config: HfConfig, model: Dtype) -> Dtype:
    named = config.mamba_ssm_cache_dtype or config.mamba_ssm_dtype
    if named:
        return parse_dtype(named)
    return Dtype.FP32 if config.model_type == "nemotron_h" else model


def _taps(config: HfConfig) -> int:
    return config.first("mamba_d_conv", "conv_kernel") or 4


def _depth(config: HfConfig) -> int:
    return _need(config, "--", "mamba_d_state", "ssm_state_size", "state_size")


def _need(config: HfConfig, flag: str, *names: str) -> int:
    value = config.first(*names)
    if value is None:
        hint = f"; give {flag}" if flag != "--" else ""
        raise SizingError(f"{names[0]} is missing, without which a state has no size{hint}")
    return value
