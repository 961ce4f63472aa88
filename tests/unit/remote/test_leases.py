# SPDX-License-Identifier: Apache-2.0
"""Leases: memory is free when no read can be under way any more, and always some day."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_tiered_kv.remote.leases import LONGEST, MAX_HOLDERS, Denial, LeaseTable

SECONDS, GRACE = 30.0, 5.0


def table(limit: int = 8) -> LeaseTable:
    return LeaseTable(SECONDS, GRACE, limit)


def test_nobody_comes() -> None:
    leases = table()
    assert leases.grant(1, 0.0)
    leases.expire(SECONDS - 0.1)
    assert leases.take_freed() == []
    leases.expire(SECONDS)
    assert leases.take_freed() == [1]
    assert leases.take(1, "a", SECONDS) is Denial.UNKNOWN
    assert leases.expired == 1


def test_taken_and_released() -> None:
    leases = table()
    leases.grant(1, 0.0)
    assert leases.take(1, "a", 1.0) is None
    assert leases.release(1, "a", 2.0)
    assert leases.take_freed() == [1]
    assert not leases.release(1, "a", 2.0)
    assert len(leases) == 0


def test_the_last_of_several_holders_frees() -> None:
    leases = table()
    leases.grant(1, 0.0)
    leases.take(1, "a", 1.0)
    leases.take(1, "b", 2.0)
    leases.release(1, "a", 3.0)
    assert leases.take_freed() == []
    assert not leases.release(1, "c", 3.0)
    leases.release(1, "b", 4.0)
    assert leases.take_freed() == [1]


def test_a_holder_that_renews_keeps_it() -> None:
    leases = table()
    leases.grant(1, 0.0)
    leases.take(1, "a", 10.0)
    for now in range(30, 301, 10):
        assert leases.renew(1, "a", float(now))
    assert leases.take_freed() == []
    assert not leases.renew(1, "a", 300.0 + SECONDS)


def test_a_holder_that_says_nothing_costs_the_grace() -> None:
    leases = table()
    leases.grant(1, 0.0)
    leases.take(1, "a", 10.0)
    leases.expire(10.0 + SECONDS)
    assert leases.take_freed() == []
    assert leases.take(1, "b", 10.0 + SECONDS) is Denial.UNKNOWN
    leases.expire(10.0 + SECONDS + GRACE - 0.1)
    assert leases.take_freed() == []
    leases.expire(10.0 + SECONDS + GRACE)
    assert leases.take_freed() == [1]


def test_a_late_holder_counts_also_when_another_one_releases() -> None:
    leases = table()
    leases.grant(1, 0.0)
    leases.take(1, "late", 0.0)
    leases.take(1, "good", 29.0)
    assert leases.release(1, "good", 31.0)  # "late" may still be reading
    assert leases.take_freed() == []
    leases.expire(SECONDS + GRACE)
    assert leases.take_freed() == [1]


def test_there_are_at_most_so_many() -> None:
    leases = table(limit=2)
    assert leases.grant(1, 0.0)
    assert leases.grant(2, 0.0)
    assert not leases.grant(3, 0.0)
    assert not leases.grant(2, 0.0)
    holders = [leases.take(1, str(i), 0.0) for i in range(MAX_HOLDERS + 1)]
    assert holders == [None] * MAX_HOLDERS + [Denial.TOO_MANY]
    assert leases.take(1, "0", 1.0) is None


def test_what_was_released_is_not_remembered() -> None:
    leases = table()
    for number in range(20_000):
        leases.grant(number, 0.0)
        leases.take(number, "a", 0.0)
        leases.release(number, "a", 0.0)
    leases.grant(20_000, 0.0)
    assert len(leases._due) < 2000
    leases.expire(SECONDS)
    assert len(leases.take_freed()) == 20_001


def test_what_is_revoked_is_given_to_nobody_and_freed_when_it_is_not_read() -> None:
    leases = table()
    leases.grant(1, 0.0)
    leases.grant(2, 0.0)
    leases.take(2, "a", 0.0)
    leases.revoke(1.0)
    assert leases.take_freed() == [1]
    assert leases.take(2, "b", 1.0) is Denial.UNKNOWN
    assert not leases.renew(2, "a", 1.0)
    leases.expire(SECONDS + GRACE)
    assert leases.take_freed() == [2]


def test_nobody_keeps_one_for_ever() -> None:
    leases = table()
    leases.grant(1, 0.0)
    leases.take(1, "a", 0.0)
    now = 0.0
    while leases.renew(1, "a", now):
        now += SECONDS / 2
    assert LONGEST <= now <= LONGEST + SECONDS
    leases.expire(now + SECONDS + GRACE)
    assert leases.take_freed() == [1]


class Leases(RuleBasedStateMachine):
    """Against a model that keeps every read a holder was ever allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = LeaseTable(SECONDS, GRACE, 6)
        self.now = 0.0
        self.number = 0
        self.alive: set[int] = set()
        self.open_until: dict[int, float] = {}
        self.reading: dict[tuple[int, str], float] = {}
        """Until when a holder may read, until it has released."""

    @rule()
    def grant(self) -> None:
        self.number += 1
        granted = self.leases.grant(self.number, self.now)
        assert granted or len(self.leases) == 6
        if granted:
            self.alive.add(self.number)
            self.open_until[self.number] = self.now + SECONDS

    @rule(number=st.integers(0, 12), holder=st.sampled_from("abc"))
    def take(self, number: int, holder: str) -> None:
        if self.leases.take(number, holder, self.now) is None:
            assert number in self.alive
            self.reading[number, holder] = self.now + SECONDS

    @rule(number=st.integers(0, 12), holder=st.sampled_from("abc"))
    def renew(self, number: int, holder: str) -> None:
        if self.leases.renew(number, holder, self.now):
            assert self.reading[number, holder] > self.now
            self.reading[number, holder] = self.now + SECONDS

    @rule(number=st.integers(0, 12), holder=st.sampled_from("abc"))
    def release(self, number: int, holder: str) -> None:
        if self.leases.release(number, holder, self.now):
            del self.reading[number, holder]

    @rule()
    def revoke(self) -> None:
        self.leases.revoke(self.now)

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0, 10.0, 29.0, 31.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)

    @invariant()
    def what_is_free_is_read_by_nobody(self) -> None:
        for number in self.leases.take_freed():
            self.alive.remove(number)
            ends = [until for (n, _), until in self.reading.items() if n == number]
            assert all(until + GRACE <= self.now for until in ends)
            self.reading = {k: v for k, v in self.reading.items() if k[0] != number}

    @invariant()
    def what_is_over_is_free(self) -> None:
        assert len(self.leases) == len(self.alive) <= 6
        for number in self.alive:
            ends = [until + GRACE for (n, _), until in self.reading.items() if n == number]
            assert max([self.open_until[number], *ends]) > self.now
        assert (self.leases.next_due is None) <= (not self.alive)


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestLeases = Leases.TestCase
