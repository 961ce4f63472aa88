# SPDX-License-Identifier: Apache-2.0
"""A job's pieces are its runs, each byte once, and never anything that isn't registered."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_kv.remote.transport import MemoryKind, Read, Region
from vllm_tiered_kv.remote.transport.pieces import (
    WORTH_SHARING,
    RangeError,
    fair_piece,
    plan_pieces,
)
from vllm_tiered_kv.remote.transport.regions import RegionError, RegionTable

LOCAL = RegionTable(
    [Region(1_000, 500), Region(1_500, 500), Region(9_000, 300, MemoryKind.VRAM, 1)]
)
REMOTE = RegionTable([Region(50_000, 1_000), Region(70_000, 300, MemoryKind.VRAM, 3)])
TOP = (1 << 63) - 1


def read(*runs: tuple[int, int, int]) -> Read:
    local, remote, nbytes = (np.array(column, dtype=np.int64) for column in zip(*runs, strict=True))
    return Read(1, "peer", local, remote, nbytes, deadline=0.0)


@st.composite
def jobs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Runs whose local sides don't overlap, shuffled or in order."""
    runs = []
    for region in LOCAL.regions:
        cuts = sorted(draw(st.sets(st.integers(0, region.nbytes), max_size=8)))
        for low, high in itertools.pairwise(cuts):
            if draw(st.booleans()):
                other = draw(st.sampled_from(REMOTE.regions))
                length = min(high - low, other.nbytes)
                place = draw(st.integers(0, other.nbytes - length))
                runs.append((region.base + low, other.base + place, length))
    if not runs:
        runs.append((1_000, 50_000, draw(st.integers(1, 500))))
    return draw(st.permutations(runs)) if draw(st.booleans()) else runs


def device_of(table: RegionTable, address: int) -> tuple[MemoryKind, int]:
    for region in table.regions:
        if region.base <= address < region.base + region.nbytes:
            return region.kind, region.device
    raise AssertionError(f"{address} is nowhere")


@settings(deadline=None)
@given(
    nbytes=st.integers(1, 1 << 34), piece=st.integers(1 << 20, 1 << 26), threads=st.integers(1, 4)
)
def test_threads_get_as_many_pieces_each(nbytes: int, piece: int, threads: int) -> None:
    size = fair_piece(nbytes, piece, threads)
    assert 0 < size <= piece
    if nbytes >= WORTH_SHARING:
        assert -(-nbytes // size) % threads == 0


@settings(deadline=None)
@given(jobs(), st.integers(1, 700))
def test_every_byte_is_in_one_piece_and_comes_from_its_place(
    runs: list[tuple[int, int, int]], piece_bytes: int
) -> None:
    expected = {local + i: remote + i for local, remote, nbytes in runs for i in range(nbytes)}
    found: dict[int, int] = {}
    for piece in plan_pieces(read(*runs), LOCAL, REMOTE, piece_bytes):
        assert piece.nbytes <= piece_bytes
        assert piece.nbytes == piece.local[:, 1].sum() == piece.remote[:, 1].sum()
        for (here, length, device), (there, same, other) in zip(
            piece.local.tolist(), piece.remote.tolist(), strict=True
        ):
            assert length == same
            for i in range(length):
                assert here + i not in found
                found[here + i] = there + i
                assert device_of(LOCAL, here + i) == (piece.local_kind, device)
                assert device_of(REMOTE, there + i) == (piece.remote_kind, other)
    assert found == expected


def test_neighbours_on_both_sides_are_one_run() -> None:
    pages = [(1_000 + 10 * i, 50_000 + 10 * i, 10) for i in range(20)]
    (piece,) = plan_pieces(read(*pages), LOCAL, REMOTE, 1 << 20)
    assert piece.local.tolist() == [[1_000, 200, 0]]


def test_neighbours_on_one_side_are_not() -> None:
    (piece,) = plan_pieces(read((1_000, 50_000, 10), (1_010, 50_020, 10)), LOCAL, REMOTE, 1 << 20)
    assert piece.local.tolist() == [[1_000, 10, 0], [1_010, 10, 0]]


def test_neighbours_in_two_regions_are_not() -> None:
    runs = read((1_490, 50_000, 10), (1_500, 50_010, 10))
    (piece,) = plan_pieces(runs, LOCAL, REMOTE, 1 << 20)
    assert len(piece.local) == 2


@pytest.mark.parametrize(
    "run",
    [
        (999, 50_000, 1),
        (1_000, 49_999, 1),
        (1_999, 50_000, 2),
        (1_000, 50_999, 2),
        (1_495, 50_000, 10),  # over the border of two regions
        (1_000, 50_000, 0),
        (1_000, 50_000, -1),
        (1_000, 50_000, TOP),
        (TOP, 50_000, TOP),
        (1_000, TOP, TOP),
        (-1, 50_000, 1),
        (1_000, -TOP, 1),
        (8_000, 50_000, 1),  # between two regions
    ],
)
def test_what_is_not_registered_is_refused(run: tuple[int, int, int]) -> None:
    with pytest.raises(RangeError):
        plan_pieces(read((1_000, 50_000, 1), run), LOCAL, REMOTE, 1 << 20)


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.integers(-(1 << 63), TOP)] * 3), min_size=1, max_size=3))
def test_no_numbers_slip_through(runs: list[tuple[int, int, int]]) -> None:
    """Whatever is asked for, what is planned lies in registered memory."""
    try:
        pieces = plan_pieces(read(*runs), LOCAL, REMOTE, 100)
    except RangeError:
        return
    for piece in pieces:
        for table, side in ((LOCAL, piece.local), (REMOTE, piece.remote)):
            for address, nbytes, _ in side.tolist():
                assert device_of(table, address) == device_of(table, address + nbytes - 1)


@pytest.mark.parametrize("side", ["local", "remote", "nbytes"])
def test_lists_that_do_not_fit_are_refused(side: str) -> None:
    good = read((1_000, 50_000, 1), (1_100, 50_100, 1))
    columns = {"local": good.local, "remote": good.remote, "nbytes": good.nbytes}
    for bad in (columns[side][:1], columns[side].astype(np.int32), columns[side][None], [1, 2]):
        wrong = Read(1, "peer", **{**columns, side: bad}, deadline=0.0)
        with pytest.raises(RangeError):
            plan_pieces(wrong, LOCAL, REMOTE, 100)


def test_no_runs_are_refused() -> None:
    none = np.array([], dtype=np.int64)
    with pytest.raises(RangeError):
        plan_pieces(Read(1, "peer", none, none, none, deadline=0.0), LOCAL, REMOTE, 100)


def test_many_runs_on_one_place_are_refused() -> None:
    """Their sum could leave 64 bits."""
    with pytest.raises(RangeError):
        plan_pieces(read(*[(1_000, 50_000, 500)] * 3), LOCAL, REMOTE, 100)


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [Region(100, 0)],
        [Region(0, 10)],
        [Region(100, 50), Region(149, 50)],
        [Region(100, 50), Region(120, 10, MemoryKind.VRAM)],
        [Region(TOP - 5, 10)],
        [Region(100 + i, 1) for i in range(5_000)],
    ],
)
def test_regions_that_make_no_sense_are_refused(regions: list[Region]) -> None:
    with pytest.raises(RegionError):
        RegionTable(regions)
