# SPDX-License-Identifier: Apache-2.0
"""The fields of a model's ``config.json`` that say what it keeps and computes, checked.

Names differ between families, so many fields mean the same. The file comes from outside: its size,
lists and numbers are bounded, and what is not known is left alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec

from vllm_tiered_kv.mistakes import REFUSED, explain
from vllm_tiered_kv.sizing.errors import SizingError

MAX_CONFIG_BYTES = 16 << 20
QUANTISATION = "hf_quant_config.json"
"""ModelOpt's file beside an older ``config.json`` that does not say how it is quantised."""
MAX_LAYERS = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""A dimension or a number of things."""
Factor = Annotated[float, msgspec.Meta(gt=0, le=1024)]
Names = Annotated[list[str], msgspec.Meta(max_length=MAX_LAYERS)]
Indices = Annotated[list[Count], msgspec.Meta(max_length=MAX_LAYERS)]
Counts = Count | Indices | None
"""One for all layers or one for each; where it is used, the largest stands for all."""


class LinearAttention(msgspec.Struct, frozen=True):
    """``linear_attn_config`` of Kimi Linear; layers are counted from 1."""

    full_attn_layers: Indices = []
    kda_layers: Indices = []
    num_heads: Count | None = None
    head_dim: Count | None = None
    short_conv_kernel_size: Count | None = None


class BlockAttention(msgspec.Struct, frozen=True):
    no_op: bool = False
    replace_with_linear: bool = False
    n_heads_in_group: Count | None = None


class Block(msgspec.Struct, frozen=True):
    """One of ``block_configs``, as models have that were pruned layer by layer."""

    attention: BlockAttention | None = None


class NestedAttention(msgspec.Struct, frozen=True):
    """``attn_config`` of DBRX and MPT."""

    kv_n_heads: Count | None = None


class NestedExperts(msgspec.Struct, frozen=True):
    """``ffn_config`` of DBRX."""

    ffn_hidden_size: Count | None = None
    moe_num_experts: Count | None = None
    moe_top_k: Count | None = None


class HfConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A ``config.json``, or the part of it that describes the text model."""

    inside: bool = False
    """It is a part: what is not in it may be what its family says."""
    model_type: str | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, Any] | None = None

    # Layers and attention
    num_hidden_layers: Count | None = None
    n_layer: Count | None = None
    n_layers: Count | None = None
    num_layers: Count | None = None
    hidden_size: Count | None = None
    n_embd: Count | None = None
    n_embed: Count | None = None
    d_model: Count | None = None
    num_attention_heads: Count | None = None
    n_head: Count | None = None
    n_heads: Count | None = None
    num_key_value_heads: Count | None = None
    num_kv_heads: Count | None = None
    n_head_kv: Count | None = None
    multi_query_group_num: Count | None = None
    num_attention_groups: Count | None = None
    multi_query: bool | None = None
    multi_query_attention: bool | None = None
    new_decoder_architecture: bool | None = None
    head_dim: Count | None = None
    kv_channels: Count | None = None
    hidden_size_per_head: Count | None = None
    attn_config: NestedAttention | None = None
    block_configs: Annotated[list[Block], msgspec.Meta(max_length=MAX_LAYERS)] | None = None
    num_kv_shared_layers: Count | None = None

    # Latent attention
    kv_lora_rank: Count | None = None
    q_lora_rank: Count | None = None
    qk_rope_head_dim: Count | None = None
    qk_nope_head_dim: Count | None = None
    v_head_dim: Count | None = None
    index_head_dim: Count | None = None
    index_topk: Count | None = None

    # Which layer is of which kind
    layer_types: Names | None = None
    layers_block_type: Names | None = None
    hybrid_override_pattern: str | None = None
    attn_type_list: Indices | None = None
    attn_layer_indices: Indices | None = None
    full_attn_idxs: Indices | None = None
    hybrid_layer_ids: Indices | None = None
    attn_layer_period: Count | None = None
    attn_layer_offset: Count | None = None
    full_attention_interval: Count | None = None
    linear_attn_config: LinearAttention | None = None

    # Windows
    sliding_window: Count | None = None
    max_position_embeddings: Count | None = None
    use_sliding_window: bool | None = None
    max_window_layers: Count | None = None
    sliding_window_pattern: Count | str | None = None
    attention_chunk_size: Count | None = None
    no_rope_layers: Indices | None = None
    no_rope_layer_interval: Count | None = None
    global_head_dim: Count | None = None
    num_global_key_value_heads: Count | None = None
    attention_k_eq_v: bool | None = None

    # States
    mamba_d_state: Count | None = None
    ssm_state_size: Count | None = None
    state_size: Count | None = None
    mamba_d_conv: Count | None = None
    conv_kernel: Count | None = None
    mamba_expand: Factor | None = None
    expand: Factor | None = None
    mamba_d_ssm: Count | None = None
    mamba_n_heads: Count | None = None
    mamba_num_heads: Count | None = None
    n_mamba_heads: Count | None = None
    num_heads: Count | None = None
    mamba_d_head: Count | str | None = None
    mamba_head_dim: Count | None = None
    mamba_headdim: Count | None = None
    mamba_n_groups: Count | None = None
    mamba_ngroups: Count | None = None
    n_groups: Count | None = None
    linear_num_key_heads: Count | None = None
    linear_num_value_heads: Count | None = None
    linear_key_head_dim: Count | None = None
    linear_value_head_dim: Count | None = None
    linear_conv_kernel_dim: Count | None = None
    conv_dim: Count | None = None
    conv_L_cache: Count | None = None  # noqa: N815 - the file's name for it
    mamba_ssm_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None

    # Parameters
    vocab_size: Count | None = None
    tie_word_embeddings: bool | None = None
    intermediate_size: Counts = None
    ffn_hidden_size: Count | None = None
    n_inner: Count | None = None
    ffn_dim: Count | None = None
    intermediate_size_mlp: Count | None = None
    num_experts: Counts = None
    num_local_experts: Counts = None
    n_routed_experts: Counts = None
    moe_num_experts: Counts = None
    num_experts_per_tok: Counts = None
    num_experts_per_token: Counts = None
    moe_k: Counts = None
    moe_top_k: Counts = None
    moe_topk: Counts = None
    moe_intermediate_size: Counts = None
    n_shared_experts: Counts = None
    num_shared_experts: Counts = None
    moe_num_shared_experts: Counts = None
    shared_expert_intermediate_size: Count | None = None
    moe_shared_expert_intermediate_size: Count | None = None
    shared_intermediate_size: Count | None = None
    first_k_dense_replace: Count | None = None
    moe_layer_start_index: Counts = None
    moe_layer_freq: Counts = None
    decoder_sparse_step: Count | None = None
    interleave_moe_layer_step: Count | None = None
    expert_layer_period: Count | None = None
    expert_layer_offset: Count | None = None
    ffn_config: NestedExperts | None = None
    vocab_size_per_layer_input: Count | None = None
    hidden_size_per_layer_input: Count | None = None

    # What changes sizes in ways that are not known here
    is_encoder_decoder: bool | None = None
    compress_ratios: Any = None
    hybrid_layer_pattern: Any = None
    swa_head_dim: Any = None
    swa_num_key_value_heads: Any = None
    attention_other_setting: Any = None

    def first(self, *names: str) -> int | None:
        """The first of some fields that is given and not 0; of a list the largest."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, list):
                value = max(value, default=0)
            if value and isinstance(value, int):
                return value
        return None


HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
"""Names for the numbers of a token between layers."""

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where a multimodal model describes its text model; ``thinker_config`` has one of these."""


