# SPDX-License-Identifier: Apache-2.0
"""What is said of the time to the first token, in a world where all takes a known time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.disks import disk
from tests.scheduler.sim import prompt
from tests.scheduler.timed import IDLE_TURN, TimedSim

Make = Callable[..., TimedSim]


@pytest.fixture
def sim() -> Iterator[Make]:
    made: list[TimedSim] = []

    def make(**options: Any) -> TimedSim:
        engine = TimedSim(**{"num_blocks": 200, "capacity_chunks": 2000, **options})
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def seen(engine: TimedSim) -> dict[str, list[float]]:
    """By source; each first token once."""
    engine._collect()
    name = "time_to_first_token_seconds|"
    return {key.removeprefix(name): values for key, values in engine.observed.items()}


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_each_is_timed_and_told_by_where_the_prompt_came_from(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.copy_seconds = 0.001
    tokens = prompt(600)
    new = engine.first_token("new", tokens)
    again = engine.first_token("again", tokens)
    engine.add("shares", [*tokens, *prompt(100, seed=1)], 8)
    engine.run()
    found = seen(engine)
    assert sorted(found) == ["cpu", "device", "none"]
    # The simulated engine takes another turn before its client sees the token.
    assert found["none"] == [pytest.approx(new, abs=1.01 * IDLE_TURN)]
    assert found["cpu"] == [pytest.approx(again, abs=1.01 * IDLE_TURN)]
    assert new > 10 * IDLE_TURN
    assert len(found["device"]) == 1  # not the seven tokens after it
    for source, count in (("none", 600), ("cpu", 600), ("device", 700)):
        assert engine.counter("prompt_tokens", source) == count
    engine.check_quiet()


def test_what_was_read_from_disk(sim: Make, tmp_path: Path) -> None:
    tokens = prompt(300)
    for name in ("writes", "reads"):
        engine = sim(extra=disk(tmp_path))
        engine.complete("opens", [1], 1)
        engine.let_through()
        engine.read_seconds = 0.01
        took = engine.first_token(name, tokens)
        engine.check_quiet()
        engine.close()
    assert seen(engine)["disk"] == [pytest.approx(took)]
    assert took > 0.1


def test_a_load_that_did_not_arrive(sim: Make) -> None:
    engine = sim()
    engine.first_token("new", prompt(300))
    engine.gate.fail.add("load")
    took = engine.first_token("again", prompt(300))
    assert seen(engine)["failed"] == [pytest.approx(took)]
    engine.check_quiet()


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_neither_aborts_nor_preemptions_are_counted(sim: Make, depth: int) -> None:
    engine = sim(depth=depth, num_blocks=24)
    engine.add("gone", prompt(100), 4)
    engine.schedule()
    engine.abort("gone")
    engine.run()
    assert not seen(engine)
    for i in range(4):
        engine.add(f"tight {i}", prompt(60, seed=i), 30)
    engine.run()
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert sum(map(len, seen(engine).values())) == 4
    engine.check_quiet()
