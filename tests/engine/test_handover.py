# SPDX-License-Identifier: Apache-2.0
"""Prefill hands over to decode: two real engines, NIXL between them, vllm-router in front."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine._handover import (
    IN_FLIGHT,
    Pair,
    alone,
    decode,
    fresh,
    handed_over,
    settled,
    wait,
)
from tests.engine._server import BLOCK_TOKENS, assert_same_output, flushed, stored
from tools.serving import Client, Completion
from tools.serving.router import PrefillRouter

pytest.importorskip("nixl")


@pytest.mark.parametrize("tokens", [3, BLOCK_TOKENS, 700, 3000])
def test_the_same_answer_as_from_one_engine(pair: Pair, tokens: int) -> None:
    text = fresh(tokens)
    before = pair.pulled()
    got = decode(pair.consumer.client, text, pair.prefill(text))
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
    decode(consumer, first, pair.prefill(first), 2)
    stored(consumer)
    assert flushed(consumer)
    second = [*first, *fresh(3 * BLOCK_TOKENS + 7)]
    before = pair.pulled()
    got = decode(consumer, second, pair.prefill(second))
    assert pair.pulled() - before == 3 * BLOCK_TOKENS + 7
    assert_same_output(alone(consumer, second), got)


def test_what_the_consumer_has_is_not_pulled(pair: Pair) -> None:
    text = handed_over(pair.producer.client, pair.consumer.client, 4 * BLOCK_TOKENS + 1)
    before = pair.pulled()
    got = decode(pair.consumer.client, text, pair.prefill(text))
    assert pair.pulled() == before
    assert_same_output(alone(pair.consumer.client, text), got)
    settled(pair.producer.client)


def test_a_prefill_that_a_stop_ends(pair: Pair) -> None:
    text = fresh(300)
    first = alone(pair.producer.client, text).token_ids[0]
    params = pair.prefill(text, max_tokens=16, stop_token_ids=[first])
    before = pair.pulled()
    got = decode(pair.consumer.client, text, params)
    assert pair.pulled() - before == len(text)
    assert_same_output(alone(pair.consumer.client, text), got)


def test_two_answers_to_one_prompt_read_it_once(pair: Pair) -> None:
    text = fresh(5 * BLOCK_TOKENS + 9)
    before, failed = pair.pulled(), pair.failures()
    with pair.held.reads(), ThreadPoolExecutor(1) as pool:
        coming = pool.submit(two_answers, pair.consumer.client, text, pair.prefill(text))
        pair.held.wait_reached()
        pair.held.go_on()
        got = coming.result()
    assert pair.pulled() - before == len(text) + 9  # the other one reads the last block
    assert pair.failures() == failed
    assert got == two_answers(pair.consumer.client, text, None, cache_salt="alone, twice")
    settled(pair.producer.client, pair.consumer.client)


def two_answers(client: Client, text: list[int], params: Any, **body: Any) -> list[str]:
    request = {
        "prompt": text,
        "max_tokens": 6,
        "n": 2,
        "seed": 5,
        "temperature": 1.0,
        "ignore_eos": True,
        "kv_transfer_params": params,
        **body,
    }
    answer = httpx.post(f"{client.url}/v1/completions", json=request, timeout=60, trust_env=False)
    answer.raise_for_status()
    return [choice["text"] for choice in answer.json()["choices"]]


def test_a_salt_is_part_of_what_is_handed_over(pair: Pair) -> None:
    text = fresh(300)
    consumer = pair.consumer.client
    before, failed = pair.pulled(), pair.failures()
    params = pair.prefill(text, cache_salt="mine")
    got = consumer.complete(text, max_tokens=8, cache_salt="yours", kv_transfer_params=params)
    assert pair.pulled() == before
    assert pair.failures() - failed == {"remote_proof": 1}
    params = pair.prefill(text, cache_salt="mine")
    again = consumer.complete(text, max_tokens=8, cache_salt="mine", kv_transfer_params=params)
    assert pair.pulled() - before == len(text)
    assert_same_output(got, again)


def test_many_at_once(pair: Pair) -> None:
    texts = [fresh(300 + 17 * i) for i in range(24)]

    def one(text: list[int]) -> Completion:
        return decode(pair.consumer.client, text, pair.prefill(text), 4)

    before, failed = pair.pulled(), pair.failures()
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(one, texts))
    assert pair.pulled() - before == sum(map(len, texts))
    for text, completion in zip(texts[::6], got[::6], strict=True):
        assert_same_output(alone(pair.consumer.client, text, 4), completion)
    assert pair.failures() == failed


def test_the_producers_blocks_come_back(pair: Pair) -> None:
    producer = pair.producer.client
    for _ in range(10):
        pair.prefill(fresh(500))  # nobody comes for these

    def are_back() -> bool:
        producer.complete([9, 8, 9], max_tokens=1)
        return producer.metrics().value(IN_FLIGHT, direction="lease") == 0

    wait(are_back, "leases do not end")
    assert producer.reset_prefix_cache()
