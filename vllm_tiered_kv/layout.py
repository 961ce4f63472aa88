# SPDX-License-Identifier: Apache-2.0
"""Where the bytes of a block are on this rank.

vLLM registers one tensor a layer, in one of several memory layouts. Here each layer becomes a
*row*: a view of opaque bytes `[num_blocks, row_bytes]` whose row `b` is the page of block `b`.
Everything is derived from shapes, strides and offsets, nothing from a layout's name, so that a
layout this code has never seen is either right or refused.

The *image* of a block is its pages in the order of the rows, one after the other: what a slot, a
file or a peer holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch


class LayoutError(ValueError):
    """These tensors can't be cut into pages that are one run of bytes each; says why."""


class GroupPages(msgspec.Struct, frozen=True, eq=False):
    """The pages of one KV cache group on this rank.

    `rows[r]` is uint8 `[num_blocks, row_bytes[r]]`, stride 1 within a row; the stride between
    rows is the distance of two blocks and may be larger than a page. Layers whose pages lie next
    to each other within a block share one row, layers that alias the same memory appear once.
    The rows keep the order of the layers' allocations, and of addresses within one.
    """

    rows: tuple[torch.Tensor, ...]
    row_bytes: tuple[int, ...]
    block_bytes: int
    """Bytes of one block's image over all layers: the sum of `row_bytes`."""
    num_blocks: int

    @classmethod
    def none(cls, num_blocks: int) -> GroupPages:
        """A group without a layer here: other pipeline stages have them all."""
        return cls((), (), 0, num_blocks)


class _Pages(msgspec.Struct, frozen=True, eq=False):
    """One row before it is a tensor: block `b` lies at byte `start + b * stride` of `storage`."""

    storage: torch.UntypedStorage
    start: int
    stride: int
    nbytes: int

    @property
    def address(self) -> int:
        return int(self.storage.data_ptr()) + self.start


def group_pages(tensors: Sequence[torch.Tensor], num_blocks: int) -> GroupPages:
    """The rows of one group from its layers' cache tensors, as vLLM registers them.

    Each tensor is `[B, ...]` with any strides, logically `[B, H, N, C]` for attention. `B` is
    `num_blocks`, or a multiple of it where kernels use smaller blocks than the manager: then that
    many consecutive entries make up one block and must be dense.

    Raises:
        LayoutError: a page is not one run of bytes (heads or K/V outside the blocks), tensors
            overlap other than as aliases, or the shapes don't fit `num_blocks`.
    """
    if num_blocks < 1:
        raise LayoutError(f"A KV cache group needs at least one block, not {num_blocks}.")
    if not tensors:
        raise LayoutError("A KV cache group without cache tensors has no pages to copy.")
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise LayoutError(f"One group's tensors are on several devices: {sorted(devices)}.")

    pages = _coalesced(_distinct([_pages(t, num_blocks) for t in tensors]), num_blocks)
    _check_disjoint(pages, num_blocks)
    row_bytes = tuple(p.nbytes for p in pages)
    device = tensors[0].device
    return GroupPages(
        rows=tuple(_row(p, num_blocks, device) for p in pages),
        row_bytes=row_bytes,
        block_bytes=sum(row_bytes),
        num_blocks=num_blocks,
    )


