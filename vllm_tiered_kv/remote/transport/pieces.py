# SPDX-License-Identifier: Apache-2.0
"""From a job's runs to what is posted at once: pure arithmetic.

Runs that continue each other on both sides become one, and the job is cut into pieces of about
`piece_bytes`: large enough to be efficient, small enough that a call which copies them doesn't hold
a thread for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_tiered_kv.remote.transport import MAX_RUNS, MemoryKind
from vllm_tiered_kv.remote.transport.regions import RegionTable

if TYPE_CHECKING:
    from vllm_tiered_kv.remote.transport import Int64s, Read

MAX_PIECE_RUNS = 4096
WORTH_SHARING = 4 << 20
"""Below this a job isn't divided over threads."""


class RangeError(ValueError):
    """A job names memory that isn't registered, or its lists don't fit each other; says what."""


class Runs(NamedTuple):
    """Runs of bytes to copy, int64 `[n]` each: addresses here and there, lengths, and the index of
    the region that each side lies in."""

    local: Int64s
    remote: Int64s
    nbytes: Int64s
    local_region: Int64s
    remote_region: Int64s


class Piece(NamedTuple):
    """What is posted at once: one kind of memory a side.

    `local` and `remote` are C-contiguous int64 `[n, 3]`: address, length, device.
    """

    local_kind: MemoryKind
    remote_kind: MemoryKind
    local: Int64s
    remote: Int64s
    nbytes: int


def plan_pieces(
    read: Read, local: RegionTable, remote: RegionTable, piece_bytes: int, threads: int = 1
) -> list[Piece]:
    """The pieces of a job; together they are its runs, each byte once.

    Args:
        read: the job.
        local: the memory here.
        remote: the peer's.
        piece_bytes: the most bytes of a piece.
        threads: there are as many pieces for each, where it is worth it.

    Raises:
        RangeError: a run isn't wholly in one registered region, or the lists are empty, of unequal
            length, too long or not int64.
    """
    runs = _checked(read, local, remote)
    piece_bytes = fair_piece(int(runs.nbytes.sum()), piece_bytes, threads)
    pieces = []
    for here, there, part in _by_kind(runs, local, remote):
        for cut in split(coalesce(part), piece_bytes):
            pieces.append(
                Piece(
                    here,
                    there,
                    _descriptors(cut.local, cut.nbytes, local.devices[cut.local_region]),
                    _descriptors(cut.remote, cut.nbytes, remote.devices[cut.remote_region]),
                    int(cut.nbytes.sum()),
                )
            )
    return pieces


def fair_piece(nbytes: int, piece_bytes: int, threads: int) -> int:
    """The size of pieces, at most `piece_bytes`, with which all threads end at the same time."""
    if nbytes < WORTH_SHARING:
        return piece_bytes
    pieces = -(-nbytes // piece_bytes)
    pieces = -(-pieces // threads) * threads
    return min(piece_bytes, -(-nbytes // pieces))


def coalesce(runs: Runs) -> Runs:
    """Joins runs that follow each other in the list and in memory, on both sides."""
    ends = runs.nbytes[:-1]
    continues = runs.local[1:] == runs.local[:-1] + ends
    continues &= runs.remote[1:] == runs.remote[:-1] + ends
    continues &= runs.local_region[1:] == runs.local_region[:-1]
    continues &= runs.remote_region[1:] == runs.remote_region[:-1]
    if not continues.any():
        return runs
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    return Runs(
        runs.local[first],
        runs.remote[first],
        np.add.reduceat(runs.nbytes, first),
        runs.local_region[first],
        runs.remote_region[first],
    )


def split(runs: Runs, piece_bytes: int, max_runs: int = MAX_PIECE_RUNS) -> Iterator[Runs]:
    """Cuts the job, as one string of bytes, at every multiple of `piece_bytes`.

    No part has more than `max_runs` runs.
    """
    ends = np.cumsum(runs.nbytes)
    total = int(ends[-1])
    for begin in range(0, total, piece_bytes):
        end = min(begin + piece_bytes, total)
        first, last = (int(np.searchsorted(ends, at)) for at in (begin + 1, end))
        local, remote, nbytes, *regions = (column[first : last + 1].copy() for column in runs)
        before = begin - int(ends[first] - nbytes[0])  # bytes of the first run in earlier pieces
        local[0] += before
        remote[0] += before
        nbytes[0] -= before
        nbytes[-1] -= int(ends[last]) - end
        part = Runs(local, remote, nbytes, *regions)
        for at in range(0, len(nbytes), max_runs):
            yield Runs(*(column[at : at + max_runs] for column in part))


def _checked(read: Read, local: RegionTable, remote: RegionTable) -> Runs:
    columns = (read.local, read.remote, read.nbytes)
    if any(not isinstance(c, np.ndarray) or c.dtype != np.int64 or c.ndim != 1 for c in columns):
        raise RangeError("addresses and lengths are int64 arrays of one dimension")
    count = len(read.nbytes)
    if not 0 < count <= MAX_RUNS or len(read.local) != count or len(read.remote) != count:
        raise RangeError(f"{len(read.local)}, {len(read.remote)} and {count} runs")
    here = local.find(read.local, read.nbytes)
    if here is None:
        raise RangeError("a run isn't in memory registered here")
    there = remote.find(read.remote, read.nbytes)
    if there is None:
        raise RangeError("a run isn't in memory that the peer registered")
    if read.nbytes.sum(dtype=np.float64) > local.nbytes:
        raise RangeError("the local runs overlap")
    return Runs(read.local, read.remote, read.nbytes, here, there)


def _by_kind(
    runs: Runs, local: RegionTable, remote: RegionTable
) -> Iterator[tuple[MemoryKind, MemoryKind, Runs]]:
    """The runs by where their two sides are, in the order of the list."""
    if not local.has_devices and not remote.has_devices:
        yield MemoryKind.DRAM, MemoryKind.DRAM, runs
        return
    kinds = local.on_device[runs.local_region] * 2 + remote.on_device[runs.remote_region]
    for kind in np.unique(kinds).tolist():
        chosen = kinds == kind
        here = MemoryKind.VRAM if kind & 2 else MemoryKind.DRAM
        there = MemoryKind.VRAM if kind & 1 else MemoryKind.DRAM
        yield here, there, Runs(*(column[chosen] for column in runs))


def _descriptors(addresses: Int64s, nbytes: Int64s, devices: Int64s) -> Int64s:
    found = np.empty((len(nbytes), 3), dtype=np.int64)  # np.stack takes several times as long
    for i, column in enumerate((addresses, nbytes, devices)):
        found[:, i] = column
    return found
