# SPDX-License-Identifier: Apache-2.0
"""The gate under vLLM's scheduler, in a world in which everything takes a known time."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scheduler.gated import LENGTHS, Make, chosen, decisions, engines, fill, reading, teach
from tests.scheduler.manual import Pace
from tests.scheduler.sim import BLOCK, STATE, prompt


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Make]:
    yield from engines(tmp_path)


def test_an_engine_that_knows_nothing_loads_and_learns(sim: Make) -> None:
    engine = sim()
    tokens = prompt(600)
    engine.first_token("new", tokens)
    engine.first_token("again", tokens)
    assert decisions(engine, "all", "learning") == 1
    assert engine.hit_tokens == 592
    teach(engine)
    assert decisions(engine, "all", "predicted") > 0
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(0,), (0, 40), (STATE, 0)])
def test_what_is_slower_than_computing_is_not_loaded(sim: Make, windows: tuple[int, ...]) -> None:
    engine = sim(windows=windows, num_blocks=200 * len(windows))
    engine.copy_seconds = 5 * BLOCK * engine.token_seconds
    teach(engine)
    before = engine.hit_tokens
    tokens = prompt(600)
    engine.first_token("new", tokens)
    took = engine.first_token("again", tokens)
    assert engine.hit_tokens == before
    assert decisions(engine, "none", "predicted") > 0
    assert engine.counter("lookups", "refused") > 0
    assert took == pytest.approx(engine.first_token("other", prompt(600, seed=5)), rel=0.05)
    engine.check_quiet()


@pytest.mark.parametrize("slowness", [0.0, 0.3, 0.8, 1.0, 1.2, 3.0, 10.0])
def test_it_is_never_slower_than_the_better_of_both(sim: Make, slowness: float) -> None:
    """A copy takes so many times what computing its tokens would."""
    engines = {gate: sim(gate) for gate in ("measured", "always", "never")}
    for engine in engines.values():
        engine.copy_seconds = slowness * BLOCK * engine.token_seconds
        teach(engine, times=3)
    explored = decisions(engines["measured"], "part", "exploring")
    for length in (40, 100, 200, 400, 900, 1500):
        tokens, took = prompt(length, seed=length), {}
        for gate, engine in engines.items():
            engine.first_token(f"new {length}", tokens)
            took[gate] = engine.first_token(f"again {length}", tokens)
        if decisions(engines["measured"], "part", "exploring") > explored:
            explored = decisions(engines["measured"], "part", "exploring")
            continue  # what that costs is bounded elsewhere
        assert took["measured"] <= 1.05 * min(took["always"], took["never"])


@pytest.mark.parametrize("slowness", [0.0, 0.5, 1.0, 2.0, 10.0])
def test_nor_with_a_disk(sim: Make, slowness: float) -> None:
    known = [prompt(length, seed=length) for length in (40, 100, 200, 400, 900, 1500)]
    taught = [prompt(length, seed=1 + length) for length in LENGTHS]
    fill(sim, *known, *taught)
    took: dict[str, list[float]] = {}
    for gate in ("measured", "always", "never"):
        engine = sim(gate, files=True)
        engine.read_seconds = slowness * BLOCK * engine.token_seconds
        teach(engine)
        for i, tokens in enumerate(taught):
            engine.first_token(f"taught {i}", tokens)
        took[gate] = [engine.first_token(f"again {len(t)}", t) for t in known]
        engine.close()
    for measured, always, never in zip(*took.values(), strict=True):
        assert measured <= 1.05 * min(always, never)


def test_a_cpu_tier_that_turns_fast_again_is_used_again(sim: Make) -> None:
    engine = sim()
    engine.copy_seconds = 2 * BLOCK * engine.token_seconds
    teach(engine, times=4)
    tokens = prompt(300)
    engine.first_token("new", tokens)
    engine.first_token("again", tokens)
    refused = decisions(engine, "none", "predicted")
    assert refused > 0
    engine.copy_seconds = 0.0
    for i in range(2000):
        engine.first_token(f"again {i}", tokens)
        if decisions(engine, "all", "predicted") > 20:
            break
    assert decisions(engine, "all", "predicted") > 20
    assert 0 < decisions(engine, "part", "exploring") < 20
    engine.check_quiet()


def test_a_disk_that_turns_fast_again_is_used_again(sim: Make) -> None:
    """It is measured in the background meanwhile, and less and less often."""
    known = [prompt(400, seed=i) for i in range(200)]
    fill(sim, *known)
    engine = sim(files=True)
    engine.read_seconds = 20 * BLOCK * engine.token_seconds
    teach(engine)
    for i in range(40):
        engine.first_token(f"slow {i}", known.pop())
    slow = engine.counter("hit_tokens", "disk")
    assert slow <= 5 * 400  # what it took to learn it
    assert decisions(engine, "none", "predicted") >= 30
    assert engine.counter("lookups", "refused") >= 30
    engine.read_seconds = 0.0
    while known and engine.counter("hit_tokens", "disk") < slow + 20 * 400:
        engine.now += 1.0
        engine.first_token(f"fast {len(known)}", known.pop())
    assert engine.counter("hit_tokens", "disk") >= slow + 20 * 400
    assert 0 < engine.counter("gate_probes", "disk") < 20
    engine.check_quiet()


def test_a_disk_that_hangs_is_given_up_and_the_rest_is_computed(sim: Make) -> None:
    engine, known = reading(sim)
    assert engine.counter("hit_tokens", "disk") > 5000
    engine.pace = Pace.NONE
    took = engine.first_token("hangs", known.pop())
    assert engine.counter("gate_given_up", "disk") == 1
    assert took < 0.6  # and not the ten seconds that the option allows
    assert engine.counter("gate_regret_seconds", "all") == pytest.approx(0.1, rel=0.5)
    engine.pace = Pace.ALL
    engine.check_quiet()


def test_what_is_known_of_a_disk_is_asked_before_its_folder(sim: Make) -> None:
    """Of a prompt that lies nowhere nothing is decided, and of one that does nothing is read."""
    known = [prompt(400, seed=i) for i in range(30)]
    fill(sim, *known)
    engine = sim(files=True)
    engine.read_seconds = 20 * BLOCK * engine.token_seconds
    teach(engine)
    for i in range(20):
        engine.first_token(f"slow {i}", known.pop())
    refused = decisions(engine, "none", "predicted")
    loaded, probes = (
        engine.counter("chunks", "loaded", "disk"),
        engine.counter("gate_probes", "disk"),
    )
    engine.first_token("unknown", prompt(400, seed=999))
    assert decisions(engine, "none", "predicted") == refused
    engine.first_token("known", known.pop())
    assert decisions(engine, "none", "predicted") == refused + 1
    more = engine.counter("gate_probes", "disk") - probes
    assert engine.counter("chunks", "loaded", "disk") - loaded <= 8 * (more + 1)
    engine.check_quiet()


def test_a_load_costs_steps_of_those_that_decode_beside_it(sim: Make) -> None:
    """What pays in an engine that has nothing else to do does not pay where steps take long."""
    engine = sim()
    engine.copy_seconds = 0.2 * BLOCK * engine.token_seconds
    teach(engine)
    tokens = prompt(400)
    engine.first_token("new", tokens)
    hits = engine.hit_tokens
    engine.first_token("alone", tokens)
    assert engine.hit_tokens == hits + 400
    engine.flush_device()
    engine.step_seconds = 0.05  # a large batch
    engine.add("decodes", prompt(20, seed=77), 60)
    for _ in range(20):
        engine.advance()
    assert engine.half.gate.gate.prefill.decode_seconds() == pytest.approx(0.05, rel=0.1)
    refused = decisions(engine, "none", "predicted")
    engine.add("beside", tokens, 1)
    while not engine.outputs["beside"]:
        engine.advance()
    assert decisions(engine, "none", "predicted") == refused + 1
    assert engine.hit_tokens == hits + 400
    engine.run()
    engine.check_quiet()


@pytest.mark.parametrize("option", ["measured", "always", "never"])
def test_a_request_may_decide_otherwise(sim: Make, option: str) -> None:
    engine = sim(option)
    tokens = prompt(300)
    engine.first_token("new", tokens)
    for gate, reason in (("always", "forced"), ("never", ""), ("measured", "learning")):
        hits, before = engine.hit_tokens, decisions(engine, "all", reason)
        engine.first_token(gate, tokens, params={"tiered_kv": {"gate": gate}})
        assert engine.hit_tokens == hits + (288 if reason else 0)
        assert decisions(engine, "all", reason) == before + bool(reason)
    hits = engine.hit_tokens
    engine.first_token("wrong", tokens, params={"tiered_kv": {"gate": "sometimes"}})
    assert engine.hit_tokens == hits + (0 if option == "never" else 288)
    assert engine.counter("failures", "params") == 1
    engine.check_quiet()


def test_regret_is_what_a_replay_of_both_choices_shows(sim: Make) -> None:
    """The tier changes its speed again and again; what that cost is known."""
    kinds = ("measured", "always", "never")
    engines = {gate: sim(gate) for gate in kinds}
    for engine in engines.values():
        engine.copy_seconds = 0.5 * BLOCK * engine.token_seconds
        teach(engine, times=4)
    measured = engines["measured"]
    known = [prompt(length, seed=length) for length in (300, 700, 1100)]
    for gate in kinds:
        for tokens in known:
            engines[gate].first_token(f"new {len(tokens)}", tokens)
    choices = ("all", "part", "none")
    begun = {c: measured.counter("gate_regret_seconds", c) for c in choices}
    replayed = dict.fromkeys(choices, 0.0)
    for turn in range(240):
        slowness = 3.0 if turn // 60 % 2 else 0.3
        tokens, took = known[turn % 3], {}
        before = {c: chosen(measured, c) for c in choices}
        for gate, engine in engines.items():
            engine.copy_seconds = slowness * BLOCK * engine.token_seconds
            took[gate] = engine.first_token(f"turn {turn}", tokens)
        (choice,) = [c for c in choices if chosen(measured, c) > before[c]]
        other = "always" if choice == "none" else "never"
        replayed[choice] += max(0.0, took["measured"] - took[other])
    found = {c: measured.counter("gate_regret_seconds", c) - begun[c] for c in choices}
    assert replayed["all"] > 0.1
    assert found["all"] == pytest.approx(replayed["all"], rel=0.05)
    assert found["part"] == pytest.approx(replayed["part"], rel=0.2, abs=0.005)


def test_regret_of_a_refusal_is_what_a_replay_shows_when_computing_turns_slow(sim: Make) -> None:
    """What was refused would have been faster, by what is known of the tier."""
    engines = {gate: sim(gate) for gate in ("measured", "always")}
    tokens = prompt(400)
    for engine in engines.values():
        engine.copy_seconds = 2 * BLOCK * engine.token_seconds
        teach(engine, times=4)
        engine.first_token("new", tokens)
        engine.token_seconds *= 6
    measured, replayed = engines["measured"], 0.0
    begun = measured.counter("gate_regret_seconds", "none")
    for turn in range(40):
        before = chosen(measured, "none")
        took = {gate: each.first_token(f"turn {turn}", tokens) for gate, each in engines.items()}
        if chosen(measured, "none") > before:
            replayed += max(0.0, took["measured"] - took["always"])
    found = measured.counter("gate_regret_seconds", "none") - begun
    assert replayed > 0.5
    assert found == pytest.approx(replayed, rel=0.15)
    assert decisions(measured, "all", "predicted") > 0  # and so it has learned


def test_of_what_is_stored_a_prefix_is_loaded_where_the_rest_lies_on_a_slow_disk(
    sim: Make,
) -> None:
    known = [prompt(600, seed=i) for i in range(20)]
    fill(sim, *known)
    engine = sim(files=True)
    engine.read_seconds = 20 * BLOCK * engine.token_seconds
    teach(engine)
    for i in range(10):
        engine.first_token(f"slow {i}", known.pop())
    tokens = known.pop()
    engine.first_token("head", tokens[:320], params={"tiered_kv": {"gate": "never"}})
    parts, hits = decisions(engine, "part", "predicted"), engine.hit_tokens
    read = engine.counter("hit_tokens", "disk")
    engine.first_token("all", tokens)
    assert decisions(engine, "part", "predicted") == parts + 1
    assert engine.hit_tokens == hits + 320
    assert engine.counter("hit_tokens", "disk") == read
    engine.check_quiet()


@pytest.mark.parametrize(
    ("slowness", "what", "other"), [(0.4, "load", "recompute"), (4.0, "recompute", "load")]
)
def test_predicted_and_actual_seconds_agree_where_nothing_changes(
    sim: Make, slowness: float, what: str, other: str
) -> None:
    engine = sim()
    engine.copy_seconds = slowness * BLOCK * engine.token_seconds
    teach(engine, times=3)  # until it knows
    kinds = [(w, k) for w in (what, other) for k in ("predicted", "actual")]
    begun = [engine.counter("gate_seconds", *kind) for kind in kinds]
    replaced = engine.counter("gate_seconds", "replaced", "predicted")
    tokens = prompt(900)
    engine.first_token("new", tokens)
    for i in range(10):
        engine.first_token(f"again {i}", tokens)
    predicted, actual, *others = (
        engine.counter("gate_seconds", *kind) - before
        for kind, before in zip(kinds, begun, strict=True)
    )
    assert actual > 0
    assert predicted == pytest.approx(actual, rel=0.15)
    assert max(others) == 0
    if what == "load":
        assert engine.counter("gate_seconds", "replaced", "predicted") - replaced > actual


def test_each_decision_is_one_line_at_debug_level(
    sim: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sim()
    tokens = prompt(300)
    engine.first_token("new", tokens)
    with caplog.at_level(logging.DEBUG, logger="vllm.tiered_kv.scheduler.gating"):
        engine.first_token("first", tokens)
        engine.first_token("second", tokens, params={"tiered_kv": {"gate": "always"}})
        engine.copy_seconds = 5 * BLOCK * engine.token_seconds
        teach(engine)
        caplog.clear()
        engine.first_token("third", tokens)
    (line,) = [r.getMessage() for r in caplog.records if "gate: request" in r.getMessage()]
    for term in (
        "request third",
        "load none (predicted): 0 of 300 tokens",
        "first token in 0.0",
        "the other way in 0.",
        "engine idle",
        "Curve(step=",
        "queued: 0 B of copies, 0 B of reads",
    ):
        assert term in line


def test_no_line_is_made_where_nobody_reads_it(sim: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = sim("always")
    tokens = prompt(300)
    with caplog.at_level(logging.INFO, logger="vllm.tiered_kv.scheduler.gating"):
        engine.first_token("new", tokens)
        engine.first_token("again", tokens)
    assert not [r for r in caplog.records if "gate: request" in r.getMessage()]
    with caplog.at_level(logging.DEBUG, logger="vllm.tiered_kv.scheduler.gating"):
        engine.first_token("again 2", tokens)
    lines = [r.getMessage() for r in caplog.records if "gate: request" in r.getMessage()]
    assert len(lines) == 1
    assert "load all (forced): 288 of 300 tokens" in lines[0]
