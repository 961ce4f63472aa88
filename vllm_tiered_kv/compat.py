# SPDX-License-Identifier: Apache-2.0
"""Every import from vLLM's internals, in one place.

What vLLM renames or moves is mended here and nowhere else. Each name says which part of
vLLM's connector contract (0.32) it stands for.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
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
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_tiered_kv.geometry import GroupKind

if TYPE_CHECKING:
    from vllm.config import LoadConfig as LoadConfig
    from vllm.config import ModelConfig as ModelConfig
    from vllm.config import VllmConfig as VllmConfig
    from vllm.v1.core.block_pool import BlockPool as BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock as KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as KVCacheGroupSpec
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


def largest_layer_share(vllm_config: VllmConfig) -> float:
    """Layers of the rank that has the most, per layer of the first rank (pipelines differ)."""
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if stages == 1:
        return 1.0
    from vllm.distributed.utils import get_pp_indices

    total = vllm_config.model_config.get_total_num_hidden_layers()
    bounds = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    layers = [end - start for start, end in bounds]
    return float(max(layers) / max(1, layers[0]))


def has_prefix_caching(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's own prefix cache on the device is on."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse, by name, what would be served wrongly.

    Raises:
        UnsupportedModel: the message says what and why.
    """
    speculative = vllm_config.speculative_config
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise UnsupportedModel(
            "this pooling model needs the whole prompt in one pass: it cannot go on from a prefix"
        )
    if model.enable_sleep_mode:
        raise UnsupportedModel(
            "sleep mode is not supported yet: it takes KV memory away while chunks are copied"
        )
    drafts = any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups)
    if speculative is not None:
        drafts = drafts or speculative.use_eagle() or speculative.uses_draft_model()
    if drafts:
        raise UnsupportedModel(
            "speculative decoding with a draft model that has KV of its own (EAGLE, MTP) is not "
            "supported yet: its last block lags behind the tokens"
        )
    groups = kv_cache_config.kv_cache_groups
    if groups and all(isinstance(group.kv_cache_spec, MambaSpec) for group in groups):
        raise UnsupportedModel("models of Mamba layers alone are not supported yet")
    cacheable = kv_cache_config.prefix_cacheable_group_ids
    if len(cacheable) != len(kv_cache_config.kv_cache_groups):
        raise UnsupportedModel("some KV cache groups of this model cannot be cached by prefix")
    if not kv_cache_config.kv_cache_groups:
        raise UnsupportedModel("this model has no KV cache")


def null_block_id(pool: BlockPool) -> int:
    """The id that stands for "no block here" in a block table."""
    return int(pool.null_block.block_id)


def handed_over_states(output: SchedulerOutput, request_id: str) -> Sequence[tuple[int, int, int]]:
    """``(group, block, tokens)`` of each recurrent state this step leaves at a boundary.

    The block holds the state after that many tokens once the step has run, and is not written
    again before it is handed out.
    """
    block_state = output.kv_connector_block_state
    if block_state is None:
        return ()
    states: dict[str, list[tuple[int, int, int]]] = block_state.boundary_state_offloads
    return states.get(request_id, ())


def is_free(block: KVCacheBlock) -> bool:
    """Whether a watched block is still free: its watcher was called by a cache reset.

    A block that is handed out has left the free queue by then.
    """
    return block.next_free_block is not None


def watch_blocks(pool: BlockPool, block_ids: Iterable[int], on_reuse: Any) -> None:
    """Be told before any of these blocks is handed out again or the cache is reset.

    The blocks must be held by somebody now, or be free. They are not held by this call:
    they count as free as soon as their owner frees them, so nothing that waits for free
    blocks (preemption, a cache reset, pause) ever waits for us.
    """
    blocks: list[KVCacheBlock] = [pool.blocks[block_id] for block_id in block_ids]
    pool.touch(blocks)
    pool.unpin_blocks(blocks, on_reuse)


# -- what identity asks ---------------------------------------------------------------
# Imported where they are used: none of it is needed to load the connector.


def vllm_version() -> str:
    from vllm import __version__

    return str(__version__)


def torch_version() -> str:
    import torch

    return str(torch.__version__)


