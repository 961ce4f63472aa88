# SPDX-License-Identifier: Apache-2.0
"""Hand-overs between engines of several ranks, and among engines that serve one model together."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine._handover import (
    LATE,
    Pair,
    alone,
    config,
    decode,
    failures,
    fresh,
    handed_over,
    prefill,
    pulled,
    ready_to_hand_over,
    settled,
)
from tests.engine._server import BLOCK_TOKENS, Pool, Running, assert_same_output
from tools.serving.process import free_ports

pytest.importorskip("nixl")

A_PROCESSOR_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
TWO_RANKS = ["--tensor-parallel-size=2"]
LENGTHS = [3, BLOCK_TOKENS, 700, 3000]


@pytest.fixture(scope="module")
def wide(servers: Pool, fleet_key: Path) -> Iterator[Running]:
    """An engine of two ranks that hands over and goes on."""
    options = config("kv_both", fleet_key)
    with servers.private(
        kv_transfer_config=options, args=TWO_RANKS, env=A_PROCESSOR_EACH
    ) as running:
        ready_to_hand_over(running.client)
        yield running


@pytest.mark.parametrize("tokens", LENGTHS)
def test_two_ranks_hand_over_to_one(pair: Pair, wide: Running, tokens: int) -> None:
    text = handed_over(wide.client, pair.consumer.client, tokens)
    got = decode(pair.consumer.client, text, None)
    assert_same_output(alone(pair.producer.client, text), got)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_one_rank_hands_over_to_two(pair: Pair, wide: Running, tokens: int) -> None:
    handed_over(pair.producer.client, wide.client, tokens)


def test_an_engine_hands_over_to_itself(pair: Pair, wide: Running) -> None:
    text = fresh(700)
    got = decode(wide.client, text, prefill(wide.client, text))
    assert_same_output(alone(pair.producer.client, text), got)
    settled(wide.client)


def test_many_at_once_both_ways(pair: Pair, wide: Running) -> None:
    ends = [
        (wide.client, pair.consumer.client),
        (pair.producer.client, wide.client),
    ]
    texts = [fresh(400 + 23 * i) for i in range(16)]
    consumers = (pair.consumer.client, wide.client)
    before = sum(map(pulled, consumers))
    failed = [failures(client) for client in consumers]

    def one(number: int) -> None:
        producer, consumer = ends[number % 2]
        got = decode(consumer, texts[number], prefill(producer, texts[number]), 4)
        assert_same_output(alone(consumer, texts[number], 4), got)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(len(texts))))
    assert sum(map(pulled, consumers)) > before
    for client, earlier in zip(consumers, failed, strict=True):
        new = failures(client) - earlier  # who is late: four processes share two processors
        assert all(kind.startswith("remote_") for kind in new), new
    settled(*consumers, pair.producer.client)


def test_data_parallel_engines_choose_ports_of_their_own(
    servers: Pool, pair: Pair, fleet_key: Path
) -> None:
    port = free_ports(2)
    options = config("kv_producer", fleet_key, listen=f"127.0.0.1:{port}")
    args = ["--data-parallel-size=2", "--api-server-count=1"]
    with servers.private(kv_transfer_config=options, args=args, env=A_PROCESSOR_EACH) as running:
        names = set()
        for rank in (0, 1):
            headers = {"X-data-parallel-rank": str(rank)}
            ready_to_hand_over(running.client, headers=headers)
            text = fresh(700)
            params = prefill(running.client, text, headers=headers)
            assert params["remote_port"] == port + rank
            names.add(params["remote_engine_id"])
            before, failed = pair.pulled(), pair.failures()
            got = decode(pair.consumer.client, text, params)
            assert_same_output(alone(pair.producer.client, text), got)
            if pair.pulled() - before != len(text):
                assert (pair.failures() - failed).keys() <= LATE
        assert len(names) == 2


def test_two_ranks_hand_over_to_two(servers: Pool, wide: Running, fleet_key: Path) -> None:
    options = config("kv_consumer", fleet_key)
    with servers.private(
        kv_transfer_config=options, args=TWO_RANKS, env=A_PROCESSOR_EACH
    ) as running:
        for tokens in LENGTHS:
            handed_over(wide.client, running.client, tokens)
        settled(wide.client, running.client)


def test_ranks_that_hold_the_same_head(servers: Pool, fleet_key: Path) -> None:
    """One KV head on two ranks: both have all of it, and either will do."""
    options = config("kv_both", fleet_key)
    with (
        servers.private("llama-mqa-tiny", kv_transfer_config=options) as one,
        servers.private(
            "llama-mqa-tiny", kv_transfer_config=options, args=TWO_RANKS, env=A_PROCESSOR_EACH
        ) as two,
    ):
        ready_to_hand_over(one.client)
        ready_to_hand_over(two.client)
        for producer, consumer in ((one, two), (two, one)):
            for tokens in LENGTHS:
                handed_over(producer.client, consumer.client, tokens)
        settled(one.client, two.client)
