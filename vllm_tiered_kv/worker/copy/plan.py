# SPDX-License-Identifier: Apache-2.0
"""From blocks and offsets to addresses: pure arithmetic, shared by all ways of copying."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_tiered_kv.layout import GroupPages
from vllm_tiered_kv.worker.copy.base import BlockCopies, CopyError
from vllm_tiered_kv.worker.cuda_driver import Int64s


class Request(NamedTuple):
    """Checked copies of one group; both arrays hold 64-bit integers and are equally long."""

    group: int
    blocks: array[int]
    offsets: array[int]


class Runs(NamedTuple):
    """Runs of bytes to move, `[n]` each: device addresses, host addresses, lengths."""

    device: Int64s
    host: Int64s
    nbytes: Int64s


class Bundle(NamedTuple):
    """Rows that are evenly spaced in memory, as one view.

    `view` is `[num_blocks, rows, row_bytes / itemsize]` and holds bytes
    `[start, start + nbytes)` of every block's image.
    """

    view: torch.Tensor
    start: int
    nbytes: int


def check(
    groups: Sequence[GroupPages], pool_bytes: int, copies: Sequence[BlockCopies]
) -> list[Request]:
    """The copies as arrays, empty ones left out.

    Raises:
        CopyError: an unknown group, a block the group doesn't have, or an image that isn't wholly
            in the pool.
    """
    requests = []
    for copy in copies:
        if not 0 <= copy.group < len(groups):
            raise CopyError(f"There is no group {copy.group}, only {len(groups)}.")
        if len(copy.blocks) != len(copy.offsets):
            raise CopyError(f"{len(copy.blocks)} blocks but {len(copy.offsets)} offsets.")
        if not copy.blocks:
            continue
        pages = groups[copy.group]
        blocks = _integers(copy.blocks, pages.num_blocks, "block")
        offsets = _integers(copy.offsets, pool_bytes - pages.block_bytes + 1, "pool offset")
        requests.append(Request(copy.group, blocks, offsets))
    return requests


def _integers(values: Sequence[int], end: int, what: str) -> array[int]:
    try:
        integers = array("q", values)
    except (TypeError, OverflowError) as error:
        raise CopyError(f"A {what} is not a number that fits: {error}") from error
    low, high = min(values), max(values)
    if low < 0 or high >= end:
        raise CopyError(f"A {what} is out of range: {low if low < 0 else high} of {end}.")
    return integers


class GroupPlan:
    """One group's arithmetic: where the parts of each block's image are."""

    def __init__(self, pages: GroupPages) -> None:
        self.block_bytes = pages.block_bytes
        self._bases = np.array([row.data_ptr() for row in pages.rows], dtype=np.int64)
        self._strides = np.array([row.stride(0) for row in pages.rows], dtype=np.int64)
        self._row_bytes = np.array(pages.row_bytes, dtype=np.int64)
        self._starts = np.cumsum(self._row_bytes) - self._row_bytes

    def table(self) -> array[int]:
        """Four numbers a row: address of block 0, distance of blocks, bytes, place in the image."""
        columns = (self._bases, self._strides, self._row_bytes, self._starts)
        return array("q", np.stack(columns, axis=1).ravel().tolist())

    def page_runs(self, request: Request, pool_base: int, piece_bytes: int = 0) -> Runs:
        """A run for each page, and fewer where neighbours on one side are so on the other.

        No run crosses a multiple of `piece_bytes` of the pool, as long as no image does;
        0 for no such bounds.
        """
        blocks, offsets = _column(request.blocks), _column(request.offsets)
        runs = Runs(
            device=(blocks * self._strides + self._bases).ravel(),
            host=(offsets + (self._starts + pool_base)).ravel(),
            nbytes=np.tile(self._row_bytes, len(blocks)),
        )
        return merge(runs, pool_base, piece_bytes)

    def image_runs(self, request: Request, pool_base: int, staging: int, piece_bytes: int) -> Runs:
        """As `page_runs`, for images that lie block after block at the address `staging`."""
        offsets = _column(request.offsets).ravel()
        runs = Runs(
            device=np.arange(len(offsets), dtype=np.int64) * self.block_bytes + staging,
            host=offsets + pool_base,
            nbytes=np.full(len(offsets), self.block_bytes, dtype=np.int64),
        )
        return merge(runs, pool_base, piece_bytes)


def _column(integers: array[int]) -> Int64s:
    return np.frombuffer(integers, dtype=np.int64)[:, None]


def merge(runs: Runs, pool_base: int, piece_bytes: int) -> Runs:
    """Joins runs that continue each other on both sides and within one piece of the pool."""
    ends = runs.nbytes[:-1]
    continues = runs.device[1:] == runs.device[:-1] + ends
    continues &= runs.host[1:] == runs.host[:-1] + ends
    if piece_bytes:
        pieces = (runs.host - pool_base) // piece_bytes
        continues &= pieces[1:] == pieces[:-1]
    if not continues.any():
        return runs
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    return Runs(runs.device[first], runs.host[first], np.add.reduceat(runs.nbytes, first))


def bundles(pages: GroupPages, widest: int = 1) -> tuple[Bundle, ...]:
    """The group's rows as few views as possible, for copies of many rows in one call.

    Elements are the widest integers of at most `widest` bytes (1, 2, 4 or 8) that fit the
    addresses and the places in an image.
    """
    found = []
    first, start = 0, 0
    while first < len(pages.rows):
        count = _evenly_spaced(pages, first)
        nbytes = count * pages.row_bytes[first]
        found.append(Bundle(_bundle_view(pages, first, count, start, widest), start, nbytes))
        first, start = first + count, start + nbytes
    return tuple(found)


def _evenly_spaced(pages: GroupPages, first: int) -> int:
    """How many rows from `first` on have the same size and stride, at equal distances."""
    rows = pages.rows[first:]
    storage = rows[0].untyped_storage().data_ptr()
    distance = 0
    for i in range(1, len(rows)):
        step = rows[i].storage_offset() - rows[i - 1].storage_offset()
        alike = (
            rows[i].untyped_storage().data_ptr() == storage
            and pages.row_bytes[first + i] == pages.row_bytes[first]
            and rows[i].stride(0) == rows[0].stride(0)
            and step > 0
            and step == (distance or step)
        )
        if not alike:
            return i
        distance = step
    return len(rows)


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _bundle_view(
    pages: GroupPages, first: int, count: int, start: int, widest: int
) -> torch.Tensor:
    row = pages.rows[first]
    offset = row.storage_offset()
    spacing = pages.rows[first + 1].storage_offset() - offset if count > 1 else 0
    layout = (pages.row_bytes[first], offset, row.stride(0), spacing)
    aligned = (*layout, start, pages.block_bytes)
    width = next(w for w in _INTEGERS if w <= widest and all(n % w == 0 for n in aligned))
    row_bytes, offset, stride, spacing = (n // width for n in layout)
    shape, strides = (pages.num_blocks, count, row_bytes), (stride, spacing, 1)
    with torch.inference_mode(False):
        empty = torch.empty(0, dtype=_INTEGERS[width], device=row.device)
        return empty.set_(row.untyped_storage(), offset, shape, strides)
