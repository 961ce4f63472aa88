# SPDX-License-Identifier: Apache-2.0
"""Which device blocks and which slots belong together: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.geometry import Geometry, GroupKind
from vllm_tiered_kv.protocol import BlockCopy
from vllm_tiered_kv.scheduler.index import ABSENT
from vllm_tiered_kv.scheduler.requests import Offer


class LoadPlan(msgspec.Struct, frozen=True):
    """The copies of one load."""

    copies: tuple[BlockCopy, ...]
    sources: tuple[int, ...]
    """For each copy the index of the node it reads, in ``Offer.nodes``."""


def chunk_key(block_hashes: Sequence[bytes], chunk: int, geometry: Geometry) -> bytes:
    """The key of one full chunk of a prompt: the hash of its last block."""
    return block_hashes[(chunk + 1) * geometry.hashes_per_chunk - 1]


def count_chunks(block_hashes: Sequence[bytes], tokens: int, geometry: Geometry) -> int:
    """Full chunks within the first ``tokens`` tokens of a prompt."""
    return min(len(block_hashes) // geometry.hashes_per_chunk, tokens // geometry.chunk_tokens)


def chunk_keys(block_hashes: Sequence[bytes], tokens: int, geometry: Geometry) -> list[bytes]:
    """Keys of the full chunks within the first ``tokens`` tokens of a prompt."""
    step = geometry.hashes_per_chunk
    count = count_chunks(block_hashes, tokens, geometry)
    return list(block_hashes[step - 1 : count * step : step])


def plan_load(
    geometry: Geometry,
    offer: Offer,
    tokens: int,
    block_ids: Sequence[Sequence[int]],
    null_block: int,
) -> LoadPlan | None:
    """Match the device blocks of ``[offer.start, offer.start + tokens)`` with slots.

    Args:
        geometry: the cut.
        offer: what the look-up found.
        tokens: how many tokens vLLM takes of it.
        block_ids: the request's block table, one list a group.
        null_block: the id that stands for "no block": nothing is needed there.

    Returns:
        None if some block that is needed has no stored source.
    """
    end = offer.start + tokens
    if end > offer.start + offer.tokens(geometry.chunk_tokens):
        return None
    copies: list[BlockCopy] = []
    sources: list[int] = []
    for group, spec in enumerate(geometry.groups):
        per_chunk = geometry.blocks_per_chunk(group)
        table = block_ids[group]
        start, stop = offer.start // spec.block_tokens, -(-end // spec.block_tokens)
        if stop > len(table):
            return None
        for chunk in range(start // per_chunk, -(-stop // per_chunk)):
            head = chunk * per_chunk
            low = max(start, head)
            blocks = tuple(table[low : min(stop, head + per_chunk)])
            if null_block in blocks:
                if spec.kind is GroupKind.FULL:
                    return None
                # The window has left the chunk's first blocks behind.
                skipped = blocks.count(null_block)
                if blocks[:skipped] != (null_block,) * skipped:
                    return None
                low, blocks = low + skipped, blocks[skipped:]
                if not blocks:
                    continue
            source = chunk - offer.first
            slot = offer.nodes[source].slots[group]
            if slot == ABSENT:
                return None
            copies.append(BlockCopy(group, slot, low - head, blocks))
            sources.append(source)
    return LoadPlan(tuple(copies), tuple(sources))


def blocks_of_chunk(
    geometry: Geometry, chunk: int, block_ids: Sequence[Sequence[int]], null_block: int
) -> dict[int, tuple[int, ...]] | None:
    """The device blocks that hold one full chunk, by group.

    A sliding-window group has no part once some of its blocks have left the window.

    Returns:
        None if a full-attention group does not hold the chunk.
    """
    parts: dict[int, tuple[int, ...]] = {}
    for group, spec in enumerate(geometry.groups):
        per_chunk = geometry.blocks_per_chunk(group)
        blocks = tuple(block_ids[group][chunk * per_chunk : (chunk + 1) * per_chunk])
        if len(blocks) == per_chunk and null_block not in blocks:
            parts[group] = blocks
        elif spec.kind is GroupKind.FULL:
            return None
    return parts or None
