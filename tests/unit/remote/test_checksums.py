# SPDX-License-Identifier: Apache-2.0
"""Checksums of a hand-over: equal where the same has arrived, however it lies there."""

from __future__ import annotations

import itertools
import queue
import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.remote.test_read_plans import (
    ENTRIES,
    ENTRY_TOKENS,
    PER_SLOT,
    SLOT_TABLE,
    Pool,
    Rank,
    copy,
    ranks,
    truth,
)
from vllm_tiered_kv.protocol import SlotSumJob, SumJob
from vllm_tiered_kv.remote.memory import GroupLayout, Place, RankLayout
from vllm_tiered_kv.worker.remote.checksums import (
    SUM_BYTES,
    Checker,
    are_equal,
    make_sums,
    own_units,
    read_slot,
    read_units,
)
from vllm_tiered_kv.worker.remote.plan import (
    Places,
    Refusal,
    in_slots,
    place_entries,
    plan_read,
    plan_routes,
    plan_slot_routes,
    whole_slots,
)
from vllm_tiered_kv.worker.remote.summing import Summing

HEADS = 4


class Handed:
    """What producers hold, and their checksums of it."""

    def __init__(self, order: str, parallel: int, ratio: int, *, slots: bool) -> None:
        self.ranks = ranks(order, HEADS, parallel, ratio, seed=1)
        values = truth(HEADS)
        self.pools = [Pool(rank, seed=i) for i, rank in enumerate(self.ranks)]
        for rank, pool in zip(self.ranks, self.pools, strict=True):
            rank.fill(values)
            pool.store(rank)
        self.layouts = [in_slots(r.layout) if slots else r.layout for r in self.ranks]
        table = SLOT_TABLE if slots else self.ranks[0].blocks
        self.table = table
        self.per_slot = PER_SLOT if slots else 1
        self.ratio = ratio
        self.sums = [
            make_sums(own_units(layout.groups[0]), self.places(0, ENTRIES))
            for layout in self.layouts
        ]

    def places(self, first: int, count: int) -> Places:
        return place_entries(self.table, self.ratio, first, count, self.per_slot)

    def pulled(self, consumer: Rank, first: int, count: int) -> list[bool]:
        """Pull; whether each part is what was handed over."""
        (routes,) = plan_routes(consumer.layout, self.layouts)
        copy(plan_read(routes, consumer.places(first, count), self.places(first, count)))
        return self.compare(consumer, first, count)

    def compare(self, consumer: Rank, first: int, count: int) -> list[bool]:
        (routes,) = plan_routes(consumer.layout, self.layouts)
        return [
            are_equal(
                read_units(route, self.layouts[route.rank].groups[0]),
                consumer.places(first, count),
                self.sums[route.rank],
                first,
            )
            for route in routes.routes
        ]


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize("parallel", list(itertools.product((1, 2, 4), repeat=2)))
@pytest.mark.parametrize("slots", [False, True], ids=["pages", "slots"])
def test_whoever_reads_whichever_heads_can_compare(
    order: str, parallel: tuple[int, int], *, slots: bool
) -> None:
    handed = Handed(order, parallel[0], 1, slots=slots)
    for consumer in ranks("LBHNC", HEADS, parallel[1], 1, seed=20):
        assert all(handed.pulled(consumer, 0, ENTRIES))
        assert all(handed.pulled(consumer, 2, 3))


@pytest.mark.parametrize("slots", [False, True], ids=["pages", "slots"])
def test_blocks_of_another_size(*, slots: bool) -> None:
    handed = Handed("LBHNC", 2, 2, slots=slots)
    (consumer,) = ranks("LBHNC", HEADS, 1, 3, seed=20)
    assert handed.pulled(consumer, 1, 5) == [True, True]


def test_heads_that_are_not_apart_are_compared_together() -> None:
    handed = Handed("LBNHC", 1, 1, slots=False)
    (consumer,) = ranks("LBNHC", HEADS, 1, 1, seed=20)
    assert handed.pulled(consumer, 0, ENTRIES) == [True]
    assert len(handed.sums[0]) == ENTRIES * SUM_BYTES


