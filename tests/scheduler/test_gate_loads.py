# SPDX-License-Identifier: Apache-2.0
"""Where loads end by the gate: at the best of all possible ends, or where they fall behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.gated import BUDGET, Make, decisions, engines, fill, teach
from tests.scheduler.sim import BLOCK, STATE, prompt
from tests.scheduler.timed import TimedSim
from vllm_tiered_kv.gate import Reason
from vllm_tiered_kv.gate.choice import AS_GOOD

WINDOWS = [(0,), (0, 40), (STATE, 0), (0, STATE, 40)]


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Make]:
    yield from engines(tmp_path)


class Witness:
    """Holds each decision on a load from the CPU tier against all others that were possible."""

    def __init__(self, engine: TimedSim) -> None:
        self._gate: Any = engine.half.gate
        self._copy_to = self._gate.copy_to
        self._gate.copy_to = self
        self.ends: list[int] = []
        """How many there were, by decision."""

    def __call__(self, state: Any, first: int, start: int, ends: Sequence[int]) -> int:
        gate = self._gate
        curve = gate.gate.curve(is_busy=gate._is_busy)
        options = [gate._option(first, n, 0) for n in ends]
        chunks: int = self._copy_to(state, first, start, ends)
        decision = state.ruling.decision
        if decision.reason is Reason.PREDICTED:
            tokens = state.request.num_tokens
            every = [each.load + curve.seconds(each.end, tokens) for each in options]
            best = min(curve.seconds(start, tokens), *every)
            assert decision.total <= (1 + AS_GOOD) * best * (1 + 1e-9)
            self.ends.append(len(ends))
        return chunks


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("slowness", [0.3, 1.0, 1.4, 2.0])
def test_no_end_that_a_hit_can_have_is_better(
    sim: Make, windows: tuple[int, ...], slowness: float
) -> None:
    engine = sim(windows=windows, num_blocks=200 * len(windows))
    engine.step_seconds = 0.05  # so that whether a rest fits one step makes a difference
    engine.copy_seconds = slowness * BLOCK * engine.token_seconds / len(windows)
    witness = Witness(engine)
    teach(engine, times=3)
    for length in (530, 700, 1000, 1300):
        tokens = prompt(length, seed=length)
        engine.first_token(f"new {length}", tokens)
        engine.first_token(f"again {length}", tokens)
    assert len(witness.ends) > 8
    assert max(witness.ends) > (1 if STATE in windows else 30)
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(0,), (0, 40)])
def test_a_rest_that_just_fits_one_step_is_computed(sim: Make, windows: tuple[int, ...]) -> None:
    """Further on a load is slower than computing, and before it a step more would be needed."""
    engine = sim(windows=windows, num_blocks=200 * len(windows))
    engine.step_seconds = 0.1
    engine.copy_seconds = 1.5 * BLOCK * engine.token_seconds
    teach(engine, times=3)
    parts, hits = decisions(engine, "part", "predicted"), engine.hit_tokens
    tokens = prompt(1000)
    engine.first_token("new", tokens)
    engine.first_token("again", tokens)
    assert decisions(engine, "part", "predicted") == parts + 1
    assert engine.hit_tokens == hits + -(-(1000 - BUDGET) // BLOCK) * BLOCK
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(0,), (0, 40)])
def test_of_what_lies_on_disk_so_much_is_read(sim: Make, windows: tuple[int, ...]) -> None:
    options = {"windows": windows, "num_blocks": 200 * len(windows)}
    known = [prompt(1000, seed=i) for i in range(4)]
    taught = [prompt(length, seed=1 + length) for length in (70, 150, 300, 600, 1200)]

    def make(**more: Any) -> TimedSim:
        return sim(**options, **more)

    fill(make, *known, *taught)
    engine = make(files=True)
    engine.step_seconds = 0.1
    engine.read_seconds = 1.5 * BLOCK * engine.token_seconds
    teach(engine)
    for i, tokens in enumerate(taught):
        engine.first_token(f"taught {i}", tokens)
    read = engine.counter("hit_tokens", "disk")
    engine.first_token("known", known.pop())
    assert engine.counter("hit_tokens", "disk") == read + -(-(1000 - BUDGET) // BLOCK) * BLOCK
    engine.check_quiet()


@pytest.mark.parametrize(
    ("windows", "ranks"), [((0,), 1), ((0,), 2), ((0, 40), 1), ((STATE, 0), 1), ((0, 40), 2)]
)
def test_a_load_that_falls_far_behind_is_given_up(
    sim: Make, windows: tuple[int, ...], ranks: int
) -> None:
    """On one rank of two: what that one lacks is missing."""
    engine = sim(windows=windows, num_blocks=200 * len(windows), ranks=ranks)
    engine.fast_ranks = set(range(ranks - 1))
    teach(engine)
    tokens = prompt(1200)
    engine.first_token("new", tokens)
    engine.first_token("fast", tokens)
    known = len(engine.half.core.index)
    assert decisions(engine, "all", "predicted") > 0
    engine.copy_seconds = 0.05  # seconds for all of it
    took = engine.first_token("slow", tokens)
    assert took < 0.25 + 0.05 + 2 * 0.15  # patience, a piece under way, computing it
    assert engine.counter("gate_given_up", "cpu") == 1
    assert engine.counter("failures", "load_late") == 1
    if len(windows) == 1:
        assert 0 < engine.computed["slow"] < 1200  # what has come is used
    else:
        assert engine.computed["slow"] == 1200  # vLLM cannot be told which blocks are missing
    assert len(engine.half.core.index) == known  # nothing is wrong with the chunks
    regret = engine.counter("gate_regret_seconds", "all")
    assert regret == pytest.approx(took - 0.14, rel=0.3)
    for i in range(6):
        engine.first_token(f"after {i}", tokens)
    assert engine.counter("gate_given_up", "cpu") <= 3  # the first could be accidents
    assert decisions(engine, "none", "predicted") > 0
    engine.check_quiet()


@pytest.mark.parametrize(("gate", "policy"), [("always", "recompute"), ("measured", "fail")])
def test_a_load_that_must_not_be_given_up_is_waited_for(sim: Make, gate: str, policy: str) -> None:
    """It was asked for, or vLLM would fail its request."""
    engine = sim(gate, policy=policy)
    teach(engine)
    tokens = prompt(1200)
    engine.first_token("new", tokens)
    engine.copy_seconds = 0.05
    engine.first_token("slow", tokens)
    assert engine.computed["slow"] == 1
    assert engine.counter("gate_given_up", "cpu") == 0
    engine.check_quiet()
