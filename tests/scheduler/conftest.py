# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.handover import IDENTITY, Engine, Fleet
from tests.scheduler.sim import Sim
from vllm_tiered_kv import assemble
from vllm_tiered_kv.remote import assembly
from vllm_tiered_kv.remote.agent import RemoteAgent


@pytest.fixture
def sim() -> Iterator[Callable[..., Sim]]:
    """Makes engines that are closed when the test ends."""
    made: list[Sim] = []

    def make(**options: Any) -> Sim:
        engine = Sim(**options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def fleet(sim: Callable[..., Sim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    def introduce(agent: RemoteAgent, namespace: object) -> None:
        agent.identify(IDENTITY)  # as if these models had weights

    monkeypatch.setattr(assemble, "introduce", introduce)
    monkeypatch.setattr(assembly, "is_nixl_there", lambda: True)
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    return Fleet(sim, folder)


@pytest.fixture
def producer(fleet: Fleet) -> Engine:
    return fleet.engine("kv_producer")


@pytest.fixture
def consumer(fleet: Fleet) -> Engine:
    return fleet.engine("kv_consumer")
