# SPDX-License-Identifier: Apache-2.0
"""How a prompt is cut into chunks: pure arithmetic, the same in both halves."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.bits import bit_mask
from vllm_tiered_kv.config import ConfigError, format_size

TARGET_CHUNK_BYTES = 1 << 20
"""A chunk grows block by block until one rank's bytes reach this."""
MAX_CHUNK_TOKENS = 128
"""... or until it holds this many tokens: the tail of a prefix below a chunk is not kept."""
SLOT_ALIGNMENT = 4096


class GroupKind(enum.Enum):
    """Which blocks of a prefix a KV cache group needs to go on from there."""

    FULL = "full"  # all of them
    WINDOW = "window"  # those its sliding window still sees
    STATE = "state"  # the last: it holds all that a recurrent layer remembers


class GroupGeometry(msgspec.Struct, frozen=True):
    """One KV cache group."""

    kind: GroupKind
    block_tokens: int
    block_bytes: int
    """Bytes of one block over all the group's layers on one rank."""
    window: int = 0
    """Tokens of the sliding window, the current one included; 0 without a window."""

    def first_needed_token(self, position: int) -> int:
        """The first earlier token that is still read when ``position`` is computed next."""
        if self.kind is GroupKind.FULL:
            return 0
        if self.kind is GroupKind.STATE:
            return max(0, position - 1)
        return max(0, position - self.window + 1)

    def first_handed_token(self, tokens: int, unit: int) -> int:
        """Where what is handed over of a prompt begins, in blocks or slots of ``unit`` tokens.

        Who goes on from it computes the last of its ``tokens`` again, so that one's window counts.
        """
        return self.first_needed_token(tokens - 1) // unit * unit

    def kept_blocks(self, chunk_tokens: int) -> int:
        """Blocks of a chunk that are stored: of a state only the last."""
        return 1 if self.kind is GroupKind.STATE else chunk_tokens // self.block_tokens


class Geometry(msgspec.Struct, frozen=True):
    """The cut: every group's chunk covers the same ``chunk_tokens`` tokens."""

    chunk_tokens: int
    hash_tokens: int
    """Tokens a block hash covers."""
    groups: tuple[GroupGeometry, ...]

    @property
    def hashes_per_chunk(self) -> int:
        return self.chunk_tokens // self.hash_tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot on one rank: a chunk of the largest group, aligned."""
        largest = max(self.part_bytes(group) for group in self.group_ids)
        return self.align_slot(largest)

    @staticmethod
    def align_slot(nbytes: int) -> int:
        return -(-nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    @property
    def keeps_all(self) -> bool:
        """Every group needs all blocks of a prefix: there are no windows and no states."""
        return all(group.kind is GroupKind.FULL for group in self.groups)

    @property
    def full_groups(self) -> int:
        """Bit ``g``: group ``g`` needs every chunk of a prefix."""
        return bit_mask(g for g in self.group_ids if self.groups[g].kind is GroupKind.FULL)

    @property
    def has_states(self) -> bool:
        return any(group.kind is GroupKind.STATE for group in self.groups)

    @property
    def group_ids(self) -> range:
        return range(len(self.groups))

    def blocks_per_chunk(self, group: int) -> int:
        return self.chunk_tokens // self.groups[group].block_tokens

    def kept_blocks(self, group: int) -> int:
        return self.groups[group].kept_blocks(self.chunk_tokens)

    def part_bytes(self, group: int) -> int:
        """Bytes of a chunk's part in one group, on a rank whose layers are as described."""
        return self.kept_blocks(group) * self.groups[group].block_bytes


def plan_geometry(
    groups: Sequence[GroupGeometry],
    *,
    scheduler_tokens: int,
    hash_tokens: int,
    chunk_tokens: int | None,
) -> Geometry:
    """Choose the chunk: whole scheduler blocks, about a mebibyte on one rank.

    Args:
        groups: the KV cache groups in vLLM's order.
        scheduler_tokens: the scheduler's block size; hits end on its multiples.
        hash_tokens: tokens a block hash covers.
        chunk_tokens: the user's choice, or None.

    Raises:
        ConfigError: ``chunk_tokens`` is not a multiple of ``scheduler_tokens``.
    """
    if chunk_tokens is not None:
        if chunk_tokens % scheduler_tokens:
            raise ConfigError(
                f"chunk_tokens: {chunk_tokens} is not a multiple of this model's block size, "
                f"{scheduler_tokens} tokens"
            )
        return Geometry(chunk_tokens, hash_tokens, tuple(groups))
    smallest = Geometry(scheduler_tokens, hash_tokens, tuple(groups))
    if smallest.has_states:
        return smallest  # wherever vLLM keeps a state, at any block's end, it can be resumed
    step = max(g.block_bytes * (scheduler_tokens // g.block_tokens) for g in groups)
    by_bytes = max(1, -(-TARGET_CHUNK_BYTES // max(1, step)))
    by_tokens = max(1, MAX_CHUNK_TOKENS // scheduler_tokens)
    return Geometry(scheduler_tokens * min(by_bytes, by_tokens), hash_tokens, tuple(groups))


def describe(geometry: Geometry) -> str:
    """``"128 tokens, 1 MiB a rank"``."""
    return f"{geometry.chunk_tokens} tokens, {format_size(geometry.slot_bytes)} a rank"
