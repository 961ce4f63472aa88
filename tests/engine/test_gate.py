# SPDX-License-Identifier: Apache-2.0
"""The gate in a real engine whose tier turns slow and fast again."""

from __future__ import annotations

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


def decisions(client: Client, choice: str, reason: str) -> float:
    name = "vllm:tiered_kv_gate_decisions_total"
    return client.metrics().value(name, choice=choice, reason=reason)


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
def test_it_is_never_slower_than_the_better_of_both(tmp_path: Path, models_folder: Path) -> None:
    """All speeds and lengths; within noise, which the sweep knows."""
    delays = tmp_path / "delays"
    set_delays(delays)
    model = sweep.build_model("llama-tiny", models_folder / "llama-tiny-float32-0", dtype="float32")
    with (
        sweep.server(model, delays, tmp_path / "server.log") as running,
        Client(running.url) as client,
    ):
        rows = sweep.sweep(client, delays, sweep.SLOWNESS, sweep.LENGTHS, 12, Report("gate"))
    missed = [row for row in rows if row["low"] > sweep.GOAL]
    assert len(missed) <= len(rows) // 20, missed  # as many as chance gives
