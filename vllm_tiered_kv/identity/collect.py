# SPDX-License-Identifier: Apache-2.0
"""Read an identity out of vLLM's configuration.

Nothing here reads a file, and what cannot be told is no error: it becomes a reason for not
keeping chunks beyond the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.identity.collect_layout import collect_layout
from vllm_tiered_kv.identity.collect_semantic import collect_semantic
from vllm_tiered_kv.identity.namespace import Identity
from vllm_tiered_kv.identity.reader import Reader

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import KVCacheConfig, VllmConfig


def collect(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    chunk_tokens: int,
    *,
    attention_backends: Sequence[Sequence[str]] | None = None,
) -> Identity:
    """What this engine's KV means and how it lies, before the weights are known.

    Call it where vLLM hands over the scheduler's KV cache configuration and share the
    result: a worker's own configuration may spell the same groups differently.

    Args:
        chunk_tokens: tokens a chunk covers.
        attention_backends: class names of each group's attention backends where the caller
            knows them from the layers; else they are looked up, or selected as vLLM would.
    """
    reader = Reader()
    semantic = collect_semantic(vllm_config, reader)
    layout = collect_layout(vllm_config, kv_cache_config, chunk_tokens, attention_backends, reader)
    return Identity(semantic, layout, tuple(dict.fromkeys(reader.reasons)))
