# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that are read from CPU slots, and compared with checksums, between real engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import _damage
from tests.engine._handover import (
    IN_FLIGHT,
    alone,
    config,
    decode,
    failures,
    fresh,
    prefill,
    pulled,
    ready,
    ready_to_hand_over,
    settled,
)
from tests.engine._server import Pool, assert_same_output
from tools.serving import Client

pytest.importorskip("nixl")

ROOT = Path(__file__).parents[2]
HANDOFFS = "vllm:tiered_kv_handoffs_total"


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, what the consumer pulls arrives damaged."""
    return tmp_path_factory.mktemp("damage") / "now"


@pytest.fixture(scope="module")
def producer(servers: Pool, fleet_key: Path) -> Iterator[Client]:
    early = config("kv_producer", fleet_key, handoff="cpu", verify=True)
    with servers.private(kv_transfer_config=early) as running:
        ready_to_hand_over(running.client)
        yield running.client


@pytest.fixture(scope="module")
def consumer(servers: Pool, fleet_key: Path, damage: Path) -> Iterator[Client]:
    faulty = {
        **config("kv_consumer", fleet_key, verify=True),
        "kv_connector": _damage.DamagedTieredKVConnector.__name__,
        "kv_connector_module_path": _damage.__name__,
    }
    env = {_damage.VARIABLE: str(damage), "PYTHONPATH": str(ROOT)}
    with servers.private(kv_transfer_config=faulty, env=env) as running:
        ready(running.client)
        yield running.client


def test_the_devices_blocks_are_free_before_anybody_comes(
    producer: Client, consumer: Client
) -> None:
    settled(producer)
    before = producer.metrics().value(HANDOFFS, event="early")
    texts = [fresh(tokens) for tokens in (3, 700, 3000)]
    given = [prefill(producer, text) for text in texts]
    producer.complete([9, 8, 9], max_tokens=1)  # figures move with requests
    metrics = producer.metrics()
    assert metrics.value(HANDOFFS, event="early") - before == 3
    assert metrics.value(IN_FLIGHT, direction="lease") == 3
    assert producer.reset_prefix_cache()  # refused while anybody holds a block
    begin = pulled(consumer)
    got = [decode(consumer, text, params) for text, params in zip(texts, given, strict=True)]
    assert pulled(consumer) - begin == sum(map(len, texts))
    for text, completion in zip(texts, got, strict=True):
        assert_same_output(alone(producer, text), completion)
    assert failures(producer).keys() <= {"remote_not_ready"}  # while it was not
    settled(producer, consumer)


def test_a_wrong_byte_is_seen_and_the_prompt_computed(
    producer: Client, consumer: Client, damage: Path
) -> None:
    text = fresh(700)
    params, begin, known = prefill(producer, text), pulled(consumer), failures(consumer)
    damage.touch()
    try:
        got = decode(consumer, text, params)
    finally:
        damage.unlink()
    assert pulled(consumer) == begin
    assert failures(consumer) - known == {"remote_verify": 1, "load_failed": 1}
    assert_same_output(alone(consumer, text), got)
    settled(producer, consumer)
