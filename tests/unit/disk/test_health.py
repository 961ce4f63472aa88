# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from vllm_tiered_kv.tiers.disk.health import (
    FAILURES_IN_A_ROW,
    FIRST_PAUSE,
    LONGEST_PAUSE,
    SUCCESSES_THAT_COUNT,
    Condition,
    Health,
)


def paused(now: float = 0.0) -> Health:
    health = Health()
    health.failed(now, at_once=True)
    return health


def test_single_failures_between_successes_change_nothing() -> None:
    health = Health()
    for _ in range(20):
        for _ in range(FAILURES_IN_A_ROW - 1):
            health.failed(0.0)
        health.succeeded()
    assert health.is_good


def test_failures_in_a_row_pause_it() -> None:
    health = Health()
    for _ in range(FAILURES_IN_A_ROW):
        assert health.is_good
        health.failed(0.0)
    assert health.condition(FIRST_PAUSE / 2) is Condition.PAUSED
    assert not health.is_good


def test_it_is_tried_after_the_pause_and_the_next_event_decides() -> None:
    health = paused()
    assert health.condition(FIRST_PAUSE) is Condition.DUE
    health.succeeded()
    assert health.is_good
    health = paused()
    health.condition(FIRST_PAUSE)
    health.failed(FIRST_PAUSE)
    assert health.condition(2 * FIRST_PAUSE) is Condition.PAUSED
    assert health.condition(3 * FIRST_PAUSE) is Condition.DUE


def test_a_success_during_the_pause_does_not_end_it() -> None:
    health = paused()
    health.succeeded()
    assert not health.is_good
    assert health.condition(0.0) is Condition.PAUSED


def test_pauses_double_up_to_a_limit_and_many_successes_begin_anew() -> None:
    health, now, pauses = Health(), 0.0, []
    for _ in range(12):
        health.failed(now, at_once=True)
        start = now
        while health.condition(now) is Condition.PAUSED:
            now += 0.5
        pauses.append(now - start)
        health.succeeded()
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE
    for _ in range(SUCCESSES_THAT_COUNT):
        health.succeeded()
    health.failed(now, at_once=True)
    assert health.condition(now + FIRST_PAUSE) is Condition.DUE


@given(st.lists(st.tuples(st.sampled_from(["good", "bad", "look"]), st.floats(0, 100))))
def test_whatever_happened_it_recovers(events: list[tuple[str, float]]) -> None:
    health, now = Health(), 0.0
    for what, seconds in events:
        now += seconds
        if what == "good":
            health.succeeded()
        elif what == "bad":
            health.failed(now)
        else:
            health.condition(now)
    assert health.condition(now + LONGEST_PAUSE) in (Condition.GOOD, Condition.DUE)
    health.succeeded()
    assert health.is_good
