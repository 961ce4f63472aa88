# SPDX-License-Identifier: Apache-2.0
"""Prefill hands over to decode: two real engines, NIXL between them, vllm-router in front."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine import _damage
from tests.engine._server import (
    BLOCK_TOKENS,
    Pool,
    Running,
    assert_same_output,
    flushed,
    prompt,
    stored,
)
from tools.serving import Client, Completion
from tools.serving.router import PrefillRouter
from vllm_tiered_kv.remote import keys

pytest.importorskip("nixl")

TO_PRODUCER = {"do_remote_decode": True, "do_remote_prefill": False}
LEASE = 5.0
ROOT = Path(__file__).parents[2]
_seeds = itertools.count()


def config(role: str, key: Path, **remote: Any) -> dict[str, Any]:
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "gate": "always",
            "cpu": {"capacity": "64MiB"},
            "remote": {
                "listen": "127.0.0.1:0",
                "key_file": str(key),
                "lease": LEASE,
                "deadline": 5.0,
                "verify": True,
                **remote,
            },
        },
    }


class Pair:
    """A producer, a consumer, and what a router between them does."""

    def __init__(self, producer: Running, consumer: Running) -> None:
        self.producer = producer
        self.consumer = consumer

    def prefill(self, tokens: list[int], **body: Any) -> dict[str, Any]:
        """What the producer answers, as a router passes it on."""
        return prefill(self.producer.client, tokens, **body)

    def pulled(self) -> float:
        return self.consumer.client.metrics().value("vllm:tiered_kv_hit_tokens_total", tier="peer")

    def failures(self) -> dict[str, float]:
        return {
            sample.labels["kind"]: sample.value
            for sample in self.consumer.client.metrics()
            if sample.name == "vllm:tiered_kv_failures_total" and sample.value
        }


def prefill(client: Client, tokens: list[int], **body: Any) -> dict[str, Any]:
    request = {
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0.0,
        "kv_transfer_params": TO_PRODUCER,
        **body,
    }
    answer = httpx.post(f"{client.url}/v1/completions", json=request, timeout=60, trust_env=False)
    answer.raise_for_status()
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    return params


def fresh(tokens: int) -> list[int]:
    return prompt(f"handed over {next(_seeds)}", tokens)


def alone(client: Client, tokens: list[int], count: int = 8) -> Completion:
    """What an engine says that computes it all."""
    return client.complete(tokens, max_tokens=count, cache_salt=f"alone {next(_seeds)}")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    path = folder / "fleet.key"
    keys.write(path, keys.generate())
    return path


@pytest.fixture(scope="module")
def start(servers: Pool, key: Path) -> Callable[..., Any]:
    def one(
        role: str,
        remote: Mapping[str, Any] | None = None,
        connector: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        served = {**config(role, key, **(remote or {})), **(connector or {})}
        return servers.private(kv_transfer_config=served, **options)

    return one


@pytest.fixture(scope="module")
def damage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, what the consumer pulls arrives damaged."""
    return tmp_path_factory.mktemp("damage") / "now"


@pytest.fixture(scope="module")
def pair(start: Callable[..., Any], damage: Path) -> Iterator[Pair]:
    faulty = {
        "kv_connector": _damage.DamagedTieredKVConnector.__name__,
        "kv_connector_module_path": _damage.__name__,
    }
    env = {_damage.VARIABLE: str(damage), "PYTHONPATH": str(ROOT)}
    with (
        start("kv_producer") as producer,
        start("kv_consumer", connector=faulty, env=env) as consumer,
    ):
        for running in (producer, consumer):
            running.client.complete([9, 8, 9], max_tokens=1)  # ranks come with a first step
        wait(lambda: "handoff" in json.dumps(_try(producer.client)), "the producer is not ready")
        yield Pair(producer, consumer)


def _try(client: Client) -> Any:
    with contextlib.suppress(httpx.HTTPError, KeyError):
        return prefill(client, fresh(5))
    return None


def wait(done: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.mark.parametrize("tokens", [3, BLOCK_TOKENS, 700, 3000])
def test_the_same_answer_as_from_one_engine(pair: Pair, tokens: int) -> None:
    text = fresh(tokens)
    before = pair.pulled()
    got = pair.consumer.client.complete(text, max_tokens=8, kv_transfer_params=pair.prefill(text))
    assert pair.pulled() - before == tokens
    assert_same_output(alone(pair.consumer.client, text), got)
    assert_same_output(alone(pair.producer.client, text), got)


def test_through_the_router(pair: Pair, tmp_path: Path) -> None:
    urls = [pair.producer.client.url], [pair.consumer.client.url]
    before = pair.pulled()
    with (
        PrefillRouter(*urls, log=tmp_path / "router.log") as router,
        contextlib.closing(Client(router.url)) as client,
    ):
        texts = [fresh(900 + 31 * i) for i in range(8)]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda text: client.complete(text, max_tokens=8), texts))
    for text, completion in zip(texts, got, strict=True):
        assert_same_output(alone(pair.consumer.client, text), completion)
    assert pair.pulled() - before == sum(map(len, texts))


