# SPDX-License-Identifier: Apache-2.0
"""Which device blocks and which slots belong together: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from vllm_tiered_kv.geometry import Geometry, GroupKind
from vllm_tiered_kv.protocol import BlockCopy
from vllm_tiered_kv.scheduler.index import ABSENT
from vllm_tiered_kv.scheduler.requests import Offer

NO_BLOCKS: Mapping[int, int] = {}


class LoadPlan(msgspec.Struct, frozen=True):
    """The copies of one load."""

    copies: tuple[BlockCopy, ...]
    sources: tuple[int, ...]
    """For each copy the index of the node it reads, in ``Offer.nodes``."""


def chunk_key(
    block_hashes: Sequence[bytes], chunk: int, geometry: Geometry, content: bytes = b""
) -> bytes:
    """The key of one full chunk of a prompt: the hash of its last block.

    Args:
        content: digest of the LoRA weights it was computed with; empty without an adapter.
    """
    return block_hashes[(chunk + 1) * geometry.hashes_per_chunk - 1] + content


def count_chunks(block_hashes: Sequence[bytes], tokens: int, geometry: Geometry) -> int:
    """Full chunks within the first ``tokens`` tokens of a prompt."""
    return min(len(block_hashes) // geometry.hashes_per_chunk, tokens // geometry.chunk_tokens)


def chunk_keys(
    block_hashes: Sequence[bytes], tokens: int, geometry: Geometry, content: bytes = b""
) -> list[bytes]:
    """Keys of the full chunks within the first ``tokens`` tokens of a prompt."""
    step = geometry.hashes_per_chunk
    count = count_chunks(block_hashes, tokens, geometry)
    hashes = block_hashes[step - 1 : count * step : step]
    return [block_hash + content for block_hash in hashes] if content else list(hashes)


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
        if spec.kind is GroupKind.STATE:
            state = _load_state(geometry, offer, end, group, table, null_block)
            if state is None:
                return None
            copies.append(state)
            sources.append(len(offer.nodes) - 1)
            continue
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


def _load_state(
    geometry: Geometry,
    offer: Offer,
    end: int,
    group: int,
    table: Sequence[int],
    null_block: int,
) -> BlockCopy | None:
    """A state is restored whole, and only where the offer ends: no other moment was kept."""
    at = end // geometry.groups[group].block_tokens - 1
    if end != offer.start + offer.tokens(geometry.chunk_tokens) or at >= len(table):
        return None
    slot, block = offer.nodes[-1].slots[group], table[at]
    if slot == ABSENT or block == null_block:
        return None
    return BlockCopy(group, slot, 0, (block,))


def blocks_of_chunk(
    geometry: Geometry,
    chunk: int,
    block_ids: Sequence[Sequence[int]],
    null_block: int,
    states: Mapping[int, int] = NO_BLOCKS,
) -> dict[int, tuple[int, ...]] | None:
    """The device blocks that hold one full chunk, by group.

    A sliding-window group has no part once some of its blocks have left the window, a state
    group none unless a state was kept at the chunk's very end.

    Args:
        geometry: the cut.
        chunk: index of the chunk within the prompt.
        block_ids: the request's block table, one list a group.
        null_block: the id that stands for "no block".
        states: by group the block that holds the state at the chunk's end.

    Returns:
        None if a full-attention group does not hold the chunk; empty if no group does and none
        must.
    """
    parts: dict[int, tuple[int, ...]] = {}
    for group, spec in enumerate(geometry.groups):
        if spec.kind is GroupKind.STATE:
            if states.get(group, null_block) != null_block:
                parts[group] = (states[group],)
            continue
        per_chunk = geometry.blocks_per_chunk(group)
        blocks = tuple(block_ids[group][chunk * per_chunk : (chunk + 1) * per_chunk])
        if len(blocks) == per_chunk and null_block not in blocks:
            parts[group] = blocks
        elif spec.kind is GroupKind.FULL:
            return None
    return parts
