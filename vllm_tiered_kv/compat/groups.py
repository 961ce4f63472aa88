# SPDX-License-Identifier: Apache-2.0
"""KV cache groups: their kinds and their sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_tiered_kv.compat.unsupported import UnsupportedModel
from vllm_tiered_kv.geometry import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def block_sizes(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """``(scheduler block size, hash block size)`` in tokens, as vLLM's scheduler has them."""
    scheduler_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return int(scheduler_tokens), int(hash_tokens)


def describe_group(spec: KVCacheSpec, dcp: int) -> tuple[GroupKind, int, int]:
    """``(kind, tokens a block, tokens a window)`` of one KV cache group; no window: 0.

    Raises:
        UnsupportedModel: a spec whose blocks this version does not know how to restore.
    """
    if isinstance(spec, UniformTypeKVCacheSpecs):
        parts = {describe_group(part, dcp) for part in spec.kv_cache_specs.values()}
        if len(parts) != 1:
            raise UnsupportedModel(f"layers of one KV cache group differ in kind: {parts}")
        return parts.pop()
    tokens = spec.block_size * (dcp if spec.dcp_sharded else 1)
    if isinstance(spec, RSWASpec):
        raise UnsupportedModel("reference sliding window attention is not supported")
    if isinstance(spec, SlidingWindowSpec):
        if not spec.prefix_cacheable:
            raise UnsupportedModel("sliding window groups with bounded replay are not supported")
        return GroupKind.WINDOW, tokens, spec.sliding_window + spec.extra_retained_tokens
    if isinstance(spec, FullAttentionSpec):
        return GroupKind.FULL, tokens, 0
    if isinstance(spec, MambaSpec):
        if spec.mamba_cache_mode != "align":
            raise UnsupportedModel(
                f"mamba_cache_mode is {spec.mamba_cache_mode!r}: states of Mamba and linear "
                "attention are kept with --enable-prefix-caching and --mamba-cache-mode align only"
            )
        if spec.num_speculative_blocks:
            raise UnsupportedModel(
                "speculative decoding with Mamba or linear-attention layers is not supported: "
                "their states are settled only after the step they were computed in"
            )
        return GroupKind.STATE, tokens, 0
    if isinstance(spec, ChunkedLocalAttentionSpec):
        raise UnsupportedModel("chunked local attention is not supported yet")
    if isinstance(spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec)):
        raise UnsupportedModel("encoder attention has no reusable prefix")
    raise UnsupportedModel(f"KV cache spec {type(spec).__name__} is not supported")


def has_state(spec: KVCacheSpec) -> bool:
    """Whether the layers keep a recurrent state instead of a place for every token."""
    return isinstance(spec, MambaSpec)


def bytes_per_block(kv_cache_config: KVCacheConfig, group_id: int) -> int:
    """Bytes of one block of a group over all its layers on this rank (padding included)."""
    pages: dict[str, int] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        strides = [tensor.block_stride]
        if len(tensor.layers) > 1:
            strides.append(tensor.layer_stride)
        pages.update(dict.fromkeys(tensor.layers, min(strides)))
    names = kv_cache_config.kv_cache_groups[group_id].layer_names
    return sum(pages.get(name, 0) for name in names)
