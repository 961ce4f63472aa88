# SPDX-License-Identifier: Apache-2.0
"""The gate in a real engine whose tier turns slow and fast again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gate as sweep
from benchmarks._report import Report
from benchmarks._slow_tier import VARIABLE, set_delays
from tests.conftest import ROOT
from tests.engine._server import Pool, flushed, prompt, stored, tiered
from tools.serving import Client

SLOW = {
    **tiered({"cpu": {"capacity": "256MiB"}, "gate": "measured"}),
    "kv_connector": "SlowTieredKVConnector",
    "kv_connector_module_path": "benchmarks._slow_tier",
}
TRIES = 40
LENGTHS = (2048, 3968)
ROUNDS = 6


def decisions(client: Client, choice: str, reason: str) -> float:
    name = "vllm:tiered_kv_gate_decisions_total"
    return client.metrics().value(name, choice=choice, reason=reason)


@pytest.fixture
def delays(tmp_path: Path) -> Path:
    return tmp_path / "delays"


@pytest.fixture
def slowed(delays: Path, models_folder: Path) -> Iterator[Client]:
    """The sweep's engine, whose tier is as slow as a file says."""
    set_delays(delays)
    folder = models_folder / "llama-tiny-float32-0"
    model = sweep.build_model("llama-tiny", folder, dtype="float32")
    with (
        sweep.server(model, delays, delays.with_name("server.log")) as running,
        Client(running.url) as client,
    ):
        yield client


def again(client: Client, tokens: list[int]) -> int:
    """How many tokens of a stored prompt were not computed again."""
    assert flushed(client)
    return client.complete(tokens, max_tokens=1).cached_tokens


@pytest.mark.slow
def test_a_tier_is_used_while_it_is_faster_than_computing(servers: Pool, tmp_path: Path) -> None:
    """Milliseconds against seconds, so that no measurement can be in doubt."""
    delays = tmp_path / "delays"
    set_delays(delays)
    env = {VARIABLE: str(delays), "PYTHONPATH": str(ROOT)}
    with servers.private(kv_transfer_config=SLOW, env=env) as running:
        client = running.client
        known = prompt("known", 3000)
        client.complete(known, max_tokens=1)
        for i in range(8):
            client.complete(prompt(i, 300 + 300 * i), max_tokens=1)
        stored(client)
        for _ in range(4):
            assert again(client, known) > 2900
        assert decisions(client, "all", "predicted") > 0

        set_delays(delays, copy=0.3)  # seconds for the prompt
        for _ in range(TRIES):
            if again(client, known) == 0:
                break
        assert again(client, known) == 0
        assert decisions(client, "none", "predicted") >= 2
        params = {"tiered_kv": {"gate": "always"}}
        set_delays(delays)
        for _ in range(TRIES):  # somebody's loads tell that it is fast again
            assert flushed(client)
            client.complete(known, max_tokens=1, kv_transfer_params=params)
            if again(client, known) > 0:
                break
        assert again(client, known) > 2900
        metrics = client.metrics()
        assert metrics.value("vllm:tiered_kv_gate_regret_seconds_total", choice="all") > 0
        for kind in ("predicted", "actual"):
            name = "vllm:tiered_kv_gate_seconds_total"
            assert metrics.value(name, what="load", kind=kind) > 0
            assert metrics.value(name, what="recompute", kind=kind) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_is_never_slower_than_the_better_of_both(slowed: Client, delays: Path) -> None:
    """All speeds and lengths; within noise, which the sweep knows."""
    rows = sweep.sweep(slowed, delays, sweep.SLOWNESS, sweep.LENGTHS, 12, Report("gate"))
    missed = [row for row in rows if row["low"] > sweep.GOAL]
    assert len(missed) <= len(rows) // 20, missed  # as many as chance gives


@pytest.mark.slow
def test_a_sweep_loads_from_a_fast_tier_and_not_from_a_slow_one(
    slowed: Client, delays: Path
) -> None:
    """And again from one that has turned fast: only what was chosen counts, at speeds far apart."""
    rows = sweep.sweep(slowed, delays, (0.0, 20.0, 0.0), LENGTHS, ROUNDS, Report("gate"))
    loaded = [row["loaded"] for row in rows]
    fast, slow, last = loaded[:2], loaded[2:4], loaded[-1]
    assert min(fast) >= ROUNDS - 1
    assert max(slow) <= 1
    assert last >= ROUNDS - 1


@pytest.mark.slow
def test_a_tier_that_turns_fast_again_is_tried_and_then_used(slowed: Client, delays: Path) -> None:
    """No request says ``always``: what is refused is tried by itself, now and then."""
    (tokens,) = sweep.teach(slowed, delays, LENGTHS[:1]).values()
    for _ in range(4):
        sweep.ask(slowed, tokens, "measured")
    assert sweep.loads(slowed) > 0
    set_delays(delays, copy=0.03)
    for _ in range(TRIES):
        sweep.ask(slowed, tokens, "measured")
        if decisions(slowed, "none", "predicted") > 3:
            break
    assert decisions(slowed, "none", "predicted") > 3
    set_delays(delays)
    loaded = sweep.loads(slowed)
    for _ in range(40 * TRIES):
        sweep.ask(slowed, tokens, "measured")
        if sweep.loads(slowed) > loaded + 3:
            break
    assert decisions(slowed, "part", "exploring") > 0
    assert sweep.loads(slowed) > loaded + 3


@pytest.mark.slow
def test_regret_is_what_a_replay_of_both_choices_shows(slowed: Client, delays: Path) -> None:
    """A tier turns slow again and again: each time a few loads are chosen that are regretted."""
    (tokens,) = sweep.teach(slowed, delays, LENGTHS[:1]).values()

    def regret() -> float:
        name, metrics = "vllm:tiered_kv_gate_regret_seconds_total", slowed.metrics()
        return sum(metrics.value(name, choice=choice) for choice in ("all", "part"))

    replayed = found = 0.0
    for _ in range(3):
        set_delays(delays)
        for _ in range(TRIES):  # others' loads tell that it is fast
            sweep.ask(slowed, tokens, "always")
            before = sweep.loads(slowed)
            sweep.ask(slowed, tokens, "measured")
            if sweep.loads(slowed) > before:
                break
        set_delays(delays, copy=0.25)  # two seconds for the prompt
        before, known = sweep.loads(slowed), regret()
        took = sweep.ask(slowed, tokens, "measured")
        assert sweep.loads(slowed) == before + 1
        found += regret() - known
        replayed += max(0.0, took - sweep.ask(slowed, tokens, "never"))
    assert replayed > 0
    assert found == pytest.approx(replayed, rel=0.5)
