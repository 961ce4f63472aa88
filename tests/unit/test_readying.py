# SPDX-License-Identifier: Apache-2.0
"""A hand-over until it can be read: told once, never before its bytes are there, always in time.

Hypothesis ends copies and checksums in any order, well or badly or never.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.scheduler.index import ABSENT, Node, NodeState
from vllm_tiered_kv.scheduler.lending import Extent, Loan
from vllm_tiered_kv.scheduler.readying import (
    COPY_PATIENCE,
    SUM_PATIENCE,
    HandOver,
    Readying,
    Stage,
)

RANKS = 2


class Lender:
    """Counts what comes back."""

    def __init__(self) -> None:
        self.out: list[Loan] = []

    def give_back(self, loan: Loan) -> None:
        self.out.remove(loan)


class Machine(RuleBasedStateMachine):
    """Hand-overs that share slots."""

    verify = True

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.lender = Lender()
        self.failures: list[str] = []
        self.ready: list[HandOver] = []
        self.readying = Readying(
            self.lender,  # type: ignore[arg-type]
            RANKS,
            lambda: self.now,
            self._on_ready,
            lambda kind, _: self.failures.append(kind),
            verify=self.verify,
        )
        self.writing: list[Node] = []
        self.prepared: list[HandOver] = []
        self.started: dict[int, HandOver] = {}
        self.asked: list[tuple[int, int]] = []
        """Leases and ranks of checksums that are being made."""
        self._leases = 0

    def _on_ready(self, hand: HandOver) -> None:
        assert hand not in self.ready
        assert hand.stage is Stage.READY
        assert hand.lease in self.started
        assert hand.loan is None or not hand.loan.awaits
        assert hand.place[0] is (Place.PAGES if hand.loan is None else Place.SLOTS)
        self.ready.append(hand)

    @rule(fresh=st.integers(0, 2), shared=st.integers(0, 2), done=st.booleans())
    def prepare(self, fresh: int, shared: int, done: bool) -> None:
        nodes = [Node(b"", None, [ABSENT], 0) for _ in range(fresh)]
        self.writing += nodes
        awaits = {*nodes, *self.writing[:shared]}
        loan = None
        if fresh or done:
            nodes = (Node(b"ready", None, [7], 0), *awaits)
            loan = Loan(nodes, awaits, Extent(((7,),), (8,)))
            self.lender.out.append(loan)
        hand = HandOver("request", None, 10, Extent(((1, 2),), (4,)), loan)
        self.readying.prepare(hand)
        self.prepared.append(hand)

    @rule(which=st.integers(0, 20))
    def a_request_ends(self, which: int) -> None:
        if self.prepared:
            hand = self.prepared.pop(which % len(self.prepared))
            self._leases += 1
            self.started[self._leases] = hand
            self.readying.start(hand, self._leases)

    @rule(which=st.integers(0, 20))
    def a_request_is_aborted(self, which: int) -> None:
        if self.prepared:
            self.readying.end(self.prepared.pop(which % len(self.prepared)))

    @rule(which=st.integers(0, 20), good=st.booleans())
    def a_copy_ends(self, which: int, good: bool) -> None:
        if self.writing:
            node = self.writing.pop(which % len(self.writing))
            node.state = NodeState.READY if good else NodeState.GONE
            self.readying.stored(node, good)

    @rule()
    def a_plan_goes_out(self) -> None:
        for job in self.readying.sums:
            hand = self.started.get(job.lease)
            assert hand is None or (job.place, (job.tables, job.firsts)) == hand.place
            self.asked += [(job.lease, rank) for rank in range(RANKS)]
        self.readying.sums.clear()

    @rule(which=st.integers(0, 20))
    def a_rank_has_checksums(self, which: int) -> None:
        if self.asked:
            lease, rank = self.asked.pop(which % len(self.asked))
            self.readying.summed(rank, lease, (b"%d" % rank,))

    @rule(which=st.integers(0, 20))
    def a_lease_ends(self, which: int) -> None:
        if self.started:
            lease = sorted(self.started)[which % len(self.started)]
            self.readying.end(self.started.pop(lease))

    @rule(seconds=st.sampled_from((0.1, COPY_PATIENCE, SUM_PATIENCE)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.readying.end_waits()
        for hand in self.started.values():
            patience = COPY_PATIENCE if hand.stage is Stage.COPYING else SUM_PATIENCE
            assert hand.stage is Stage.READY or self.now - hand.since < patience

    @invariant()
    def what_is_not_waited_for_is_ready(self) -> None:
        waiting = [h for h in self.started.values() if h.stage is not Stage.READY]
        assert len(self.readying) == len(waiting)
        for hand in self.started.values():
            assert (hand in self.ready) is (hand.stage is Stage.READY)
            if hand.stage is Stage.COPYING:
                assert hand.loan is not None
                assert hand.loan.awaits
            if hand.stage is Stage.READY and self.verify:
                assert sorted(hand.sums) in ([], list(range(RANKS)))

    @invariant()
    def slots_are_out_for_those_that_have_them(self) -> None:
        hands = (*self.prepared, *self.started.values())
        assert len(self.lender.out) == sum(hand.loan is not None for hand in hands)

    def teardown(self) -> None:
        for hand in (*self.prepared, *self.started.values()):
            self.readying.end(hand)
        assert not self.lender.out
        assert not self.readying._awaited
        assert len(self.readying) == 0


class Unverified(Machine):
    verify = False


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
Unverified.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestVerified = Machine.TestCase
TestUnverified = Unverified.TestCase


@pytest.mark.parametrize("machine", [Machine, Unverified])
def test_what_needs_no_copy_and_no_checksum_is_ready_at_once(machine: Any) -> None:
    it = machine()
    it.prepare(0, 0, True)
    it.a_request_ends(0)
    assert bool(it.ready) is not it.verify
    it.a_plan_goes_out()
    while it.asked:
        it.a_rank_has_checksums(0)
    assert len(it.ready) == 1
    assert not it.failures
