# SPDX-License-Identifier: Apache-2.0
"""A rank's memory as a peer sees it, from the tensors that vLLM registers; see `remote.memory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from vllm_tiered_kv.layout import GroupPages, LayoutError, dense_bytes
from vllm_tiered_kv.remote.memory import GroupLayout, SlotLayout, Strip


class OwnSlots(NamedTuple):
    """A rank's host pool."""

    address: int
    """Of slot 0."""
    slot_bytes: int
    num_slots: int
    chunk_tokens: int
    pages: Sequence[GroupPages]
    """What a slot holds images of, by KV cache group."""


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


def slot_layout(groups: Sequence[GroupLayout], slots: OwnSlots) -> SlotLayout:
    """How the groups lie in the pool.

    Args:
        groups: as they lie in the KV cache.
        slots: the pool.

    Raises:
        LayoutError: a layer is in none of the rows that a slot holds.
    """
    found = [
        msgspec.structs.replace(
            group,
            num_blocks=slots.num_slots,
            strips=slot_strips(group, pages, slots.address, slots.slot_bytes),
            per_slot=slots.chunk_tokens // (group.entry_tokens * group.entries),
        )
        for group, pages in zip(groups, slots.pages, strict=True)
    ]
    return SlotLayout(slots.address, slots.slot_bytes, tuple(found))


def slot_strips(
    group: GroupLayout, pages: GroupPages, pool_address: int, slot_bytes: int
) -> tuple[Strip, ...]:
    """A group's layers in a host pool: a block there is the image of its pages.

    Args:
        group: as it lies in the KV cache.
        pages: its rows, whose order is the image's.
        pool_address: where slot 0 is.
        slot_bytes: from slot to slot.

    Raises:
        LayoutError: a layer is in none of the rows.
    """
    rows = [row.data_ptr() for row in pages.rows]
    found = []
    for strip in group.strips:
        start = 0
        for address, nbytes in zip(rows, pages.row_bytes, strict=True):
            inside = strip.address - address
            if inside >= 0 and inside + strip.entry_bytes * group.entries <= nbytes:
                break
            start += nbytes
        else:
            raise LayoutError(f"The pages of {strip.layer} are in no row.")
        found.append(
            msgspec.structs.replace(
                strip,
                address=pool_address + start + inside,
                stride=slot_bytes,
                step=pages.block_bytes,
            )
        )
    return tuple(found)


def _splits(tensor: torch.Tensor, heads: int, elements: int) -> bool:
    """Whether the tensor's second axis are the heads, and the outermost of an entry."""
    if heads == 1:
        return True  # the entry is the head
    if tensor.dim() < 3 or tensor.shape[1] != heads:
        return False
    return bool(tensor.stride(1) == elements // heads)
