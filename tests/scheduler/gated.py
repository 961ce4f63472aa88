# SPDX-License-Identifier: Apache-2.0
"""Engines in which everything takes a known time, with a gate that learns it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.scheduler.disks import disk
from tests.scheduler.sim import prompt
from tests.scheduler.timed import TimedSim

Make = Callable[..., TimedSim]
LENGTHS = (70, 150, 300, 600, 1200)
BUDGET = 512


def engines(folder: Path) -> Iterator[Make]:
    """Makes engines; with ``files`` they have a disk tier, in one folder. For a fixture."""
    made: list[TimedSim] = []

    def make(gate: str = "measured", *, files: bool = False, **options: Any) -> TimedSim:
        extra = {"gate": gate, **(disk(folder) if files else {}), **options.pop("extra", {})}
        given = {"num_blocks": 200, "capacity_chunks": 2000, "max_num_batched_tokens": BUDGET}
        engine = TimedSim(extra=extra, **{**given, **options})
        made.append(engine)
        if files:
            engine.complete("opens", [1], 1)
            engine.let_through()
            assert engine.agent.is_readable
        return engine

    yield make
    for engine in made:
        engine.close()


def teach(engine: TimedSim, *, times: int = 2) -> None:
    """Prompts that nobody has seen, and the same again."""
    for i in range(times):
        for length in LENGTHS:
            tokens = prompt(length, seed=10_000 * (i + 1) + length)
            engine.first_token(f"new {i} {length}", tokens)
            engine.first_token(f"again {i} {length}", tokens)


def fill(make: Make, *prompts: list[int]) -> None:
    """An engine that leaves these prompts in the folder and ends."""
    engine = make(files=True)
    for i, tokens in enumerate(prompts):
        engine.first_token(f"fill {i}", tokens)
    engine.check_quiet()
    engine.close()


def reading(make: Make) -> tuple[TimedSim, list[list[int]]]:
    """An engine that has learned its speed and its disk's; prompts that lie there unread."""
    known = [prompt(1000, seed=i) for i in range(8)]
    fill(make, *known)
    engine = make(files=True)
    engine.read_seconds = 0.0001
    teach(engine)
    for i in range(6):
        engine.first_token(f"reads {i}", known.pop())
    return engine, known


def decisions(engine: TimedSim, choice: str, reason: str) -> float:
    return engine.counter("gate_decisions", choice, reason)


def chosen(engine: TimedSim, choice: str) -> float:
    engine._collect()
    return sum(
        count
        for key, count in engine.counters.items()
        if key.startswith(f"gate_decisions|{choice}|")
    )
