# SPDX-License-Identifier: Apache-2.0
"""Every import from vLLM's internals, in one place.

What vLLM renames or moves is mended here and nowhere else. Each name says which part of
vLLM's connector contract (0.32) it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_none_hash_seed, resolve_kv_cache_block_sizes
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_tiered_kv.geometry import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig as VllmConfig
    from vllm.v1.core.block_pool import BlockPool as BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock as KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
    from vllm.v1.request import Request as Request

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "UnsupportedModel",
    "block_sizes",
    "bytes_per_block",
    "describe_group",
    "get_none_hash_seed",
    "init_logger",
    "register_connector",
    "worker_rank",
    "world_size",
]


class UnsupportedModel(ValueError):
    """This model's KV cache is of a kind that cannot be served; the message says which."""


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Make a connector known by name; doing it twice is harmless."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module_path, class_name)


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
        raise UnsupportedModel("models with Mamba or linear-attention state are not supported yet")
    if isinstance(spec, ChunkedLocalAttentionSpec):
        raise UnsupportedModel("chunked local attention is not supported yet")
    if isinstance(spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec)):
        raise UnsupportedModel("encoder attention has no reusable prefix")
    raise UnsupportedModel(f"KV cache spec {type(spec).__name__} is not supported")


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


def world_size(vllm_config: VllmConfig) -> int:
    """Ranks that each hold a part of this engine's KV cache."""
    return int(vllm_config.parallel_config.world_size)


def worker_rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among :func:`world_size`."""
    return int(vllm_config.parallel_config.rank)


def context_parallel_size(vllm_config: VllmConfig) -> int:
    """Ranks that share the tokens of one block (decode context parallelism)."""
    return int(vllm_config.parallel_config.decode_context_parallel_size)


def has_prefix_caching(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's own prefix cache on the device is on."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse, by name, what would be served wrongly.

    Raises:
        UnsupportedModel: the message says what and why.
    """
    speculative = vllm_config.speculative_config
    drafts = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    if drafts or (speculative is not None and speculative.use_eagle()):
        raise UnsupportedModel(
            "speculative decoding with a draft model that has KV of its own (EAGLE, MTP) is not "
            "supported yet: its last block lags behind the tokens"
        )
    cacheable = kv_cache_config.prefix_cacheable_group_ids
    if len(cacheable) != len(kv_cache_config.kv_cache_groups):
        raise UnsupportedModel("some KV cache groups of this model cannot be cached by prefix")
    if not kv_cache_config.kv_cache_groups:
        raise UnsupportedModel("this model has no KV cache")


def null_block_id(pool: BlockPool) -> int:
    """The id that stands for "no block here" in a block table."""
    return int(pool.null_block.block_id)


def watch_blocks(pool: BlockPool, block_ids: Iterable[int], on_reuse: Any) -> None:
    """Be told before any of these blocks is handed out again or the cache is reset.

    The blocks must be held by somebody now. They are not held any longer by this call:
    they count as free as soon as their owner frees them, so nothing that waits for free
    blocks (preemption, a cache reset, pause, sleep) ever waits for us.
    """
    blocks: list[KVCacheBlock] = [pool.blocks[block_id] for block_id in block_ids]
    pool.touch(blocks)
    pool.unpin_blocks(blocks, on_reuse)
