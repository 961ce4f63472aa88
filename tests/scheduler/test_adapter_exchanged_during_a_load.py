# SPDX-License-Identifier: Apache-2.0
"""Weights exchanged while a load runs: the request must not go on with the new ones from old KV."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.lora.request import LoRARequest

from tests.scheduler.adapters import AdapterSim
from tests.scheduler.tokens import prompt

LORA = LoRARequest("one", 1, "/adapters/one")


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdapterSim]:
    monkeypatch.setattr("vllm_tiered_kv.scheduler.loads.ADAPTER_PATIENCE", 60.0)
    sim = AdapterSim(depth=request.param)
    yield sim
    sim.close()


def test_a_load_for_weights_that_are_gone_ends_as_failed(engine: AdapterSim) -> None:
    engine.load_adapter(1, 7)
    engine.complete("cold", prompt(100), 1, lora=LORA)
    engine.settle()
    engine.flush_device()
    engine.gate.hold("load")
    engine.add("warm", prompt(100), 3, lora=LORA)
    while not engine.gate.entered["load"].is_set():
        engine.step()
    engine.load_adapter(1, 8)
    engine.gate.release("load")
    engine.run()  # raises WrongBytes where the old weights' KV is read with the new ones
    assert engine.hit_tokens == 0
    engine.check_quiet()
