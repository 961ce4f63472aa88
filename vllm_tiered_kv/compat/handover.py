# SPDX-License-Identifier: Apache-2.0
"""What hand-overs between engines ask vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

_PROOF = b"tiered-kv proof"  # at most 16 bytes: blake2b's "person"


def hold_blocks(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Keep blocks that somebody holds now: they are not handed out, whoever frees them."""
    pool.touch([pool.blocks[block_id] for block_id in block_ids])


def let_go_blocks(pool: BlockPool, block_ids: Iterable[int]) -> None:
    """Undo :func:`hold_blocks`; the last of a prefix is to be evicted first."""
    pool.free_blocks([pool.blocks[block_id] for block_id in block_ids][::-1])


def ended_well(request: Request) -> bool:
    """Whether a request that is finished has come to its length or to a stop."""
    from vllm.v1.request import RequestStatus

    return request.status in (
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_STOPPED,
    )


def proof_of(request: Request, tokens: int, hash_tokens: int, content: bytes) -> bytes | None:
    """A digest of what the KV of the first ``tokens`` tokens depends on, 32 bytes.

    Equal in two engines, of equal semantic identity, only where that KV means the same: the last
    full block's hash stands for all before it; what comes after it is named as vLLM would name it
    in a block's hash (images, salt, prompt embeddings, the LoRA adapter).

    Args:
        request: at least so many tokens long.
        tokens: at least 1.
        hash_tokens: tokens a block hash covers.
        content: digest of the LoRA weights; empty without an adapter.

    Returns:
        None if not all of it can be told.
    """
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    full = tokens // hash_tokens
    if tokens > request.num_tokens or full > len(request.block_hashes):
        return None
    rest = full * hash_tokens
    last = bytes(request.block_hashes[full - 1]) if full else b""
    extra, _ = generate_block_hash_extra_keys(request, rest, tokens, 0)
    tail = list(request.all_token_ids[rest:tokens])
    try:
        data = msgspec.msgpack.encode((tokens, hash_tokens, last, tail, extra, content))
    except (TypeError, OverflowError):
        return None
    return hashlib.blake2b(data, digest_size=32, person=_PROOF).digest()


def engine_id(vllm_config: VllmConfig) -> str:
    """vLLM's name of this engine."""
    return str(vllm_config.kv_transfer_config.engine_id)


def is_producer(vllm_config: VllmConfig) -> bool:
    """Whether this engine may hand KV over."""
    return bool(vllm_config.kv_transfer_config.is_kv_producer)


def is_consumer(vllm_config: VllmConfig) -> bool:
    """Whether this engine may go on from KV that was handed over."""
    return bool(vllm_config.kv_transfer_config.is_kv_consumer)


def tensor_parallel_size(vllm_config: VllmConfig) -> int:
    return int(vllm_config.parallel_config.tensor_parallel_size)


def engine_index(vllm_config: VllmConfig) -> int:
    """Among the engines of one data-parallel deployment, from 0."""
    return int(vllm_config.parallel_config.data_parallel_index)


def tensor_parallel_rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among those that share its layers."""
    return int(vllm_config.parallel_config.rank) % tensor_parallel_size(vllm_config)


def kv_heads(vllm_config: VllmConfig, spec: KVCacheSpec) -> tuple[int, int]:
    """``(on each rank, in all)`` the KV heads of a group's layers; ``(0, 0)`` without heads."""
    from vllm.v1.kv_cache_interface import MLAAttentionSpec, UniformTypeKVCacheSpecs

    if isinstance(spec, UniformTypeKVCacheSpecs):
        parts = {kv_heads(vllm_config, part) for part in spec.kv_cache_specs.values()}
        return parts.pop() if len(parts) == 1 else (0, 0)
    here = getattr(spec, "num_kv_heads", None)
    if here is None or isinstance(spec, MLAAttentionSpec):
        return 0, 0
    return int(here), int(vllm_config.model_config.get_total_num_kv_heads())
