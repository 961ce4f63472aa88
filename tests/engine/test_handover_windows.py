# SPDX-License-Identifier: Apache-2.0
"""Hand-overs of models with sliding windows between real engines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine._handover import (
    Pair,
    alone,
    begun,
    config,
    decode,
    failures,
    fresh,
    handed_over,
    held_config,
    ready,
    ready_to_hand_over,
    settled,
)
from tests.engine._hold import Held
from tests.engine._server import BLOCK_TOKENS, Pool, assert_same_output, flushed, stored

pytest.importorskip("nixl")

WINDOW = 256
LENGTHS = [
    3,
    BLOCK_TOKENS,
    WINDOW + BLOCK_TOKENS,
    700,
    4 * BLOCK_TOKENS + WINDOW - 1,  # vLLM frees the first block of the window as the request ends
    3000,
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("gemma3-tiny", "device"), id="pages"),
        pytest.param(("gemma3-tiny", "cpu"), id="slots"),
        pytest.param(("mistral-swa-tiny", "device"), id="window alone", marks=pytest.mark.slow),
    ],
)
def windowed(
    request: pytest.FixtureRequest,
    servers: Pool,
    fleet_key: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """A producer and a consumer that compare checksums."""
    variant, handoff = request.param
    held = Held(tmp_path_factory.mktemp("held"))
    small = ["--max-num-batched-tokens=512"]
    producing = config("kv_producer", fleet_key, handoff=handoff, verify=True)
    consuming = held_config("kv_consumer", fleet_key, verify=True, deadline=30.0)
    with (
        servers.private(variant, kv_transfer_config=producing, args=small) as producer,
        servers.private(variant, kv_transfer_config=consuming, env=held.env) as consumer,
    ):
        ready(consumer.client)
        ready_to_hand_over(producer.client)
        yield Pair(producer, consumer, held)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_same_answer_as_from_one_engine(windowed: Pair, tokens: int) -> None:
    producer, consumer = windowed.producer.client, windowed.consumer.client
    text = handed_over(producer, consumer, tokens, computed=1)
    assert_same_output(alone(consumer, text), decode(consumer, text, None))


def test_a_second_turn(windowed: Pair) -> None:
    """The first one's KV is in the tier, and all but the end of its windows was never here."""
    producer, consumer = windowed.producer.client, windowed.consumer.client
    first = handed_over(producer, consumer, 8 * BLOCK_TOKENS + 1, computed=1)
    stored(consumer)
    assert flushed(consumer)
    second = [*first, *fresh(3 * BLOCK_TOKENS + 6)]
    before, failed = windowed.pulled(), windowed.failures()
    got = decode(consumer, second, windowed.prefill(second))
    assert_same_output(alone(consumer, second), got)
    if windowed.failures() == failed:  # else a slow machine had it computed
        assert windowed.pulled() - before == 3 * BLOCK_TOKENS + 6


def test_many_at_once(windowed: Pair) -> None:
    texts = [fresh(300 + 43 * i) for i in range(12)]
    consumer = windowed.consumer.client
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda text: decode(consumer, text, windowed.prefill(text), 4), texts))
    for text, completion in zip(texts, got, strict=True):
        assert_same_output(alone(consumer, text, 4), completion)
    settled(windowed.producer.client, consumer)


def test_aborts_in_the_middle_of_a_read(windowed: Pair) -> None:
    consumer = windowed.consumer.client
    texts = [fresh(1500) for _ in range(4)]
    with windowed.held.reads():
        with contextlib.ExitStack() as going:
            for text in texts:
                going.enter_context(begun(consumer, text, windowed.prefill(text)))
            windowed.held.wait_reached()
        consumer.wait_for_metrics(lambda metrics: not metrics.value("vllm:num_requests_waiting"))
    settled(windowed.producer.client, consumer)
    assert not failures(consumer)["internal"]


def test_the_producers_blocks_come_back(windowed: Pair) -> None:
    producer = windowed.producer.client
    for tokens in (4 * BLOCK_TOKENS + WINDOW - 1, 500):
        windowed.prefill(fresh(tokens))  # nobody comes for these
    settled(producer)
    assert failures(producer).keys() <= {"remote_not_ready"}  # while it was not