def test_a_second_turn_pulls_only_what_is_new(pair: Pair) -> None:
    consumer = pair.consumer.client
    first = fresh(8 * BLOCK_TOKENS)
    consumer.complete(first, max_tokens=2, kv_transfer_params=pair.prefill(first))
    stored(consumer)
    assert flushed(consumer)
    second = [*first, *fresh(3 * BLOCK_TOKENS + 7)]
    before = pair.pulled()
    got = consumer.complete(second, max_tokens=8, kv_transfer_params=pair.prefill(second))
    assert pair.pulled() - before == 3 * BLOCK_TOKENS + 7
    assert_same_output(alone(consumer, second), got)


def test_many_at_once(pair: Pair) -> None:
    texts = [fresh(300 + 17 * i) for i in range(24)]

    def one(text: list[int]) -> Completion:
        params = pair.prefill(text)
        return pair.consumer.client.complete(text, max_tokens=4, kv_transfer_params=params)

    before = pair.pulled()
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(one, texts))
    assert pair.pulled() - before == sum(map(len, texts))
    for text, completion in zip(texts[::6], got[::6], strict=True):
        assert_same_output(alone(pair.consumer.client, text, 4), completion)
    assert pair.failures() == {}


def test_the_producers_blocks_come_back(pair: Pair) -> None:
    producer = pair.producer.client
    for _ in range(10):
        pair.prefill(fresh(500))  # nobody comes for these

    def are_back() -> bool:
        producer.complete([9, 8, 9], max_tokens=1)
        return producer.metrics().value("vllm:tiered_kv_jobs_in_flight", direction="lease") == 0

    wait(are_back, "leases do not end")
    assert producer.reset_prefix_cache()


def test_out_of_slots_with_the_devices_blocks_free(pair: Pair, start: Callable[..., Any]) -> None:
    with start("kv_producer", remote={"handoff": "cpu"}) as early:
        client = early.client
        client.complete([9, 8, 9], max_tokens=1)
        wait(lambda: "handoff" in json.dumps(_try(client)), "the producer is not ready")
        before = client.metrics().value("vllm:tiered_kv_handoffs_total", event="early")
        texts = [fresh(tokens) for tokens in (3, 700, 3000)]
        given = [prefill(client, text) for text in texts]
        client.complete([9, 8, 9], max_tokens=1)  # figures move with requests
        metrics = client.metrics()
        assert metrics.value("vllm:tiered_kv_handoffs_total", event="early") - before == 3
        assert metrics.value("vllm:tiered_kv_jobs_in_flight", direction="lease") >= 3
        assert client.reset_prefix_cache()  # refused while anybody holds a block
        pulled = pair.pulled()
        got = [
            pair.consumer.client.complete(text, max_tokens=8, kv_transfer_params=params)
            for text, params in zip(texts, given, strict=True)
        ]
        assert pair.pulled() - pulled == sum(map(len, texts))
        for text, completion in zip(texts, got, strict=True):
            assert_same_output(alone(client, text), completion)


def test_a_wrong_byte_is_seen_and_the_prompt_computed(pair: Pair, damage: Path) -> None:
    consumer, text = pair.consumer.client, fresh(700)
    params, pulled = pair.prefill(text), pair.pulled()
    damage.touch()
    try:
        got = consumer.complete(text, max_tokens=8, kv_transfer_params=params)
    finally:
        damage.unlink()
    assert pair.pulled() == pulled
    assert pair.failures() == {"remote_verify": 1, "load_failed": 1}
    assert_same_output(alone(consumer, text), got)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_producer_that_is_gone(
    pair: Pair, start: Callable[..., Any], sign: signal.Signals
) -> None:
    text = fresh(700)
    with start("kv_producer") as other:
        other.client.complete([9, 8, 9], max_tokens=1)
        wait(lambda: "handoff" in json.dumps(_try(other.client)), "the producer is not ready")
        params = prefill(other.client, text)
        group = other.server.pid
        os.killpg(group, sign)
        try:
            got = pair.consumer.client.complete(text, max_tokens=8, kv_transfer_params=params)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)
    assert_same_output(alone(pair.consumer.client, text), got)
    kinds = pair.failures().keys() - {"remote_verify", "load_failed"}  # of a test before
    assert kinds <= {"remote_unanswered", "remote_quiet"}
    again = fresh(300)
    before = pair.pulled()
    pair.consumer.client.complete(again, max_tokens=2, kv_transfer_params=pair.prefill(again))
    assert pair.pulled() - before == 300
