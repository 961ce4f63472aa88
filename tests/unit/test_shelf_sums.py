# SPDX-License-Identifier: Apache-2.0
"""Chunks that are lent with checksums: each has those of what is in its slots, or is not lent.

Hypothesis stores, evicts and resets while the ranks work in any order, and fail. What a rank would
read is a number that every write of a slot changes.
"""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_tiered_kv.protocol import RankSums, SlotSumJob
from vllm_tiered_kv.remote.messages import SUM_BYTES
from vllm_tiered_kv.remote.shelf import Shelf
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node
from vllm_tiered_kv.scheduler.shelf_sums import MAX_ORDERS, PIECE, ShelfSums
from vllm_tiered_kv.scheduler.shelving import Shelving

RANKS, GROUPS = 2, 2


class Tier:
    """An index whose chunks are lent with checksums, and ranks that make them."""

    def __init__(self, slots: int) -> None:
        self.index = ChunkIndex(slots, GROUPS)
        self.shelf: Shelf[Node] = Shelf(slots)
        numbers = itertools.count(1)
        sums = ShelfSums(RANKS, GROUPS, lambda: next(numbers))
        self.sums = sums
        self.shelving = Shelving(self.shelf, self.index, sums)
        self.contents: dict[int, int] = {}
        """By slot."""
        self.written = itertools.count(1)
        self.orders: list[tuple[int, SlotSumJob]] = []
        """By rank, those that it has not done."""

    def store(self, key: bytes) -> None:
        node = self.index.reserve(key, None, range(GROUPS))
        if node is None:
            return
        for slot in node.slots:
            self.contents[slot] = next(self.written)
        self.index.commit(node)
        self.index.unpin(node)

    def order(self) -> None:
        orders = self.shelving.take_orders()
        self.orders += [(rank, job) for job in orders for rank in range(RANKS)]

    def do(self, at: int, *, good: bool = True) -> None:
        rank, job = self.orders.pop(at % len(self.orders))
        sums = [b"".join([self.sum(rank, slot) for slot in group]) for group in job.slots]
        self.shelving.made(rank, RankSums(job.job, tuple(sums) if good else ()))

    def sum(self, rank: int, slot: int) -> bytes:
        return (self.contents[slot] * RANKS + rank).to_bytes(SUM_BYTES, "big")

    def finish(self) -> None:
        self.order()
        while self.orders:
            self.do(0)
            self.order()

    def check(self) -> None:
        for key, chunk in self.shelf._chunks.items():
            assert self.index.get(key) is chunk.owner
            expected = [self.sum(rank, slot) for rank in range(RANKS) for slot in chunk.slots]
            assert chunk.sums == b"".join(expected)


def keys(count: int) -> list[bytes]:
    return [i.to_bytes(2, "big") for i in range(count)]


def test_chunks_are_lent_when_all_ranks_have_read_them() -> None:
    tier = Tier(100)
    for key in keys(3):
        tier.store(key)
    assert len(tier.shelf) == 0
    tier.order()
    assert [(rank, job.job) for rank, job in tier.orders] == [(0, 1), (1, 1)]
    tier.do(0)
    assert len(tier.shelf) == 0
    tier.do(0)
    assert [chunk.owner.key for chunk in tier.shelf.lend(keys(3))] == keys(3)
    tier.check()


def test_few_are_read_at_once() -> None:
    tier = Tier(1000)
    wanted = keys(PIECE * MAX_ORDERS + 5)
    for key in wanted:
        tier.store(key)
    tier.order()
    assert len(tier.orders) == RANKS * MAX_ORDERS
    assert {len(job.slots[0]) for _, job in tier.orders} == {PIECE}
    tier.finish()
    assert len(tier.shelf) == len(wanted)
    tier.check()


def test_what_a_rank_could_not_read_is_not_lent() -> None:
    tier = Tier(100)
    tier.store(b"a")
    tier.order()
    tier.do(0, good=False)
    tier.do(0)
    assert len(tier.shelf) == 0
    tier.store(b"b")
    tier.finish()
    assert list(tier.shelf._chunks) == [b"b"]


def test_checksums_that_are_too_few_or_of_nothing_are_passed_over() -> None:
    tier = Tier(100)
    tier.store(b"a")
    tier.order()
    (_, job), _ = tier.orders
    tier.shelving.made(0, RankSums(job.job + 1, ()))
    tier.shelving.made(0, RankSums(job.job, (b"short", bytes(SUM_BYTES))))
    tier.shelving.made(1, RankSums(job.job, (bytes(SUM_BYTES),) * GROUPS))
    tier.shelving.made(1, RankSums(job.job, (bytes(SUM_BYTES),) * GROUPS))
    assert len(tier.shelf) == 0


def test_after_the_end_of_lending_nothing_is_read() -> None:
    tier = Tier(100)
    tier.store(b"a")
    tier.order()
    tier.shelving.close()
    tier.store(b"b")
    assert tier.shelving.take_orders() == ()
    while tier.orders:
        tier.do(0)
    assert len(tier.shelf) == 0


class Machine(RuleBasedStateMachine):
    """A tier under pressure."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = Tier(12)

    @rule(key=st.integers(0, 11))
    def store(self, key: int) -> None:
        if self.tier.index.get(bytes([key])) is None:
            self.tier.store(bytes([key]))

    @rule(key=st.integers(0, 11))
    def discard(self, key: int) -> None:
        if (node := self.tier.index.get(bytes([key]))) is not None:
            self.tier.index.discard(node)

    @rule()
    def reset(self) -> None:
        self.tier.index.clear()

    @rule()
    def order(self) -> None:
        self.tier.order()

    @precondition(lambda self: self.tier.orders)
    @rule(at=st.integers(0, 20), good=st.sampled_from([True, True, True, False]))
    def do(self, at: int, good: bool) -> None:
        self.tier.do(at, good=good)

    @invariant()
    def what_is_lent_has_its_checksums(self) -> None:
        self.tier.check()
        assert len(self.tier.sums._waiting) <= len(self.tier.index)
        assert len(self.tier.sums._orders) <= MAX_ORDERS

    def teardown(self) -> None:
        self.tier.finish()
        assert not self.tier.sums._waiting
        assert not self.tier.sums._orders


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
