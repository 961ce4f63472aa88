# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests: tiny models and servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import _handover as handover
from tests.engine._hold import Held
from tests.engine._server import Models, Pool
from vllm_tiered_kv.remote import keys

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs an engine and may wait for a server to start."""
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models(models_folder: Path) -> Models:
    """Builds tiny models on demand: ``models.path("llama-tiny")``."""
    return Models(models_folder)


@pytest.fixture(scope="session")
def servers(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Running servers, shared by equal arguments: ``servers.get("llama-tiny", ...)``."""
    with Pool(models, tmp_path_factory.mktemp("servers")) as pool:
        yield pool


@pytest.fixture(scope="session")
def fleet_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of engines that hand KV over to each other."""
    path = tmp_path_factory.mktemp("keys") / "fleet.key"
    keys.write(path, keys.generate())
    return path


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """Stops the reads of ``pair``'s consumer."""
    return Held(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def pair(servers: Pool, fleet_key: Path, held: Held) -> handover.Pair:
    """A producer and a consumer; modules that follow each other share them."""
    # Prompts in several steps, and few enough blocks for a leak to be felt.
    small = ["--max-num-batched-tokens=512"]
    config = handover.config("kv_producer", fleet_key)
    producer = servers.running(kv_transfer_config=config, blocks=500, args=small)
    # A read that stands still is given up late: who holds it decides how it ends.
    config = handover.held_config("kv_consumer", fleet_key, deadline=30.0)
    consumer = servers.running(kv_transfer_config=config, blocks=500, env=held.env)
    handover.ready(consumer.client)
    handover.ready_to_hand_over(producer.client)
    return handover.Pair(producer, consumer, held)
