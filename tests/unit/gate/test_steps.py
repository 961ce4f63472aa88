# SPDX-License-Identifier: Apache-2.0
"""Steps are matched with their ends, whatever is in flight."""

from __future__ import annotations

import itertools

import pytest

from vllm_tiered_kv.gate import Work
from vllm_tiered_kv.gate.regret import Pace, regret
from vllm_tiered_kv.gate.steps import MAX_IN_FLIGHT, StepClock


def test_one_step_at_a_time_begins_when_it_is_planned() -> None:
    clock: StepClock[str] = StepClock()
    clock.planned(1.0, Work(5), last=("a",))
    end = clock.ended(1.5)
    assert end is not None
    assert (end.seconds, end.last, end.is_clean) == (0.5, ("a",), True)
    clock.planned(10.0, Work(5), is_clean=False)
    end = clock.ended(10.25)
    assert end is not None
    assert (end.seconds, end.is_clean) == (0.25, False)


def test_a_step_planned_ahead_begins_when_its_predecessor_ends() -> None:
    clock: StepClock[str] = StepClock()
    clock.planned(0.0, Work(5))
    clock.planned(0.1, Work(6))
    first = clock.ended(1.0)
    clock.planned(1.1, Work(7))
    second = clock.ended(1.5)
    assert first is not None
    assert second is not None
    assert (first.work.tokens, first.seconds) == (5, 1.0)
    assert (second.work.tokens, second.seconds) == (6, 0.5)


def test_an_end_that_belongs_to_no_step_is_none() -> None:
    clock: StepClock[str] = StepClock()
    assert clock.ended(1.0) is None
    clock.planned(2.0, Work(5))
    end = clock.ended(2.5)
    assert end is not None
    assert end.seconds == 0.5


def test_ends_that_never_come_are_forgotten() -> None:
    clock: StepClock[str] = StepClock()
    for i in range(MAX_IN_FLIGHT + 1):
        clock.planned(float(i), Work(i + 1))
    end = clock.ended(float(MAX_IN_FLIGHT) + 0.5)
    assert end is not None
    assert (end.work.tokens, end.seconds) == (MAX_IN_FLIGHT + 1, 0.5)
    assert clock.ended(99.0) is None


def test_a_turn_is_what_steps_take_or_how_often_an_idle_engine_looks() -> None:
    clock: StepClock[str] = StepClock()
    now = 0.0
    for _ in range(20):
        clock.planned(now, Work(8))
        now += 0.05
        clock.ended(now)
    assert clock.turn(is_busy=True) == pytest.approx(0.05)
    for _ in range(20):
        clock.planned(now + 0.0005, Work())
        now += 0.004
        clock.ended(now)
    clock.planned(now + 1000, Work())  # it slept
    clock.ended(now + 1000.004)
    assert clock.turn(is_busy=False) == pytest.approx(0.004)
    assert clock.turn(is_busy=True) == pytest.approx(0.05)


def test_probes_become_rare_while_nothing_changes() -> None:
    pace, tries = Pace(2.0, 60.0), []
    for second in range(1000):
        if pace.is_due(second):
            pace.tried(second)
            tries.append(second)
    gaps = [b - a for a, b in itertools.pairwise(tries)]
    assert gaps[:5] == [2, 4, 8, 16, 32]
    assert set(gaps[5:]) == {60}
    pace.begin_again()
    assert pace.is_due(1000.0)


def test_regret_is_what_was_lost() -> None:
    assert regret(3.0, 2.0) == 1.0
    assert regret(1.0, 2.0) == 0.0
    assert regret(1.0, None) == 0.0
