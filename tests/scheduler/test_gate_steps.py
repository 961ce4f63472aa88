# SPDX-License-Identifier: Apache-2.0
"""What steps take is learned right, also where vLLM plans a step while another one runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.gated import BUDGET, LENGTHS, Make, engines, fill, teach
from tests.scheduler.sim import BLOCK, prompt
from tests.scheduler.timed import TimedSim

WORLDS = [
    pytest.param({"depth": 1}, 0.0, id="one step at a time"),
    pytest.param({"depth": 2}, 0.0, id="asynchronous"),
    pytest.param({"depth": 2}, 0.002, id="asynchronous, planning takes time"),
    pytest.param({"depth": 2, "v2": True}, 0.002, id="asynchronous, second model runner"),
]
"""With more than one step in flight vLLM's scheduler is its ``AsyncScheduler``."""


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Make]:
    yield from engines(tmp_path)


def prefill(engine: TimedSim, tokens: int) -> float:
    """Seconds on the device, step by step."""
    seconds = engine.token_seconds * tokens + engine.pair_seconds * tokens**2 / 2
    return seconds + engine.step_seconds * -(-tokens // BUDGET)


def predicted(engine: TimedSim, tokens: int) -> float:
    curve = engine.half.gate.gate.curve(is_busy=False)
    assert curve is not None
    return curve.seconds(0, tokens)


@pytest.mark.parametrize(("options", "plan_seconds"), WORLDS)
def test_a_prefill_takes_what_it_is_predicted_to_take(
    sim: Make, options: dict, plan_seconds: float
) -> None:
    engine = sim("never", **options)
    engine.plan_seconds = plan_seconds
    teach(engine, times=4)
    for tokens in LENGTHS:
        assert predicted(engine, tokens) == pytest.approx(prefill(engine, tokens), rel=0.1)
    engine.check_quiet()


@pytest.mark.parametrize(("options", "plan_seconds"), WORLDS)
def test_beside_requests_that_decode(sim: Make, options: dict, plan_seconds: float) -> None:
    """Steps of a prefill and steps that only decode take turns, and each has its own time."""
    engine = sim("never", **options)
    engine.plan_seconds = plan_seconds
    for i in range(2):
        engine.add(f"decodes {i}", prompt(40, seed=i), 1000)
    while len(engine.outputs["decodes 1"]) < 20:
        engine.advance()
    for i in range(4):
        for tokens in LENGTHS:
            name = f"{i} {tokens}"
            engine.add(name, prompt(tokens, seed=100 * i + tokens), 1)
            while not engine.outputs[name]:
                engine.advance()
            for _ in range(5):
                engine.advance()
    decode = engine.step_seconds + 2 * engine.token_seconds
    assert engine.half.gate.gate.prefill.decode_seconds() == pytest.approx(decode, rel=0.1)
    for tokens in LENGTHS:
        assert predicted(engine, tokens) == pytest.approx(prefill(engine, tokens), rel=0.15)
    for i in range(2):
        engine.abort(f"decodes {i}")
    engine.run()


@pytest.mark.parametrize(("options", "plan_seconds"), WORLDS)
def test_metrics_say_the_same(sim: Make, options: dict, plan_seconds: float) -> None:
    """Prefills chosen instead of a load: what was predicted, and what it took."""
    engine = sim(**options)
    engine.plan_seconds = plan_seconds
    engine.copy_seconds = 4 * BLOCK * engine.token_seconds
    teach(engine, times=3)
    begun = [engine.counter("gate_seconds", "recompute", k) for k in ("predicted", "actual")]
    tokens = prompt(1200)
    engine.first_token("new", tokens)
    for i in range(10):
        engine.first_token(f"again {i}", tokens)
    said, took = (
        engine.counter("gate_seconds", "recompute", kind) - before
        for kind, before in zip(("predicted", "actual"), begun, strict=True)
    )
    assert took > 0
    assert said == pytest.approx(took, rel=0.1)
    engine.check_quiet()


def test_decoding_with_many_draft_tokens_is_no_prefill(sim: Make) -> None:
    engine = sim("never", drafts=20)
    engine.add("decodes", prompt(40), 400)
    while len(engine.outputs["decodes"]) < 200:
        engine.advance()
    assert not engine.half.gate.gate.prefill.is_known
    assert engine.half.gate.gate.prefill.decode_seconds() > engine.step_seconds
    engine.run()


def test_a_long_read_is_ordered_in_few_long_steps(sim: Make) -> None:
    """A look-up comes once a step, and what it orders must last the disk until the next."""
    tokens, options = prompt(3200), {"num_blocks": 500}
    fill(lambda **more: sim(**options, **more), tokens)
    engine = sim("always", files=True, **options)
    engine.read_seconds = 1.0
    engine.step_seconds = 0.5
    engine.add("decodes", prompt(20, seed=1), 14)
    while len(engine.outputs["decodes"]) < 8:
        engine.advance()
    engine.add("reads", tokens, 1)
    engine.advance()
    assert engine.half.core.disk.reads > 150
    engine.read_seconds = 0.0
    engine.run()
    assert engine.counter("hit_tokens", "disk") == 3200