def _pages(tensor: torch.Tensor, num_blocks: int) -> _Pages:
    if tensor.dim() < 2:
        raise LayoutError(
            f"A cache tensor of shape {tuple(tensor.shape)} has no block dimension apart from "
            "its bytes."
        )
    entries = tensor.shape[0]
    if entries < num_blocks or entries % num_blocks:
        raise LayoutError(
            f"The first dimension of a cache tensor of shape {tuple(tensor.shape)} is not a "
            f"multiple of the {num_blocks} blocks; tensors with keys and values or heads outside "
            "the blocks are not supported."
        )
    size = tensor.element_size()
    entry_bytes = dense_bytes(tensor, size)
    stride = tensor.stride(0) * size if entries > 1 else entry_bytes
    if stride < entry_bytes:
        raise LayoutError(f"The blocks of a cache tensor overlap: {_describe(tensor)}.")
    ratio = entries // num_blocks
    if ratio > 1 and stride != entry_bytes:
        raise LayoutError(
            f"Each block consists of {ratio} kernel blocks that are not next to each other in "
            f"memory: {_describe(tensor)}."
        )
    return _Pages(
        storage=tensor.untyped_storage(),
        start=tensor.storage_offset() * size,
        stride=stride * ratio,
        nbytes=entry_bytes * ratio,
    )


def dense_bytes(tensor: torch.Tensor, size: int) -> int:
    """Bytes of one entry of the first dimension, provided that they are one run."""
    expected = 1
    inner = sorted(
        (stride, extent)
        for stride, extent in zip(tensor.stride()[1:], tensor.shape[1:], strict=True)
        if extent != 1
    )
    for stride, extent in inner:
        if extent == 0:
            raise LayoutError(f"A cache tensor is empty: {_describe(tensor)}.")
        if stride != expected:
            raise LayoutError(
                "A page is not one run of bytes (something other than layers and blocks is "
                f"outermost): {_describe(tensor)}."
            )
        expected *= extent
    return expected * size


def _describe(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}, strides {tuple(tensor.stride())}, {tensor.dtype}"


def _distinct(pages: Sequence[_Pages]) -> list[_Pages]:
    """Without aliases, by allocation in the order of first use, then by address."""
    order: dict[int, int] = {}
    seen: dict[tuple[int, int, int], _Pages] = {}
    for page in pages:
        order.setdefault(page.storage.data_ptr(), len(order))
        seen.setdefault((page.address, page.stride, page.nbytes), page)
    return sorted(seen.values(), key=lambda p: (order[p.storage.data_ptr()], p.start))


def _coalesced(pages: Sequence[_Pages], num_blocks: int) -> list[_Pages]:
    """Joins pages that follow each other within every block."""
    joined: list[_Pages] = []
    for page in pages:
        last = joined[-1] if joined else None
        if last is None or not _follows(last, page, num_blocks):
            joined.append(page)
            continue
        nbytes = last.nbytes + page.nbytes
        stride = last.stride if num_blocks > 1 else nbytes
        joined[-1] = _Pages(last.storage, last.start, stride, nbytes)
    return joined


def _follows(first: _Pages, second: _Pages, num_blocks: int) -> bool:
    if first.storage.data_ptr() != second.storage.data_ptr():
        return False
    if second.start != first.start + first.nbytes:
        return False
    if num_blocks == 1:
        return True
    return first.stride == second.stride and first.nbytes + second.nbytes <= first.stride


def _check_disjoint(pages: Sequence[_Pages], num_blocks: int) -> None:
    """Two rows may interleave, but one block's page must never touch another page."""
    by_address = sorted(pages, key=lambda p: p.address)
    for i, first in enumerate(by_address):
        end = first.address + (num_blocks - 1) * first.stride + first.nbytes
        for second in by_address[i + 1 :]:
            if second.address >= end:
                break
            distance = (second.address - first.address) % first.stride
            apart = first.nbytes <= distance <= first.stride - second.nbytes
            if first.stride != second.stride or not apart:
                raise LayoutError(
                    "Two layers of one group overlap in memory without being the same: pages of "
                    f"{first.nbytes} and {second.nbytes} bytes, {first.stride} and "
                    f"{second.stride} bytes apart, {second.address - first.address} bytes from "
                    "each other."
                )


def _row(pages: _Pages, num_blocks: int, device: torch.device) -> torch.Tensor:
    # Made outside inference mode, whose tensors refuse to be written from other threads.
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=device).set_(
            pages.storage, pages.start, (num_blocks, pages.nbytes), (pages.stride, 1)
        )
