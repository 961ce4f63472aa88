# SPDX-License-Identifier: Apache-2.0
"""Hand-overs with LoRA adapters: what is handed over is what the ticket says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.scheduler.adapters import AdapterSim
from tests.scheduler.handover import ODD, Engine, Fleet, prefill
from tests.scheduler.sim import BLOCK, prompt

LORA = LoRARequest("one", 1, "/adapters/one")
WEIGHTS, OTHERS = 7, 8


@pytest.fixture(params=["device", "cpu"])
def fleet(
    request: pytest.FixtureRequest, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    """Engines with adapters, which hand over from these."""
    monkeypatch.setattr("vllm_tiered_kv.scheduler.loads.ADAPTER_PATIENCE", 60.0)
    made: list[AdapterSim] = []

    def make(**options: Any) -> AdapterSim:
        options["extra"]["remote"]["handoff"] = request.param
        made.append(AdapterSim(**options))
        return made[-1]

    fleet._make = make
    yield fleet
    for sim in made:
        sim.close()


def with_adapter(fleet: Fleet, role: str) -> Engine:
    engine = fleet.engine(role)
    engine.sim.load_adapter(1, WEIGHTS)
    engine.sim.complete("adapter", prompt(BLOCK, seed=998), 1, lora=LORA)
    engine.sim.settle()
    engine.sim.flush_device()
    return engine


def goes_on(consumer: Engine, params: Any) -> None:
    """Raises WrongBytes where it reads what was computed with other weights."""
    consumer.sim.add("d", prompt(ODD), 3, params=params, lora=LORA)
    consumer.sim.run()


def test_the_same_weights_are_handed_over(fleet: Fleet) -> None:
    producer, consumer = with_adapter(fleet, "kv_producer"), with_adapter(fleet, "kv_consumer")
    goes_on(consumer, prefill(producer, prompt(ODD), lora=LORA))
    assert consumer.count("hit_tokens|peer") == ODD
    assert not producer.failures
    producer.wait_free()


def test_weights_that_came_with_the_step_are_not_handed_over_as_the_old_ones(
    fleet: Fleet,
) -> None:
    producer, consumer = with_adapter(fleet, "kv_producer"), with_adapter(fleet, "kv_consumer")
    half = producer.sim.half
    build_plan = half.build_plan

    def exchange(output: Any) -> Any:
        plan = build_plan(output)
        if "p" in output.num_scheduled_tokens and producer.sim.weights[1] == WEIGHTS:
            producer.sim.load_adapter(1, OTHERS)
        return plan

    half.build_plan = exchange
    params = prefill(producer, prompt(ODD), lora=LORA)
    assert producer.sim.weights[1] == OTHERS
    goes_on(consumer, params)
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.failures == {"remote_lease": 1}
    assert producer.count("failures|adapter") == 1
    producer.wait_free()
    consumer.sim.check_quiet()
