# SPDX-License-Identifier: Apache-2.0
"""KV events of real engines, over real sockets, and a real router that follows them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests._kv_subscriber import CPU, GPU, Clears, Feed, Subscriber
from tests.engine._router import Router
from tests.engine._server import BLOCK_TOKENS, Pool, prompt, stored, tiered
from tools.serving import Client

# vLLM chooses the ports, on the address in VLLM_HOST_IP.
EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}
TIER = tiered({"cpu": {"capacity": "32MiB"}})
MULTI = {**TIER, "kv_connector": "MultiConnector", "kv_connector_extra_config": {}}
MULTI["kv_connector_extra_config"] = {"connectors": [TIER]}
_fillers = itertools.count()


class Engine:
    """A server and what is known of it from its events alone."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.url = client.url
        sources = httpx.get(f"{self.url}/kv_event_sources", trust_env=False).json()
        self.source = sources["0"]
        self._reset = 0.0  # chunks that went with the last reset, and those before
        self.exact = Subscriber(Clears.DEVICE)
        self.forgetful = Subscriber(Clears.EVERYTHING)
        self.feed = Feed(
            self.source["endpoint"], self.source["replay_endpoint"], self.exact, self.forgetful
        )

    def chunks(self, event: str) -> float:
        metrics = self.client.metrics()
        return metrics.value("vllm:tiered_kv_chunks_total", event=event, tier="cpu")

    def follow(self, done: Callable[[], bool]) -> None:
        """Take in events, with requests too short to store anything, until ``done`` holds."""
        deadline = time.monotonic() + 60
        while True:
            stored(self.client)
            self.feed.drain()
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{len(self.exact.held(CPU))} blocks, {self.feed.batches} batches"
                )

    def agrees(self) -> bool:
        """A chunk is one block here."""
        held = len(self.exact.held(CPU))
        return held == self.chunks("stored") - self.chunks("evicted") - self._reset

    def reset(self) -> None:
        """Empty the device's cache and the tier."""
        assert self.client.reset_prefix_cache(external=True)
        self.follow(lambda: not self.exact.held(CPU))
        self._reset = self.chunks("stored") - self.chunks("evicted")

    def push_out(self) -> None:
        """Fill the device with other prompts; no reset, so what it held is taken back in events."""
        for _ in range(2):
            self.client.complete(prompt(f"filler {next(_fillers)}", 2000), max_tokens=2)
        stored(self.client)
        self.client.complete(prompt(f"filler {next(_fillers)}", 300), max_tokens=2)
        self.follow(self.agrees)


@pytest.fixture(scope="module")
def engines(servers: Pool) -> Iterator[tuple[Engine, Engine]]:
    """One with the connector, one with the connector under MultiConnector."""
    made = []
    for config in (TIER, MULTI):
        client = servers.get(
            kv_transfer_config=config,
            blocks=20,
            args=["--kv-events-config", json.dumps(EVENTS)],
            env={"VLLM_HOST_IP": "127.0.0.1"},
        )
        client.complete(prompt("before anybody listens", 1000), max_tokens=2)
        made.append(Engine(client))
    yield made[0], made[1]
    for engine in made:
        engine.feed.close()


def test_events_alone_tell_what_the_tier_holds(engines: tuple[Engine, Engine]) -> None:
    engine, _ = engines
    client, exact, forgetful = engine.client, engine.exact, engine.forgetful
    texts = [prompt(f"event {i}", 2000) for i in range(7)]
    for text in texts:
        client.complete(text, max_tokens=2)
    engine.follow(engine.agrees)
    assert engine.feed.replayed >= 1  # what was published before the first batch that came
    assert engine.chunks("evicted") == exact.removed > 0
    held = exact.held(CPU)
    metrics = client.metrics()
    used = metrics.value("vllm:tiered_kv_usage_bytes", tier="cpu")
    capacity = metrics.value("vllm:tiered_kv_capacity_bytes", tier="cpu")
    assert used % len(held) == 0
    assert capacity % (used // len(held)) == 0
    assert held == forgetful.held(CPU)
    assert exact.named[CPU] <= exact.named[GPU]  # the device's names for the same tokens
    assert exact.kinds == {0: ("full_attention", None)}
    known = [*texts, prompt("before anybody listens", 1000)]
    for block in held:
        tokens = exact.prefix(block)
        assert any(tokens == text[: len(tokens)] for text in known)

    # vLLM says that all is cleared; ours stays, and is announced again where it is used.
    assert client.reset_prefix_cache()
    engine.follow(lambda: not exact.held(GPU))
    assert exact.held(CPU) == held
    assert not forgetful.held(CPU)
    client.complete(texts[-1], max_tokens=2)
    engine.follow(lambda: len(forgetful.held(CPU)) >= 2000 // BLOCK_TOKENS)
    assert forgetful.held(CPU) <= held == exact.held(CPU)

    engine.reset()
    assert not forgetful.held(CPU)
    assert not client.metrics().value("vllm:tiered_kv_usage_bytes", tier="cpu")


def test_a_router_sends_a_prompt_to_the_engine_whose_tier_holds_it(
    engines: tuple[Engine, Engine], tmp_path: Path
) -> None:
    texts = {engine.url: prompt(f"routed {i}", 1500) for i, engine in enumerate(engines)}
    for engine in engines:
        engine.reset()
        engine.client.complete(texts[engine.url], max_tokens=2)

    def chosen(router: Router, text: list[int]) -> tuple[str, float]:
        """The engine that answered, and what its CPU tier gave it."""
        before = [counts(engine) for engine in engines]
        router.complete(text)
        after = [counts(engine) for engine in engines]
        moved = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(before, after, strict=True)]
        assert sorted(requests for requests, _ in moved) == [0, 1]
        place = 0 if moved[0][0] else 1
        return engines[place].url, moved[place][1]

    sources = {engine.url: engine.source for engine in engines}
    with Router(sources, block_tokens=BLOCK_TOKENS, log=tmp_path / "events.log") as router:
        for _ in range(2):
            for engine in engines:
                engine.push_out()
                router.wait_until_applied(engine.url, engine.feed.batches - 1)
            for engine in engines:
                text = texts[engine.url]
                in_tier = {b for b in engine.exact.held(CPU) if is_part(engine, b, text)}
                assert len(in_tier) == len(text) // BLOCK_TOKENS
                assert not in_tier & engine.exact.held(GPU)
                want = (engine.url, len(in_tier) * BLOCK_TOKENS)
                assert chosen(router, text) == want


def counts(engine: Engine) -> tuple[float, float]:
    metrics = engine.client.metrics()
    answered = metrics.value("vllm:request_success_total")
    return answered, metrics.value("vllm:tiered_kv_hit_tokens_total", tier="cpu")


def is_part(engine: Engine, block: object, text: list[int]) -> bool:
    tokens = engine.exact.prefix(block)
    return tokens == text[: len(tokens)]
