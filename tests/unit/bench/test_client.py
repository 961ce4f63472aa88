# SPDX-License-Identifier: Apache-2.0
"""The client against a real HTTP server that goes wrong in many ways."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tests.unit.bench._server import (
    DONE,
    Break,
    Part,
    Plan,
    Refuse,
    SseServer,
    answered,
    event,
    scrape,
    token,
    usage,
)
from vllm_tiered_kv.bench import scrape as scraping
from vllm_tiered_kv.bench.client import Asking, connected, digest
from vllm_tiered_kv.bench.config import Compared, PromptFormat
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.records import Answer, Counted, Failed, Failure
from vllm_tiered_kv.bench.stream import Completion

BODY = Asking("tiny").body((1, 2, 3), 4)


async def ask(server: SseServer, count: int = 1, timeout: float = 20.0) -> list[Answer | Failed]:
    async with connected(server.url, timeout) as client:
        return list(await asyncio.gather(*(client.complete(BODY) for _ in range(count))))


def failure(plan: Plan, timeout: float = 20.0) -> Failed:
    with SseServer(plan) as server:
        (found,) = asyncio.run(ask(server, timeout=timeout))
    assert isinstance(found, Failed)
    assert found.seconds >= 0
    return found


def test_a_completion() -> None:
    with SseServer() as server:
        (found,) = asyncio.run(ask(server))
    assert isinstance(found, Answer)
    assert found.tokens == (6, 7, 8, 9)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (3, 4, 1)
    assert 0 < found.ttft <= found.seconds
    assert len(found.gaps) == 3
    assert found.ttft + sum(found.gaps) == pytest.approx(found.seconds)


def test_times_are_of_arrivals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server holds the second token back until the first one has arrived."""
    seen = threading.Event()
    parts = [token(1), Part(token(2, end=True).data, after=seen), usage(3, 2), DONE]
    original = Completion.take

    def take(self: Completion, data: bytes, now: float) -> None:
        original(self, data, now)
        seen.set()

    monkeypatch.setattr(Completion, "take", take)
    with SseServer(lambda request: parts) as server:
        (found,) = asyncio.run(ask(server))
    assert isinstance(found, Answer)
    assert found.gaps[0] > 0
    assert found.seconds == pytest.approx(found.ttft + found.gaps[0])


def test_many_at_once() -> None:
    all_here = threading.Event()

    def plan(request: dict[str, Any]) -> list[Part]:
        if server.under_way == 20:
            all_here.set()
        first, *others = answered(request)
        return [Part(first.data, after=all_here), *others]

    with SseServer(plan) as server:
        found = asyncio.run(ask(server, count=20))
    assert server.most == 20
    assert all(isinstance(each, Answer) for each in found)


@pytest.mark.parametrize(
    ("plan", "kind", "reason"),
    [
        (Refuse(400, '{"error": "too long"}'), Failure.REFUSED, 'HTTP 400: {"error": "too long"}'),
        (Refuse(500, "\x1b[31mred"), Failure.REFUSED, "HTTP 500:  [31mred"),
        ([token(1), event({"error": {"message": "no"}}), DONE], Failure.ERROR, "no"),
        ([token(1), Part(b"data: {oops\n\n")], Failure.MALFORMED, "oops"),
        ([token(1), DONE], Failure.BROKEN, "ended after 1 parts"),
        ([], Failure.BROKEN, "ended after 0 parts"),
        (Break([token(1), token(2)]), Failure.BROKEN, "ClientPayloadError"),
    ],
)
def test_what_goes_wrong_is_a_result(plan: Any, kind: Failure, reason: str) -> None:
    found = failure(lambda request: plan)
    assert found.kind is kind
    assert reason in found.reason


def test_a_server_that_falls_silent() -> None:
    never = threading.Event()
    found = failure(lambda request: [token(1), Part(b"", after=never)], timeout=0.5)
    never.set()
    assert found.kind is Failure.TIMEOUT


def test_nobody_there() -> None:
    with SseServer() as server:
        pass
    (found,) = asyncio.run(ask(server))
    assert isinstance(found, Failed)
    assert found.kind is Failure.BROKEN


def test_parts_are_counted_where_there_is_no_usage() -> None:
    with SseServer(lambda request: [token(1), token(2, end=True), DONE]) as server:
        (found,) = asyncio.run(ask(server))
    assert isinstance(found, Answer)
    assert (found.output_tokens, found.counted) == (2, Counted.CHUNKS)


def test_what_is_asked() -> None:
    with SseServer() as server:
        asyncio.run(ask(server))
        (request,) = server.requests
    assert request == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0.0,
        "seed": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
    }


def test_text_and_further_fields() -> None:
    further = {"kv_transfer_params": {"tiered_kv": {"gate": "always"}}, "temperature": 0.5}
    asking = Asking("tiny", PromptFormat.TEXT, Compared.TEXT, 3, further)
    with SseServer() as server:

        async def run() -> None:
            async with connected(server.url, 20.0) as client:
                await client.complete(asking.body((0, 1, 2), 1))

        asyncio.run(run())
        (request,) = server.requests
    assert request["prompt"] == "the of and"
    assert "logprobs" not in request
    assert request["temperature"] == 0.5
    assert request["kv_transfer_params"] == further["kv_transfer_params"]


def test_equal_prompts_have_equal_digests() -> None:
    assert digest((1, 2, 3)) == digest((1, 2, 3)) != digest((1, 2, 4))


async def first_model(url: str) -> str:
    async with connected(url, 5.0) as client:
        return await client.first_model()


@pytest.mark.parametrize("models", [b"", b"{}", b'{"data": []}', b'{"data": [{"id": 3}]}', b"\xff"])
def test_a_server_that_does_not_say_what_it_serves(models: bytes) -> None:
    with SseServer(models=models) as server, pytest.raises(BenchError, match="name it"):
        asyncio.run(first_model(server.url))


async def read_metrics(*urls: str) -> dict[str, float] | None:
    async with connected("http://127.0.0.1:1", 5.0) as client:
        return await client.scrape(urls)


def test_metrics_of_several_servers_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with SseServer(metrics=lambda _: scrape(1000)) as one, SseServer() as silent:
        url, nothing = f"{one.url}/metrics", f"{silent.url}/metrics"
        assert asyncio.run(read_metrics(url, url)) == {
            "prompt tokens": 2000,
            "device": 200,
            "connector": 1000,
            "tiered-kv: cpu": 1000,
            "tiered-kv: disk": 0,
        }
        assert asyncio.run(read_metrics(url, nothing)) is None
        assert asyncio.run(read_metrics()) is None
        monkeypatch.setattr(scraping, "MAX_RESPONSE", 100)
        assert asyncio.run(read_metrics(url)) is None
    assert asyncio.run(read_metrics(url)) is None


def test_counters_that_went_backwards_are_left_out() -> None:
    before = {"prompt tokens": 10.0, "device": 5.0}
    after = {"prompt tokens": 4.0, "device": 7.0, "connector": 3.0}
    assert scraping.increase(before, after) == {"device": 2.0, "connector": 3.0}
    assert scraping.counters("# nothing\nvllm:other_total 3\n") == {}
