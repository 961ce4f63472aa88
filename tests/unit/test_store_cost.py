# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the benchmark of stores; its servers are run by the benchmark."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.ab_ttft.arms import Arm
from benchmarks.store_cost import (
    Burst,
    Measured,
    Workload,
    ratios,
    render,
    requests_of,
    rows,
)

WORKLOAD = Workload(clients=2, lengths=(8, 16), generated=4, warmup_rounds=1, rounds=3)


def measured(slower: float) -> Measured:
    """Three rounds on an ever slower machine."""
    rounds = (1.0, 2.0, 4.0)
    return Measured(
        bursts={
            Arm.NONE: [Burst(seconds, seconds) for seconds in rounds],
            Arm.OURS: [Burst(seconds * slower, seconds) for seconds in rounds],
        },
        stored={Arm.OURS: {"cpu": 3 * 48 * 100.0}},
        hooks={Arm.OURS: {"worker": 0.003}},
    )


def test_every_prompt_is_new_and_every_run_the_same() -> None:
    requests = requests_of(WORKLOAD, "model")
    assert requests == requests_of(WORKLOAD, "model")
    bodies = [body for burst in requests for client in burst for body in client]
    assert len(bodies) == len(set(bodies)) == 4 * 2 * 2
    lengths = [
        [len(msgspec.json.decode(body)["prompt"]) for body in client] for client in requests[0]
    ]
    assert lengths == [[8, 16], [16, 8]]
    assert WORKLOAD.tokens == 2 * (8 + 16 + 2 * 4)


def test_ratios_are_paired_by_round() -> None:
    ratio = ratios(measured(slower=1.25), Arm.OURS)
    assert ratio is not None
    assert (ratio.low, ratio.median, ratio.high) == pytest.approx((0.8, 0.8, 0.8))
    assert ratios(measured(slower=1.25), Arm.NONE) is None
    assert "| ours, CPU tier | 16.0 " in render(measured(slower=2.0), WORKLOAD, "Conditions.")


def test_no_connector_is_both_of_its_servers() -> None:
    seen = measured(slower=1.25)
    seen.bursts[Arm.CONTROL] = [Burst(2 * burst.seconds, 1.0) for burst in seen.bursts[Arm.NONE]]
    ours, control = ratios(seen, Arm.OURS), ratios(seen, Arm.CONTROL)
    assert ours is not None
    assert ours.median == pytest.approx(1.5 / 1.25)
    assert control is not None
    assert control.median == pytest.approx(0.5)


@pytest.mark.parametrize(("slower", "met"), [(1.02, True), (1.05, False)])
def test_most_of_the_throughput_is_the_goal(slower: float, met: bool) -> None:
    found = rows(measured(slower), WORKLOAD, token_bytes=100)
    table = {(row.metric, row.arm): row for row in found}
    assert table["throughput / no connector", "ours, CPU tier"].met is met
    assert table["stored of all prompts: cpu", "ours, CPU tier"].value == 1.0
    assert table["worker hooks in a burst", "ours, CPU tier"].value == pytest.approx(1.0)
