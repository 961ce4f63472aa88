# SPDX-License-Identifier: Apache-2.0
"""Blocks of vLLM's block pool."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv.compat.unsupported import UnsupportedModel

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput


_watched: weakref.WeakSet[BlockPool] = weakref.WeakSet()


def claim(pool: BlockPool) -> None:
    """Become the only one who may watch a pool's blocks: it keeps one watcher a block.

    Raises:
        UnsupportedModel: another one of us has claimed it.
    """
    if pool in _watched:
        raise UnsupportedModel(
            "two TieredKVConnectors in one engine: vLLM tells only one of them when a block that "
            "is being copied is handed out again. Give one of them all of the capacity"
        )
    _watched.add(pool)


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


def usable_blocks(pool: BlockPool) -> int:
    """Blocks that requests can have: all but the null block."""
    return int(pool.num_gpu_blocks) - 1


def free_blocks(pool: BlockPool) -> int:
    """Blocks that nobody holds, those in the prefix cache included."""
    return int(pool.get_num_free_blocks())


def is_unused(pool: BlockPool) -> bool:
    """Whether no request holds a block and no block is in the prefix cache."""
    free = free_blocks(pool) == usable_blocks(pool)
    return free and not len(pool.cached_block_hash_to_block)


def preempted(output: SchedulerOutput) -> Collection[str]:
    """Requests that lost their blocks while this step was planned, or since the one before."""
    return output.preempted_req_ids or ()


def uncache_blocks(pool: BlockPool, hashes: Iterable[Any], groups: Iterable[int]) -> None:
    """Take every block with one of these hashes out of the prefix cache.

    Whoever holds such a block keeps it.
    """
    for block_hash, group in itertools.product(hashes, groups):
        last = None
        while (found := pool.get_cached_block(block_hash, [group])) and found[0] is not last:
            last = found[0]
            pool.evict_blocks({last.block_id})


def watch_blocks(pool: BlockPool, block_ids: Iterable[int], on_reuse: Any) -> None:
    """Be told before any of these blocks is handed out again or the cache is reset.

    The blocks must be held by somebody now, or be free. They are not held by this call:
    they count as free as soon as their owner frees them, so nothing that waits for free
    blocks (preemption, a cache reset, pause) ever waits for us.
    """
    blocks: list[KVCacheBlock] = [pool.blocks[block_id] for block_id in block_ids]
    pool.touch(blocks)
    pool.unpin_blocks(blocks, on_reuse)


def device_cache(pool: BlockPool) -> object:
    """The device's prefix cache: another object after each reset."""
    return getattr(pool, "cached_block_hash_to_block", None)