def hash_seed(algorithm: str) -> str | None:
    """The seed of the first block's hash; None where it is random in every process.

    vLLM resolves its own after the scheduler, and so after a connector, is built; workers
    never do. What it will resolve to is settled by the environment and the algorithm.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    seed = os.getenv("PYTHONHASHSEED")
    if seed is not None:
        return seed
    function = get_hash_fn_by_name(algorithm)
    if function in kv_cache_utils._NON_CRYPTO_HASH_FUNCTIONS:
        return None
    return str(kv_cache_utils.resolve_none_hash_seed(function))


def cache_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """vLLM's name of the KV cache's physical order.

    Raises:
        ValueError: it is not resolved yet.
    """
    name = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    if name is None:
        raise ValueError("vLLM has not resolved the KV cache layout")
    return str(name)


def device_name() -> str:
    """``cpu``, ``cuda 9.0``, ...: the platform and its compute capability."""
    from vllm.platforms import current_platform

    kind = "rocm" if current_platform.is_rocm() else str(current_platform.device_type)
    capability = current_platform.get_device_capability()
    return kind if capability is None else f"{kind} {capability.as_version_str()}"


def is_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def instruction_set() -> str:
    """What decides how vLLM's CPU kernels pack a page: architecture, library, AMX tiles.

    The library is chosen as ``CpuPlatform.import_kernels`` does; AMX decides between the
    attention kernels, the two MLA backends and the packing of linear-attention states.
    """
    import torch

    machine = platform.machine()
    if machine not in ("x86_64", "AMD64"):
        return machine
    if not torch.cpu._is_avx512_supported():
        library = "avx2"
    elif not torch.cpu._is_avx512_bf16_supported():
        library = "avx512"
    else:
        library = "avx512_bf16"
    return f"{machine} {library}{' amx' if torch.cpu._is_amx_tile_supported() else ''}"


def attention_kernel(vllm_config: VllmConfig, spec: KVCacheSpec) -> str:
    """``amx``, ``vec``, ``vec16``, ``neon``, ...: the CPU attention kernel of a group."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    head_size = getattr(spec, "head_size", None)
    if head_size is None:
        return ""
    return str(
        _get_attn_isa(
            vllm_config.model_config.dtype,
            spec.block_size,
            head_size,
            vllm_config.cache_config.cache_dtype,
        )
    )


def attention_backends(
    vllm_config: VllmConfig, layer_names: Sequence[str], spec: KVCacheSpec
) -> tuple[str, ...]:
    """Class names of the attention backends of some layers, sorted.

    Where the layers live in other processes, vLLM's own selection is run for their spec.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers: dict[str, Any] = get_layers_from_vllm_config(
        vllm_config, AttentionLayerBase, list(layer_names)
    )
    if layers:
        backends = {layer.get_attn_backend().full_cls_name() for layer in layers.values()}
        return tuple(sorted(_dotted(name) for name in backends))
    return _selected_backend(vllm_config, spec)


def _selected_backend(vllm_config: VllmConfig, spec: KVCacheSpec) -> tuple[str, ...]:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec

    if not isinstance(spec, AttentionSpec):
        return ()
    with set_current_vllm_config(vllm_config):
        backend = get_attn_backend(
            head_size=spec.head_size,
            dtype=vllm_config.model_config.dtype,
            kv_cache_dtype=vllm_config.cache_config.cache_dtype,
            use_mla=isinstance(spec, (MLAAttentionSpec, SlidingWindowMLASpec)),
            has_sliding_window=getattr(spec, "sliding_window", None) is not None,
        )
    return (_dotted(backend.full_cls_name()),)


def _dotted(name: object) -> str:
    return ".".join(name) if isinstance(name, tuple) else str(name)


def hub_snapshot(repository: str, revision: str | None, cache_folder: str | None) -> str:
    """The folder of a hub repository's snapshot in the local cache; never the network.

    Raises:
        OSError, ValueError: no such snapshot, or not a repository's name.
    """
    import huggingface_hub

    return str(
        huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            cache_dir=cache_folder,
            local_files_only=True,
            # What this engine loads was downloaded; the repository's other files were not.
            ignore_patterns="*",
        )
    )


def uses_modelscope() -> bool:
    from vllm import envs

    return bool(envs.VLLM_USE_MODELSCOPE)
