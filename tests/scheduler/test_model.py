# SPDX-License-Identifier: Apache-2.0
"""The model of the contract, run: the same pieces each time here, others for as long as asked.

A piece is a seed and the handful of engines that hypothesis makes of it. One that failed is run
again by its seed alone: ``TIERED_KV_MODEL_SEED=1234 TIERED_KV_MODEL_MINUTES=0 pytest -m slow ...``.
"""

from __future__ import annotations

import itertools
import os
import time

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler.machine import TALLY, EngineMachine

STEPS = 10_000
"""Steps of vLLM's scheduler that every run of the tests takes; twice as many before it is said that
something was not met."""
SEEN = (
    "FINISHED_STOPPED FINISHED_LENGTH_CAPPED FINISHED_ABORTED preemptions chunks|loaded|cpu "
    "chunks|evicted|cpu chunks|failed|cpu failures|load_failed failures|load_late lookups|wait "
    "failures|params "
    "drafts|accepted drafts|rejected neighbour|ended restarts hit_tokens|disk chunks|stored|disk "
    "chunks|loaded|disk chunks|failed|disk chunks|evicted|disk "
    "failures|disk_damaged gate_decisions|all|forced gate_decisions|all|learning "
    "gate_decisions|all|predicted gate_decisions|none|predicted "
    "hit_tokens|peer_cpu"
).split()
"""What a run must have come across, or it has not tried what it is for."""
SETTINGS = settings(
    max_examples=10,
    stateful_step_count=100,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    print_blob=True,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


def run_piece(seed: int) -> None:
    machine = type(f"Seed{seed}", (EngineMachine,), {})
    run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=SETTINGS)


@pytest.mark.timeout(900)
def test_the_contract_holds_whatever_happens() -> None:
    before = dict(TALLY)
    for seed in itertools.count():
        run_piece(seed)
        done = TALLY["steps"] - before.get("steps", 0)
        missing = [key for key in SEEN if TALLY[key] == before.get(key, 0)]
        if done >= 2 * STEPS or (done >= STEPS and not missing):
            break
    assert done >= STEPS
    assert not missing, f"{done} steps never came across {missing}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_the_contract_holds_for_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    first = int(os.environ.get("TIERED_KV_MODEL_SEED", "10000"))
    minutes = float(os.environ.get("TIERED_KV_MODEL_MINUTES", "60"))
    end = time.monotonic() + 60 * minutes
    before = TALLY["steps"]
    for seed in itertools.count(first):
        run_piece(seed)
        done = TALLY["steps"] - before
        with capsys.disabled():
            print(f"seeds {first}..{seed} done, {done:.0f} steps", flush=True)
        if time.monotonic() >= end:
            break
    with capsys.disabled():
        print({key: int(count) for key, count in sorted(TALLY.items())}, flush=True)
    assert done > 0
