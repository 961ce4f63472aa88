# SPDX-License-Identifier: Apache-2.0
"""What an engine tells a peer about the memory of one rank, for a read to find its way.

A layer's cache is a tensor of *entries*: the blocks of the attention kernel, of which one or more
make up a block of the scheduler. An entry is opaque, but for one thing: where KV heads are its
outermost axis, each head's bytes are one run, and an engine with other tensor parallelism can read
just the heads that it needs. Tokens inside an entry are never told apart: some kernels don't keep
them in order.

A *strip* is one layer's entries: block `b` lies at `address + b * stride`. Where blocks lie in
slots of a host pool the same is said with a stride of 1 and byte offsets for block numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import torch

from vllm_tiered_kv.layout import GroupPages, LayoutError, dense_bytes
from vllm_tiered_kv.remote.transport import Address

MAX_STRIPS = 4096
MAX_LAYOUT_GROUPS = 64
SLOT_STRIDE = 1

Small = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Strip(msgspec.Struct, frozen=True, array_like=True):
    """One layer on one rank."""

    layer: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    address: Address
    """Of block 0."""
    stride: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    """Bytes from block to block; `SLOT_STRIDE` where blocks are given as byte offsets."""
    entry_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    splits: bool
    """Whether each head's bytes are one run, heads one after the other."""


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
    """Block numbers end before this; with slots, byte offsets do."""
    heads: Heads
    strips: Annotated[tuple[Strip, ...], msgspec.Meta(max_length=MAX_STRIPS)]
    """Of the layers on this rank; layers that share memory have one each."""


class RankLayout(msgspec.Struct, frozen=True, array_like=True):
    """All groups of one rank."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    groups: Annotated[tuple[GroupLayout, ...], msgspec.Meta(max_length=MAX_LAYOUT_GROUPS)]


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


def page_strips(
    tensors: Mapping[str, torch.Tensor], num_blocks: int, heads: int
) -> tuple[tuple[Strip, ...], int]:
    """The strips of one group's tensors, as vLLM registers them, and the entries of a block.

    Args:
        tensors: by layer name; `[num_blocks * entries, heads, ...]` where there are heads.
        num_blocks: blocks of the scheduler.
        heads: KV heads on this rank.

    Raises:
        LayoutError: an entry isn't one run of bytes, entries of a block aren't dense, or layers
            differ in how many there are.
    """
    ratios = {tensor.shape[0] // num_blocks for tensor in tensors.values()}
    if len(ratios) != 1 or not min(ratios):
        raise LayoutError(f"The layers of a group have {sorted(ratios)} entries a block.")
    entries = ratios.pop()
    strips = []
    for layer, tensor in tensors.items():
        if tensor.shape[0] != num_blocks * entries:
            raise LayoutError(f"{tensor.shape[0]} entries for {num_blocks} blocks.")
        size = tensor.element_size()
        nbytes = dense_bytes(tensor, size)
        step = tensor.stride(0) * size if tensor.shape[0] > 1 else nbytes
        if entries > 1 and step != nbytes:
            raise LayoutError("The entries of a block are not next to each other.")
        splits = _splits(tensor, heads, nbytes // size)
        strips.append(Strip(layer, tensor.data_ptr(), step * entries, nbytes, splits))
    return tuple(strips), entries


def slot_strips(
    strips: tuple[Strip, ...], entries: int, pages: GroupPages, pool_address: int
) -> tuple[Strip, ...]:
    """The same layers in a host pool: a block there is the image of its pages.

    Args:
        strips: of the pages, see `page_strips`.
        entries: of a block.
        pages: the group's rows, whose order is the image's.
        pool_address: where byte offset 0 is.

    Raises:
        LayoutError: a layer is in none of the rows.
    """
    rows = [row.data_ptr() for row in pages.rows]
    found = []
    for strip in strips:
        start = 0
        for address, nbytes in zip(rows, pages.row_bytes, strict=True):
            inside = strip.address - address
            if inside >= 0 and inside + strip.entry_bytes * entries <= nbytes:
                break
            start += nbytes
        else:
            raise LayoutError(f"The pages of {strip.layer} are in no row.")
        address = pool_address + start + inside
        found.append(Strip(strip.layer, address, SLOT_STRIDE, strip.entry_bytes, strip.splits))
    return tuple(found)


def _splits(tensor: torch.Tensor, heads: int, elements: int) -> bool:
    """Whether the tensor's second axis are the heads, and the outermost of an entry."""
    if heads == 1:
        return True  # the entry is the head
    if tensor.dim() < 3 or tensor.shape[1] != heads:
        return False
    return bool(tensor.stride(1) == elements // heads)
