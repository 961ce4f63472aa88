# SPDX-License-Identifier: Apache-2.0
"""What identity asks vLLM.

Imported where it is used: none of it is needed to load the connector.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


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
