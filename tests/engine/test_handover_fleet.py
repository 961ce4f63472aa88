# SPDX-License-Identifier: Apache-2.0
"""More engines than a pair, LoRA adapters, and engines that don't fit each other."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine._handover import (
    LATE,
    TRIES,
    Pair,
    alone,
    config,
    decode,
    failures,
    fresh,
    handed_over,
    prefill,
    pulled,
    ready,
    ready_to_hand_over,
    settled,
)
from tests.engine._server import Models, Pool, assert_same_output
from tools.serving import Client
from tools.serving.router import PrefillRouter

pytest.importorskip("nixl")


def test_two_hundred_requests_to_two_producers_and_two_consumers(
    servers: Pool, pair: Pair, fleet_key: Path, tmp_path: Path
) -> None:
    with (
        servers.private(kv_transfer_config=config("kv_producer", fleet_key)) as producer,
        servers.private(kv_transfer_config=config("kv_consumer", fleet_key)) as consumer,
    ):
        ready_to_hand_over(producer.client)
        ready(consumer.client)
        producers = [pair.producer.client, producer.client]
        consumers = [pair.consumer.client, consumer.client]
        before = [pulled(client) for client in consumers]
        failed = [failures(client) for client in consumers]
        texts = [fresh(30 + 5 * i) for i in range(200)]
        with (
            PrefillRouter(
                [client.url for client in producers],
                [client.url for client in consumers],
                log=tmp_path / "router.log",
            ) as router,
            contextlib.closing(Client(router.url)) as client,
            ThreadPoolExecutor(8) as pool,
        ):
            got = list(pool.map(lambda text: client.complete(text, max_tokens=4), texts))
        with ThreadPoolExecutor(4) as pool:
            want = list(pool.map(lambda text: alone(producers[0], text, 4), texts))
        for expected, completion in zip(want, got, strict=True):
            assert_same_output(expected, completion)
        shares = [pulled(client) - was for client, was in zip(consumers, before, strict=True)]
        assert all(shares)
        late = sum((failures(c) - was for c, was in zip(consumers, failed, strict=True)), Counter())
        assert late.keys() <= LATE, late  # seven processes share two processors
        missed = sum(map(len, texts)) - sum(shares)
        assert missed == 0 if not late else missed < sum(map(len, texts)) / 4
        settled(*producers, *consumers)


def test_adapters(servers: Pool, models: Models, fleet_key: Path) -> None:
    """The same adapter is handed over; another one is not, whatever its name."""

    def adapters(**seeds: int) -> list[str]:
        named = [f"{name}={models.lora(seed=seed)}" for name, seed in seeds.items()]
        return ["--enable-lora", "--max-loras=2", "--lora-modules", *named]

    producing, consuming = config("kv_producer", fleet_key), config("kv_consumer", fleet_key)
    with (
        servers.private(kv_transfer_config=producing, args=adapters(same=0, other=1)) as producer,
        servers.private(kv_transfer_config=consuming, args=adapters(same=0, other=2)) as consumer,
    ):
        client = consumer.client
        for name in ("same", "other"):
            ready_to_hand_over(producer.client, model=name)
            client.complete(fresh(5), model=name, max_tokens=1)
        text = handed_over(producer.client, client, 700, model="same")
        before, failed = pulled(client), failures(client)
        for asked, gone_on in (("same", None), ("same", "other"), ("other", "other")):
            params = prefill(producer.client, text, model=asked)
            got = client.complete(text, model=gone_on, max_tokens=8, kv_transfer_params=params)
            assert_same_output(alone(client, text, model=gone_on), got)
        assert pulled(client) == before
        new = failures(client) - failed
        assert new["remote_proof"] > 0
        assert new.keys() <= {"remote_proof", *LATE}
        assert new.total() == 3
        settled(producer.client, client)


@pytest.mark.parametrize(
    ("options", "kind", "differ"),
    [
        ({"args": ["--block-size=64"]}, "remote_pages", "hash_tokens (64 there, 128 here)"),
        ({"model_seed": 1}, "remote_semantic", "weights ("),
    ],
    ids=["blocks", "weights"],
)
def test_engines_that_do_not_fit_say_in_what(
    servers: Pool, pair: Pair, fleet_key: Path, options: dict[str, Any], kind: str, differ: str
) -> None:
    producing = config("kv_producer", fleet_key)
    with servers.private(kv_transfer_config=producing, **options) as running:
        ready_to_hand_over(running.client)
        refused = 0
        for _ in range(2 * TRIES):
            text = fresh(700)
            before, failed = pair.pulled(), pair.failures()
            got = decode(pair.consumer.client, text, prefill(running.client, text))
            assert pair.pulled() == before
            new = pair.failures() - failed
            assert new.total() == 1
            assert new.keys() <= {kind, *LATE}
            assert_same_output(alone(pair.consumer.client, text), got)
            refused += new[kind]
            if refused == 2:
                break
            if not new[kind]:
                time.sleep(2)  # until the producer is asked again
        assert refused == 2
        assert differ in pair.consumer.server.log.read_text(errors="replace")
        settled(running.client)
