# SPDX-License-Identifier: Apache-2.0
"""Producers and consumers that are killed, stand still, go on and come back, at every phase.

The tests are in the order in which they wear their engines out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine._handover import (
    LEASE,
    Pair,
    alone,
    begun,
    config,
    decode,
    failures,
    fresh,
    goes_on,
    handed_over,
    held_config,
    in_flight,
    kill,
    prefill,
    pulled,
    ready,
    ready_to_hand_over,
    settled,
    wait,
)
from tests.engine._hold import Held
from tests.engine._server import Pool, Running, assert_same_output
from tools.serving import Client
from tools.serving.client import RequestFailed
from tools.serving.process import free_port

pytest.importorskip("nixl")


class Mortal:
    """A producer that can be ended, and started again at the same address.

    Args:
        start: makes an engine of this name.
    """

    def __init__(self, start: Callable[[str], contextlib.AbstractContextManager[Running]]) -> None:
        self._start = start
        self._life = contextlib.ExitStack()
        self.begin()

    @property
    def client(self) -> Client:
        return self.running.client

    def begin(self, name: str = "the same") -> None:
        self.running = self._life.enter_context(self._start(name))
        ready_to_hand_over(self.client)

    def end(self) -> None:
        self._life.close()


@pytest.fixture(scope="module")
def other(servers: Pool, fleet_key: Path) -> Iterator[Mortal]:
    """A producer for this module alone."""
    listen = f"127.0.0.1:{free_port()}"

    def start(name: str) -> contextlib.AbstractContextManager[Running]:
        options = config("kv_producer", fleet_key, engine_id=name, listen=listen)
        return servers.private(kv_transfer_config=options)

    producer = Mortal(start)
    yield producer
    producer.end()


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Held:
    """Stops the reads of ``consumer``."""
    return Held(tmp_path_factory.mktemp("hold"))


@pytest.fixture(scope="module")
def consumer(servers: Pool, fleet_key: Path, hold: Held) -> Iterator[Running]:
    """A consumer for this module alone; it runs one request at once."""
    options: dict[str, Any] = {
        "kv_transfer_config": held_config("kv_consumer", fleet_key, deadline=20.0),
        "args": ["--max-num-seqs=1"],
        "env": hold.env,
    }
    with servers.private(**options) as running:
        ready(running.client)
        yield running


# -- producers -------------------------------------------------------------------------------


def test_a_producer_stands_still_before_it_is_asked(other: Mortal, consumer: Running) -> None:
    client = consumer.client
    text = fresh(700)
    params = prefill(other.client, text)
    with other.running.server.standing_still():
        got = decode(client, text, params)
    assert_same_output(alone(client, text), got)
    assert failures(client) == {"remote_unanswered": 1}
    goes_on(other.client, client)
    settled(client, other.client)


def test_a_producer_stands_still_while_it_is_read(
    other: Mortal, consumer: Running, hold: Held
) -> None:
    client = consumer.client
    text = fresh(1500)
    params = prefill(other.client, text)
    before, failed = pulled(client), failures(client)
    with hold.reads(), ThreadPoolExecutor(1) as pool:
        coming = pool.submit(decode, client, text, params)
        hold.wait_reached()
        with other.running.server.standing_still():
            got = coming.result()
            assert in_flight(client, "quarantine") == 1
    assert pulled(client) == before
    assert (failures(client) - failed)["remote_deadline"] == 1
    assert_same_output(alone(client, text), got)
    settled(client, other.client)
    goes_on(other.client, client)


def test_a_producer_is_killed_and_comes_back(other: Mortal, consumer: Running, hold: Held) -> None:
    """One request reads from it, one waits with a lease, one has not asked yet."""
    client = consumer.client
    texts = [fresh(1500), fresh(500), fresh(400)]
    before, failed = pulled(client), failures(client)
    stale = prefill(other.client, texts[2])
    with hold.reads(), ThreadPoolExecutor(2) as pool:
        coming = [pool.submit(decode, client, texts[0], prefill(other.client, texts[0]))]
        hold.wait_reached()
        with occupied(client, hold):
            coming.append(pool.submit(decode, client, texts[1], prefill(other.client, texts[1])))
            client.wait_for_metrics(lambda metrics: metrics.value("vllm:num_requests_waiting") == 2)
            kill(other.running)
            hold.go_on()
        got = [each.result() for each in coming]
    got.append(decode(client, texts[2], stale))
    want = [alone(client, text) for text in texts]
    for expected, completion in zip(want, got, strict=True):
        assert_same_output(expected, completion)
    assert pulled(client) == before
    assert (failures(client) - failed)["remote_disconnected"]
    settled(client)
    for text, expected in zip(texts, want, strict=True):  # nothing wrong was kept
        assert_same_output(expected, decode(client, text, None))
    # Somebody else is there now, under the same name and address.
    other.begin()

    def is_told_apart() -> bool:
        decode(client, texts[2], stale, 1)
        return (failures(client) - failed)["remote_engine"] > 0

    wait(is_told_apart, "a producer's former life is not told from its next one")
    assert pulled(client) == before
    goes_on(other.client, client)
    settled(client, other.client)


def test_a_producer_comes_back_under_another_name(other: Mortal, consumer: Running) -> None:
    """It is read again as soon as it hands over; what it handed over before is not."""
    client = consumer.client
    text = fresh(400)
    stale = prefill(other.client, text)
    before, failed = pulled(client), failures(client)
    kill(other.running)
    other.begin("another")
    goes_on(other.client, client)
    known = pulled(client)
    assert known > before
    assert_same_output(alone(client, text), decode(client, text, stale))
    assert pulled(client) == known
    assert (failures(client) - failed)["remote_engine"] == 1
    settled(client, other.client)


@contextlib.contextmanager
def occupied(client: Client, hold: Held) -> Iterator[None]:
    """The one place that the engine has is taken meanwhile: for 40 seconds at least."""
    with hold.slowed(), begun(client, fresh(20), None, max_tokens=4000):
        client.wait_for_metrics(lambda metrics: metrics.value("vllm:num_requests_running") == 1)
        yield


# -- consumers -------------------------------------------------------------------------------


@pytest.mark.parametrize("is_renewed", [True, False], ids=["renewed", "not renewed"])
def test_a_request_waits_for_longer_than_its_lease(
    pair: Pair, consumer: Running, hold: Held, is_renewed: bool
) -> None:
    client = consumer.client
    text = fresh(700)
    before, failed = pulled(client), failures(client)
    quiet = contextlib.nullcontext() if is_renewed else hold.muted()
    with quiet, ThreadPoolExecutor(1) as pool:
        with occupied(client, hold):
            coming = pool.submit(decode, client, text, pair.prefill(text))
            client.wait_for_metrics(lambda metrics: metrics.value("vllm:num_requests_waiting") == 1)
            time.sleep(1.3 * LEASE)  # the lease's own time is what this is about
            assert not coming.done()
        got = coming.result()
    assert_same_output(alone(client, text), got)
    assert pulled(client) - before == (len(text) if is_renewed else 0)
    assert failures(client) - failed == ({} if is_renewed else {"remote_lease": 1})
    settled(pair.producer.client, client)


def test_a_consumer_stands_still_while_it_reads(pair: Pair) -> None:
    """It wakes up when its lease is over, and its read goes on into memory that others have."""
    client = pair.consumer.client
    text = fresh(1500)
    params = pair.prefill(text)
    before, failed = pair.pulled(), pair.failures()
    with pair.held.reads(), ThreadPoolExecutor(1) as pool:
        coming = pool.submit(decode, client, text, params)
        pair.held.wait_reached()
        with pair.consumer.server.standing_still():
            pair.held.go_on()
            settled(pair.producer.client)
        got = coming.result()
    assert pair.pulled() == before
    assert (pair.failures() - failed)["remote_lease"]
    assert_same_output(alone(client, text), got)
    goes_on(pair.producer.client, client)
    settled(pair.producer.client, client)


def test_a_consumer_is_killed_while_it_reads(pair: Pair, consumer: Running, hold: Held) -> None:
    text = fresh(1500)
    params = pair.prefill(text)
    with hold.reads(), ThreadPoolExecutor(1) as pool:
        coming = pool.submit(decode, consumer.client, text, params)
        hold.wait_reached()
        kill(consumer)
        with pytest.raises(RequestFailed):
            coming.result()
    settled(pair.producer.client)
    handed_over(pair.producer.client, pair.consumer.client, 700)
