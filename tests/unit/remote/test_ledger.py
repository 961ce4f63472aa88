# SPDX-License-Identifier: Apache-2.0
"""Memory is called free only when nothing can land in it, whatever happens in whatever order."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from vllm_tiered_kv.remote.transport import Memory, MemoryKind, Outcome, Read, ReadResult
from vllm_tiered_kv.remote.transport.ledger import Failure, Job, Ledger, Ticket
from vllm_tiered_kv.remote.transport.pieces import Piece

PEERS = ("a", "b")
NONE = np.array([], dtype=np.int64)
LOST = Failure("remote_agent", "who knows", certain=False)
FAILED = Failure("remote_disconnected", "gone")


def read(job: int, peer: str = "a", deadline: float = 100.0) -> Read:
    return Read(job, peer, NONE, NONE, NONE, deadline)


def piece(nbytes: int = 10) -> Piece:
    return Piece(MemoryKind.DRAM, MemoryKind.DRAM, NONE, NONE, nbytes)


@dataclass
class Known:
    """What the test knows of a job."""

    pieces: int | None = None  # once planned
    good: int = 0
    bad: bool = False
    landing: dict[int, int] = field(default_factory=dict)  # ticket to agent: may still write
    result: ReadResult | None = None
    settled: bool = False


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(max_jobs=5)
        self.now = 0.0
        self.agent = 1
        self.alive = {1}
        self.jobs: dict[int, Known] = {}
        self.unplanned: list[Job] = []
        self.open: list[Ticket] = []

    @rule(peer=st.sampled_from(PEERS), patience=st.integers(1, 20))
    def add(self, peer: str, patience: int) -> None:
        job = len(self.jobs)
        self.jobs[job] = Known()
        self.ledger.add(read(job, peer, self.now + patience), self.now)

    @rule()
    def take_unplanned(self) -> None:
        job = self.ledger.next_unplanned()
        if job is not None:
            self.unplanned.append(job)

    @precondition(lambda self: self.unplanned)
    @rule(count=st.integers(0, 3))
    def plan(self, count: int) -> None:
        job = self.unplanned.pop(0)
        if count:
            self.jobs[job.job].pieces = count
            self.ledger.planned(job, [piece() for _ in range(count)], self.now)
        else:
            self.ledger.planned(job, Failure("remote_range", "out of range"), self.now)

    @rule(peers=st.sets(st.sampled_from(PEERS)))
    def begin(self, peers: set[str]) -> None:
        ticket = self.ledger.begin(lambda job: self.agent if job.peer in peers else None)
        if ticket is None:
            return
        assert ticket.peer in peers
        known = self.jobs[ticket.job]
        assert known.result is None, "a job that ended begins nothing"
        known.landing[ticket.number] = ticket.agent
        self.open.append(ticket)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), failure=st.sampled_from((None, None, FAILED, LOST)))
    def end(self, which: int, failure: Failure | None) -> None:
        ticket = self.open.pop(which % len(self.open))
        known = self.jobs[ticket.job]
        if failure is None or failure.certain:
            known.landing.pop(ticket.number, None)
        known.good += failure is None
        known.bad |= failure is not None
        self.ledger.ended(ticket, failure, self.now)

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.ledger.give_up_late(self.now)

    @precondition(lambda self: self.jobs)
    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        self.ledger.give_up(which % len(self.jobs), "", "called off", self.now)

    @rule(peer=st.sampled_from(PEERS), now=st.booleans())
    def lose_peer(self, peer: str, now: bool) -> None:
        if now:
            self.ledger.give_up_peer(peer, "remote_peer", "disconnected", self.now)
        else:
            self.ledger.fail_peer(peer, FAILED, self.now)

    @rule()
    def new_agent(self) -> None:
        self.agent += 1
        self.alive.add(self.agent)

    @precondition(lambda self: len(self.alive) > 1)
    @rule()
    def destroy_oldest(self) -> None:
        self.destroy(min(self.alive))

    def destroy(self, agent: int) -> None:
        self.alive.discard(agent)
        for known in self.jobs.values():
            known.landing = {t: a for t, a in known.landing.items() if a != agent}
        self.ledger.agent_gone(agent, Failure("remote_rebuilt", "replaced"), self.now)

    @rule()
    def settle_alone(self) -> None:
        """Nobody is told that memory is free who doesn't know that it wasn't."""
        self.take_settled()

    @rule()
    def collect(self) -> None:
        """Every result and every settling, held against what may still land."""
        for result in self.ledger.take_results():
            known = self.jobs[result.job]
            assert known.result is None, "one result a job"
            known.result = result
            if result.memory is Memory.FREE:
                assert not known.landing, "and nothing begins after the end"
            if result.outcome is Outcome.DONE:
                assert known.good == known.pieces
                assert not known.bad
                assert result.nbytes == 10 * (known.pieces or 0)
            else:
                assert result.nbytes == 0
        self.take_settled()

    def take_settled(self) -> None:
        for job in self.ledger.take_settled():
            known = self.jobs[job]
            assert known.result is not None
            assert known.result.memory is Memory.QUARANTINED
            assert not known.settled, "a job settles once"
            assert not known.landing
            known.settled = True

    def teardown(self) -> None:
        self.collect()
        self.ledger.give_up_all("remote_shutdown", "closed", self.now)
        for agent in sorted(self.alive):
            self.destroy(agent)
        self.collect()
        for known in self.jobs.values():
            assert known.result is not None
            assert known.settled is (known.result.memory is Memory.QUARANTINED)
        assert self.ledger.quarantined_bytes() == 0


LedgerMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestLedger = LedgerMachine.TestCase


def begun(ledger: Ledger, job: int, pieces: int, agent: int = 1) -> list[Ticket]:
    """A job with all of its pieces under way."""
    ledger.add(read(job), 0.0)
    planned = ledger.next_unplanned()
    assert planned is not None
    ledger.planned(planned, [piece() for _ in range(pieces)], 0.0)
    tickets = [ledger.begin(lambda job: agent) for _ in range(pieces)]
    return [ticket for ticket in tickets if ticket is not None]


def test_a_piece_under_way_at_the_deadline_keeps_the_memory() -> None:
    ledger = Ledger(5)
    (ticket,) = begun(ledger, 7, 1)
    ledger.give_up_late(100.0)
    (result,) = ledger.take_results()
    assert (result.outcome, result.memory) == (Outcome.GIVEN_UP, Memory.QUARANTINED)
    assert ledger.quarantined_bytes() == 10
    assert ledger.is_stuck("a")
    assert ledger.take_settled() == []
    ledger.ended(ticket, None, 101.0)
    assert ledger.take_settled() == [7]
    assert not ledger.is_stuck("a")


def test_an_end_that_is_not_certain_keeps_it_until_the_agent_is_gone() -> None:
    ledger = Ledger(5)
    (ticket,) = begun(ledger, 7, 1)
    ledger.ended(ticket, LOST, 1.0)
    (result,) = ledger.take_results()
    assert (result.outcome, result.memory) == (Outcome.FAILED, Memory.QUARANTINED)
    ledger.agent_gone(2, FAILED, 2.0)
    assert ledger.take_settled() == []
    ledger.agent_gone(1, FAILED, 2.0)
    assert ledger.take_settled() == [7]


def test_a_failed_piece_lets_the_others_end_first() -> None:
    ledger = Ledger(5)
    first, second = begun(ledger, 7, 2)
    ledger.ended(first, FAILED, 1.0)
    assert ledger.take_results() == []
    ledger.ended(second, None, 2.0)
    (result,) = ledger.take_results()
    assert (result.outcome, result.memory) == (Outcome.FAILED, Memory.FREE)
    assert result.kind == "remote_disconnected"


def test_peers_take_turns() -> None:
    ledger = Ledger(5)
    for job, peer in enumerate("aab"):
        ledger.add(read(job, peer), 0.0)
        planned = ledger.next_unplanned()
        assert planned is not None
        ledger.planned(planned, [piece(), piece()], 0.0)
    order = [ledger.begin(lambda job: 1) for _ in range(6)]
    assert [ticket.job for ticket in order if ticket is not None] == [0, 2, 0, 2, 1, 1]


def test_no_more_jobs_than_agreed() -> None:
    ledger = Ledger(2)
    for job in range(3):
        ledger.add(read(job), 0.0)
    (result,) = ledger.take_results()
    assert (result.job, result.kind, result.memory) == (2, "remote_full", Memory.FREE)


@pytest.mark.parametrize("late", [False, True])
def test_a_job_that_ended_before_it_was_planned_begins_nothing(late: bool) -> None:
    ledger = Ledger(2)
    ledger.add(read(1), 0.0)
    job = ledger.next_unplanned() if late else None
    ledger.give_up(1, "", "called off", 0.0)
    (result,) = ledger.take_results()
    assert result.memory is Memory.FREE
    if job is not None:
        ledger.planned(job, [piece()], 0.0)
    assert ledger.next_unplanned() is None
    assert ledger.begin(lambda job: 1) is None