@settings(deadline=None, max_examples=60)
@given(
    parallel=st.tuples(st.sampled_from((1, 2)), st.sampled_from((1, 2))),
    slots=st.booleans(),
    entry=st.integers(0, ENTRIES - 1),
    layer=st.integers(0, 2),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_wrong_bit_is_seen(
    parallel: tuple[int, int], slots: bool, entry: int, layer: int, where: float, bit: int
) -> None:
    handed = Handed("BLHNC", parallel[0], 1, slots=slots)
    consumer = ranks("LBHNC", HEADS, parallel[1], 1, seed=20)[-1]
    handed.pulled(consumer, 0, ENTRIES)
    values = consumer.entry(layer, entry).reshape(-1)
    values[int(where * len(values))] ^= 1 << bit
    found = handed.compare(consumer, 0, ENTRIES)
    assert found.count(False) == 1
    before = [True] * len(found)
    assert handed.compare(consumer, 0, entry) == before
    assert handed.compare(consumer, entry + 1, ENTRIES - entry - 1) == before


@pytest.mark.parametrize("cut", [0, 1, SUM_BYTES, ENTRIES * HEADS * SUM_BYTES - 1])
def test_checksums_that_are_too_few_are_equal_to_nothing(cut: int) -> None:
    handed = Handed("LBHNC", 1, 1, slots=False)
    (consumer,) = ranks("LBHNC", HEADS, 1, 1, seed=20)
    handed.pulled(consumer, 0, ENTRIES)
    handed.sums[0] = handed.sums[0][:cut]
    assert handed.compare(consumer, 0, ENTRIES) == [False]


def test_who_reads_only_some_layers_cannot_compare() -> None:
    handed = Handed("LBHNC", 1, 1, slots=False)
    (consumer,) = ranks("LBHNC", HEADS, 1, 1, seed=20)
    (group,) = consumer.layout.groups
    consumer.layout = RankLayout(0, (msgspec.structs.replace(group, strips=group.strips[1:]),))
    with pytest.raises(Refusal, match="pipeline stages"):
        handed.compare(consumer, 0, ENTRIES)


# -- a rank's own -----------------------------------------------------------------------


def make(layout: RankLayout, job: SumJob, *, host: bool = True) -> tuple[bytes, ...]:
    """What a rank says of one hand-over."""
    ended: queue.Queue[None] = queue.Queue()
    failures: list[str] = []
    checker = Checker(lambda: ended.put(None))
    summing = Summing(
        layout, checker, lambda kind, _: failures.append(kind), pages_in_host_memory=host
    )
    assert not summing.is_busy
    summing.start(job)
    ended.get(timeout=20)
    (sums,) = summing.take()
    assert not summing.is_busy
    assert checker.close(20)
    assert (failures == ["remote_verify"]) is (not sums.groups)
    assert sums.number == job.lease
    return sums.groups


class Lent:
    """Ranks that lend a prompt's chunks, ranks that borrow them, and the lenders' checksums."""

    def __init__(self, parallel: int) -> None:
        values = truth(HEADS)
        self.there = ranks("BLHNC", HEADS, parallel, 1, seed=1)
        self.here = ranks("BLHNC", HEADS, parallel, 1, seed=20)
        self.pools = [Pool(rank, seed=i) for i, rank in enumerate((*self.there, *self.here))]
        for rank, pool in zip(self.there, self.pools, strict=False):
            rank.fill(values)
            pool.store(rank)
        job = SlotSumJob(7, (tuple(SLOT_TABLE.tolist()),))
        self.sums = [make_slots(rank.layout, job) for rank in self.there]

    def borrow(self, slots: list[int], of: list[int]) -> list[bool]:
        """Read chunks of the prompt into these slots; whether each rank has what was lent."""
        found = []
        for rank in self.here:
            (routes,) = plan_slot_routes(rank.layout, [r.layout for r in self.there])
            ours = whole_slots(np.array(slots, dtype=np.int64))
            copy(plan_read(routes, ours, whole_slots(SLOT_TABLE[of])))
            (route,) = routes.routes
            (sums,) = self.sums[route.rank]
            wanted = b"".join(sums[i * SUM_BYTES : (i + 1) * SUM_BYTES] for i in of)
            found.append(are_equal(read_slot(route), ours, wanted, 0))
        return found


def make_slots(layout: RankLayout, job: SlotSumJob) -> tuple[bytes, ...]:
    """What a rank says of chunks that it lends."""
    ended: queue.Queue[None] = queue.Queue()
    failures: list[str] = []
    checker = Checker(lambda: ended.put(None))
    summing = Summing(
        layout, checker, lambda kind, _: failures.append(kind), pages_in_host_memory=True
    )
    summing.start_slots(job)
    assert not summing.is_busy  # no step waits for it
    ended.get(timeout=20)
    (sums,) = summing.take_slots()
    assert checker.close(20)
    assert (failures == ["remote_verify"]) is (not sums.groups)
    assert sums.number == job.job
    return sums.groups


@pytest.mark.parametrize("parallel", [1, 2])
def test_who_borrows_chunks_can_compare_them(parallel: int) -> None:
    lent = Lent(parallel)
    assert all(len(group) == len(SLOT_TABLE) * SUM_BYTES for (group,) in lent.sums)
    assert lent.borrow([5, 2, 0, 1], [0, 1, 2, 3]) == [True] * parallel
    assert lent.borrow([3, 4], [2, 0]) == [True] * parallel
    lent.sums = [(group[SUM_BYTES:],) for (group,) in lent.sums]  # those of other chunks
    assert lent.borrow([3, 4], [1, 0]) == [False] * parallel


@settings(deadline=None, max_examples=60)
@given(
    chunk=st.integers(0, len(SLOT_TABLE) - 1),
    where=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
def test_any_wrong_bit_of_a_chunk_is_seen(chunk: int, where: float, bit: int) -> None:
    lent = Lent(2)
    pool = lent.pools[0]
    at = int(SLOT_TABLE[chunk]) * pool.slot_bytes + int(where * PER_SLOT * pool.block_bytes)
    pool.bytes[at] ^= 1 << bit
    others = [i for i in range(len(SLOT_TABLE)) if i != chunk]
    assert lent.borrow([0, 1, 2], others) == [True, True]
    assert lent.borrow([3], [chunk]) == [False, True]


def test_slots_that_a_rank_does_not_have_get_none() -> None:
    (rank,) = ranks("LBHNC", HEADS, 1, 1, seed=1)
    assert make_slots(rank.layout, SlotSumJob(1, ((0,),))) == ()
    Pool(rank, seed=0)
    assert make_slots(rank.layout, SlotSumJob(1, ((0, 5),))) != ()
    for slots in (((0, 6),), ((-1,),), ((1 << 40,),), ((0,), (0,)), ()):
        assert make_slots(rank.layout, SlotSumJob(1, slots)) == ()


@pytest.mark.parametrize("place", list(Place))
def test_a_rank_makes_them_on_a_thread_of_its_own(place: Place) -> None:
    handed = Handed("LBHNC", 1, 1, slots=place is Place.SLOTS)
    job = SumJob(5, ENTRIES * ENTRY_TOKENS, place, (tuple(handed.table.tolist()),), (0,))
    assert make(handed.ranks[0].layout, job) == (handed.sums[0],)


def test_what_a_rank_does_not_have_gets_none() -> None:
    layout = Handed("LBHNC", 1, 1, slots=False).ranks[0].layout
    table = ((0, 1, 2),)
    assert make(layout, SumJob(1, 3 * ENTRY_TOKENS, Place.PAGES, table, (0,))) != ()
    assert make(layout, SumJob(1, 3 * ENTRY_TOKENS, Place.PAGES, table, (0,)), host=False) == ()
    assert make(layout, SumJob(1, 4 * ENTRY_TOKENS, Place.PAGES, table, (0,))) == ()
    assert make(layout, SumJob(1, ENTRY_TOKENS, Place.PAGES, ((1 << 40,),), (0,))) == ()
    assert make(layout, SumJob(1, ENTRY_TOKENS, Place.PAGES, (), ())) == ()
    without = RankLayout(0, layout.groups)
    assert make(without, SumJob(1, ENTRY_TOKENS, Place.SLOTS, ((0,),), (0,))) == ()


def test_a_thread_that_is_behind_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_kv.worker.remote.checksums.MAX_QUEUED", 2)
    go_on, begun = threading.Event(), threading.Event()
    checker = Checker(lambda: None)

    def wait() -> None:
        begun.set()
        go_on.wait(20)

    assert checker.submit(wait)
    begun.wait(20)
    assert checker.submit(wait)
    assert checker.submit(wait)
    assert not checker.submit(wait)
    go_on.set()
    assert checker.close(20)


def test_work_that_raises_does_not_end_the_thread() -> None:
    checker, done = Checker(lambda: None), threading.Event()
    assert checker.submit(lambda: [][1])
    assert checker.submit(done.set)
    assert done.wait(20)
    assert checker.close(20)


def test_an_entry_without_layers_here_is_nothing_to_compare() -> None:
    group = Handed("LBHNC", 1, 1, slots=False).layouts[0].groups[0]
    bare: GroupLayout = msgspec.structs.replace(group, strips=())
    units = own_units(bare)
    assert units.base.shape == (HEADS, 0)
    places = place_entries(np.array([0]), 1, 0, 1)
    assert len(make_sums(units, places)) == HEADS * SUM_BYTES
