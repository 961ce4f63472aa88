# SPDX-License-Identifier: Apache-2.0
"""What an engine tells a peer about the memory of one rank, for a read to find its way.

A layer's cache is a tensor of *entries*: the blocks of the attention kernel, of which one or more
make up a block of the scheduler. An entry is opaque, but for one thing: where KV heads are its
outermost axis, each head's bytes are one run, and an engine with other tensor parallelism can read
just the heads that it needs. Tokens inside an entry are never told apart: some kernels don't keep
them in order.

A *strip* is one layer's entries. In the KV cache, block `b` lies at `address + b * stride`. In the
slots of the host pool a chunk's blocks lie one after the other, each as the image of its pages in
all layers: block `i` of the chunk in slot `s` lies at `address + s * stride + i * step`.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

MAX_STRIPS = 4096
MAX_LAYOUT_GROUPS = 64

Address = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""What is added to one for a place in an entry keeps it below 2^63."""
Small = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Stride = Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]


class Place(enum.Enum):
    """Where a prompt's KV lies on every rank."""

    PAGES = "pages"  # of the KV cache, by block number
    SLOTS = "slots"  # of the host pool, by slot number, a chunk each


class Strip(msgspec.Struct, frozen=True, array_like=True):
    """One layer on one rank."""

    layer: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    address: Address
    """Of block 0, or of the first block in slot 0."""
    stride: Stride
    """Bytes from block to block, or from slot to slot."""
    entry_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    splits: bool
    """Whether each head's bytes are one run, heads one after the other."""
    step: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 0
    """Bytes from block to block within a slot; 0 in the KV cache."""


class Heads(msgspec.Struct, frozen=True, array_like=True):
    """The KV heads of a rank: `count` from `first` on, of `total`. Without heads: 0, 1, 1."""

    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    count: Small
    total: Small


class GroupLayout(msgspec.Struct, frozen=True, array_like=True):
    """One KV cache group on one rank."""

    contents: Annotated[str, msgspec.Meta(max_length=64)]
    """A digest of all that says what an entry's bytes mean, heads apart; equal or not."""
    entry_tokens: Small
    """Tokens of an entry."""
    entries: Small
    """Entries of a block, one after the other."""
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    """Block numbers end before this, or slot numbers."""
    heads: Heads
    strips: Annotated[tuple[Strip, ...], msgspec.Meta(max_length=MAX_STRIPS)]
    """Of the layers on this rank; layers that share memory have one each."""
    per_slot: Small = 1
    """Blocks in a slot; 1 in the KV cache."""

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, or of a slot."""
        return self.entry_tokens * self.entries * self.per_slot

    @property
    def image_bytes(self) -> int:
        """Bytes that the group has of each slot, from its beginning; 0 without layers here."""
        return self.per_slot * self.strips[0].step if self.strips else 0


class SlotLayout(msgspec.Struct, frozen=True, array_like=True):
    """The host pool of one rank."""

    address: Address
    """Of slot 0."""
    slot_bytes: Stride
    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(max_length=MAX_LAYOUT_GROUPS)]
    """The KV cache groups as they lie there; a slot holds one group's part of one chunk."""


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """All groups of one rank."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(max_length=MAX_LAYOUT_GROUPS)]
    """In the KV cache."""
    slots: SlotLayout | None = None
    """The same in its host pool; None where peers can't read that."""


def heads_of_rank(total: int, tensor_parallel: int, rank: int) -> Heads:
    """The heads that vLLM gives a tensor-parallel rank: a share, or one that others have too.

    Args:
        total: KV heads of the model.
        tensor_parallel: ranks, of which `rank` is one.
    """
    if total >= tensor_parallel:
        count = total // tensor_parallel
        return Heads(rank * count, count, total)
    return Heads(rank * total // tensor_parallel, 1, total)
