# SPDX-License-Identifier: Apache-2.0
"""Read how the bytes lie out of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import options
from vllm_tiered_kv.identity.canonical import canonical
from vllm_tiered_kv.identity.layout_id import GroupLayout, LayoutIdentity
from vllm_tiered_kv.identity.reader import NOTHING, Reader, chosen, dtype_name, environment

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import KVCacheConfig, KVCacheGroupSpec, VllmConfig

_NO_BACKENDS: tuple[str, ...] = ()


def collect_layout(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    chunk_tokens: int,
    attention_backends: Sequence[Sequence[str]] | None,
    reader: Reader,
) -> LayoutIdentity:
    """The layout; what cannot be told is left to ``reader``."""
    parallel = vllm_config.parallel_config
    read = reader.read
    on_cpu = read("the platform", compat.is_cpu, False)
    groups = []
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        known = attention_backends[index] if attention_backends is not None else None
        groups.append(_group(vllm_config, group, known, on_cpu, reader))
    return LayoutIdentity(
        groups=tuple(groups),
        chunk_tokens=chunk_tokens,
        hash_tokens=getattr(kv_cache_config, "hash_block_size", None),
        cache_layout=read(
            "the KV cache layout", lambda: compat.cache_layout(vllm_config, kv_cache_config), ""
        ),
        backend_options=read(
            "attention options",
            lambda: chosen(vllm_config.attention_config, options.BACKEND_CHOICE),
            NOTHING,
        ),
        device=read("the device", compat.device_name, ""),
        instruction_set=read("the instruction set", compat.instruction_set, "") if on_cpu else "",
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        decode_context_parallel=getattr(parallel, "decode_context_parallel_size", 1),
        prefill_context_parallel=getattr(parallel, "prefill_context_parallel_size", 1),
        context_interleave=getattr(parallel, "cp_kv_cache_interleave_size", 1),
        kv_replicas=getattr(kv_cache_config, "kv_tp_replicas", 1),
        environment=environment(options.LAYOUT_VARIABLES),
    )


def _group(
    vllm_config: VllmConfig,
    group: KVCacheGroupSpec,
    backends: Sequence[str] | None,
    on_cpu: bool,
    reader: Reader,
) -> GroupLayout:
    spec = group.kv_cache_spec
    names = tuple(group.layer_names)
    if backends is None:
        backends = reader.read(
            "attention backends",
            lambda: compat.attention_backends(vllm_config, names, spec),
            _NO_BACKENDS,
        )
    kernel = ""
    if on_cpu:
        kernel = reader.read(
            "the attention kernel", lambda: compat.attention_kernel(vllm_config, spec), ""
        )
    return GroupLayout(
        kind=type(spec).__name__,
        block_tokens=spec.block_size,
        page_bytes=reader.read("the page size", lambda: int(spec.page_size_bytes), 0),
        heads=getattr(spec, "num_kv_heads", None),
        head_size=getattr(spec, "head_size", None),
        dtypes=_dtypes(spec),
        window=getattr(spec, "sliding_window", None),
        layers=names,
        backends=tuple(sorted(backends)),
        kernel=kernel,
        spec=reader.read("a KV cache spec", lambda: canonical(spec), NOTHING),
    )


def _dtypes(spec: Any) -> tuple[str, ...]:
    dtype = getattr(spec, "dtype", None)
    several = getattr(spec, "dtypes", ()) if dtype is None else (dtype,)
    return tuple(dtype_name(one) for one in several)
