# SPDX-License-Identifier: Apache-2.0
"""What was once slow is not refused for ever, and what hangs is not waited for each time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.gated import LENGTHS, Make, decisions, engines, fill, reading, teach
from tests.scheduler.manual import Pace
from tests.scheduler.sim import BLOCK, STATE, prompt
from tests.scheduler.timed import IDLE_TURN


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Make]:
    yield from engines(tmp_path)


@pytest.mark.parametrize("windows", [(0,), (STATE, 0)])
def test_a_cpu_tier_after_accidents_of_many_seconds(sim: Make, windows: tuple[int, ...]) -> None:
    """With recurrent states no hit may end within what is tried elsewhere."""
    engine = sim(windows=windows, num_blocks=200 * len(windows))
    teach(engine)
    tokens = prompt(900)
    engine.first_token("new", tokens)
    for i in range(4):  # the host swaps: nobody would wait for that once more
        engine.copy_seconds = 0.5
        engine.first_token(f"slow {i}", tokens, params={"tiered_kv": {"gate": "always"}})
    engine.copy_seconds = 0.0
    refused = decisions(engine, "none", "predicted")
    loaded = decisions(engine, "all", "predicted")
    for i in range(300):
        engine.half.gate.gate.took(10.0)  # what others meanwhile take
        engine.first_token(f"again {i}", tokens)
        if decisions(engine, "all", "predicted") > loaded + 5:
            break
    assert decisions(engine, "none", "predicted") > refused
    assert decisions(engine, "part", "exploring") + decisions(engine, "all", "exploring") > 0
    assert decisions(engine, "all", "predicted") > loaded + 5
    engine.check_quiet()


@pytest.mark.parametrize("deadline", [0.05, 0.4])
def test_a_disk_that_hangs_is_not_waited_for_each_time(sim: Make, deadline: float) -> None:
    """Not even if the option ends each wait before the gate would."""
    known = [prompt(3000, seed=i) for i in range(12)]
    options: dict[str, Any] = {"extra": {"load_deadline": deadline}, "num_blocks": 400}
    fill(lambda **more: sim(**options, **more), *known)
    engine = sim(files=True, **options)
    teach(engine)
    for i in range(3):
        engine.first_token(f"reads {i}", known.pop())
    assert engine.counter("hit_tokens", "disk") > 6000
    alone = engine.first_token("computed", prompt(3000, seed=99))
    engine.pace = Pace.NONE
    took = [engine.first_token(f"hangs {i}", known.pop()) for i in range(8)]
    assert took[0] > alone + 0.9 * deadline
    assert took[-1] < 1.05 * alone
    assert decisions(engine, "none", "predicted") > 0
    engine.pace = Pace.ALL
    engine.let_through()
    engine.check_quiet()


def test_a_disk_of_a_model_with_states_is_probed(sim: Make) -> None:
    """No hit ends within the chunks that a probe reads."""
    options: dict[str, Any] = {"windows": (STATE, 0), "num_blocks": 400}
    known = [prompt(900, seed=i) for i in range(40)]
    fill(lambda **more: sim(**options, **more), *known)
    engine = sim(files=True, **options)
    engine.read_seconds = 40 * BLOCK * engine.token_seconds
    teach(engine)
    for i in range(10):
        engine.first_token(f"slow {i}", known.pop())
    assert decisions(engine, "none", "predicted") > 0
    read = engine.counter("hit_tokens", "disk")
    engine.read_seconds = 0.0
    while known and engine.counter("hit_tokens", "disk") == read:
        engine.now += 10.0
        engine.first_token(f"fast {len(known)}", known.pop())
    assert engine.counter("gate_probes", "disk") > 0
    assert engine.counter("hit_tokens", "disk") > read
    engine.check_quiet()


def test_a_load_that_is_never_begun_is_given_up_and_learned_from(sim: Make) -> None:
    """Nothing is copied any more: threads hang, and requests must not hang with them."""
    engine = sim()
    teach(engine)
    tokens = prompt(1200)
    engine.first_token("new", tokens)
    alone = engine.first_token("computed", prompt(1200, seed=5))

    def pause() -> None:
        engine._pass(IDLE_TURN)
        for lane in engine.lanes:  # what ends without a thread is known
            while lane.ended:
                lane.report(0)

    engine.pause = pause
    took = [engine.first_token(f"hangs {i}", tokens) for i in range(8)]
    assert took[0] < alone + 0.35
    assert took[-1] == pytest.approx(alone, rel=0.05)
    assert engine.counter("failures", "load_dropped") == engine.counter("gate_given_up", "cpu") > 0
    assert engine.counter("gate_regret_seconds", "all") > 0.25
    assert engine.counter("gate_seconds", "load", "actual") > 0.25
    engine.check_quiet()


def test_prefills_are_learned_also_where_every_step_begins_a_load(sim: Make) -> None:
    engine = sim()
    planned = engine.half.gate.planned
    engine.half.gate.planned = lambda *args, **_: planned(*args, loads=True)
    teach(engine, times=4)
    curve = engine.half.gate.gate.curve(is_busy=False)
    assert curve is not None
    for tokens in LENGTHS[2:]:
        seconds = engine.token_seconds * tokens + engine.pair_seconds * tokens**2 / 2
        assert curve.seconds(0, tokens) == pytest.approx(seconds, rel=0.2)


def test_what_is_given_up_counts_as_a_load_that_replaced_less(sim: Make) -> None:
    engine = sim()
    teach(engine)
    tokens = prompt(1200)
    engine.first_token("new", tokens)

    def seconds() -> tuple[float, ...]:
        kinds = (("load", "actual"), ("replaced", "predicted"))
        return tuple(engine.counter("gate_seconds", *kind) for kind in kinds)

    before = seconds()
    engine.first_token("fast", tokens)
    middle = seconds()
    engine.copy_seconds = 0.05
    engine.first_token("slow", tokens)
    assert engine.counter("gate_given_up", "cpu") == 1
    fast, slow = (
        (b - a for a, b in zip(*pair, strict=True))
        for pair in ((before, middle), (middle, seconds()))
    )
    (load, replaced), (late, little) = fast, slow
    assert load < replaced
    assert 0 <= little < 0.5 * replaced
    assert late > little


def test_what_was_read_for_nothing_counts_as_a_load(sim: Make) -> None:
    engine, known = reading(sim)
    before = [
        engine.counter("gate_seconds", *kind)
        for kind in (("load", "actual"), ("replaced", "predicted"))
    ]
    engine.pace = Pace.NONE
    took = engine.first_token("hangs", known.pop())
    load, replaced = (
        engine.counter("gate_seconds", *kind) - seconds
        for kind, seconds in zip(
            (("load", "actual"), ("replaced", "predicted")), before, strict=True
        )
    )
    assert 0.05 < load < took
    assert replaced == 0
    engine.pace = Pace.ALL
    engine.check_quiet()


def test_a_load_that_is_nearly_done_keeps_nobody_waiting(sim: Make) -> None:
    engine = sim()
    engine.copy_seconds = 0.3 * BLOCK * engine.token_seconds
    teach(engine, times=3)
    long, short = prompt(2600, seed=1), prompt(300, seed=2)
    engine.first_token("new", long)
    engine.first_token("newer", short)
    engine.flush_device()
    engine.pace = Pace.NONE
    engine.add("long", long, 1)
    engine.advance()
    engine.advance()
    assert engine.half.core.ledger.loads
    assert engine.half.gate._copying() > 0
    engine.now += 2600 * 0.3 * engine.token_seconds  # in which it is copied, but for its report
    hits = decisions(engine, "all", "predicted")
    engine.add("short", short, 1)
    engine.advance()
    assert decisions(engine, "all", "predicted") == hits + 1
    engine.pace = Pace.ALL
    engine.run()
    engine.check_quiet()