def decode_config(data: bytes, name: str, quantisation: bytes | None = None) -> HfConfig:
    """The text model's part of a ``config.json``.

    What it lacks and all parts share (formats, quantisation) is taken from the whole.

    Args:
        quantisation: what :data:`QUANTISATION` holds, where it is there.

    Raises:
        SizingError: it is not such a file; ``name`` says which.
    """
    raw = _object(data, name)
    if raw.get("quantization_config") is None:
        if quantisation is not None:
            raw["quantization_config"] = _object(quantisation, QUANTISATION)
        else:  # the older name
            raw["quantization_config"] = raw.get("compression_config")
    text, path = _text_part(raw)
    for key in ("torch_dtype", "dtype", "quantization_config"):
        if text.get(key) is None and raw.get(key) is not None:
            text = {**text, key: raw[key]}
    try:
        return msgspec.convert({**text, "inside": bool(path)}, HfConfig)
    except REFUSED as error:
        raise SizingError(f"{name}{path}: {explain(error, text, HfConfig)}") from None
    except RecursionError:
        raise SizingError(f"{name}{path} is nested too deeply") from None


def read_config(path: Path) -> HfConfig:
    """The text model's part of the file ``path``.

    Raises:
        SizingError: it cannot be read, or is not such a file.
    """
    beside = path.with_name(QUANTISATION)
    quantisation = _read(beside) if beside.is_file() else None
    return decode_config(_read(path), str(path), quantisation)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise SizingError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_CONFIG_BYTES:
        raise SizingError(f"{path} is longer than {MAX_CONFIG_BYTES} bytes")
    return data


def _object(data: bytes, name: str) -> dict[str, Any]:
    try:
        # Not msgspec's decoder: these files may hold Infinity.
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SizingError(f"{name} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SizingError(f"{name} does not hold an object")
    return found


def _text_part(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The innermost description of a text model, and where it stands."""
    part, path = raw, ""
    for name in ("thinker_config", *TEXT_PARTS):
        inner = part.get(name)
        if isinstance(inner, dict):
            part, path = inner, f"{path}, {name}"
    return part, path
