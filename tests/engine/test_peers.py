# SPDX-License-Identifier: Apache-2.0
"""An engine asks another one for chunks: two real ones, NIXL between them, no router."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine._server import (
    BLOCK_TOKENS,
    Pool,
    Running,
    assert_same_output,
    flushed,
    prompt,
    stored,
)
from tests.engine.test_handover import alone, wait
from vllm_tiered_kv.remote import keys

pytest.importorskip("nixl")

LEASE = 5.0
TOKENS = 20 * BLOCK_TOKENS
_seeds = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def config(key: Path, port: int, peers: list[str]) -> dict[str, Any]:
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "gate": "always",
            "cpu": {"capacity": "256MiB"},
            "remote": {
                "listen": f"127.0.0.1:{port}",
                "key_file": str(key),
                "peers": peers,
                "lease": LEASE,
                "deadline": 3.0,
            },
        },
    }


class Pair:
    """A, and B that asks it."""

    def __init__(self, a: Running, b: Running) -> None:
        self.a = a
        self.b = b

    def hits(self) -> float:
        metrics = self.b.client.metrics()
        return metrics.value("vllm:tiered_kv_hit_tokens_total", tier="peer_cpu")

    def failures(self) -> set[str]:
        return {
            sample.labels["kind"]
            for sample in self.b.client.metrics()
            if sample.name == "vllm:tiered_kv_failures_total" and sample.value
        }

    def teach(self, tokens: list[int]) -> None:
        self.a.client.complete(tokens, max_tokens=1)
        stored(self.a.client)


def fresh(tokens: int) -> list[int]:
    return prompt(f"lent {next(_seeds)}", tokens)


@pytest.fixture
def start(servers: Pool, tmp_path: Path) -> Iterator[Callable[[], Pair]]:
    """Two engines that know each other."""
    key = tmp_path / "fleet.key"
    keys.write(key, keys.generate())
    with contextlib.ExitStack() as stack:

        def both() -> Pair:
            ports = free_port(), free_port()
            made = []
            for own, other in (ports, ports[::-1]):
                setup = config(key, own, [f"127.0.0.1:{other}"])
                made.append(stack.enter_context(servers.private(kv_transfer_config=setup)))
            for running in made:
                running.client.complete([9, 8, 9], max_tokens=1)  # ranks come with a first step
            pair = Pair(*made)

            def met() -> bool:
                text = fresh(2 * BLOCK_TOKENS)
                pair.teach(text)
                pair.b.client.complete(text, max_tokens=1)
                return pair.hits() > 0

            wait(met, "B does not ask A")
            return pair

        yield both


def test_chunks_of_a_peer(start: Callable[[], Pair]) -> None:
    pair = start()
    text = fresh(TOKENS)
    pair.teach(text)
    before = pair.hits()
    asked = [*text, 5, 6, 7]
    got = pair.b.client.complete(asked, max_tokens=8)
    assert pair.hits() - before == TOKENS
    assert_same_output(alone(pair.b.client, asked), got)
    assert_same_output(alone(pair.a.client, asked), got)
    # What was read is B's own now, and A can have it back.
    assert flushed(pair.b.client)
    before = pair.hits()
    assert_same_output(got, pair.b.client.complete(asked, max_tokens=8))
    assert pair.hits() == before
    assert pair.failures() == set()

    # A starts over: nothing of before is lent, and both go on.
    assert pair.a.client.reset_prefix_cache(external=True)
    text = fresh(TOKENS)
    pair.teach(text)
    got = pair.b.client.complete(text, max_tokens=8)
    assert pair.hits() == before
    assert_same_output(alone(pair.b.client, text), got)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_gone(start: Callable[[], Pair], sign: signal.Signals) -> None:
    pair = start()
    text, other = fresh(TOKENS), fresh(TOKENS)
    pair.teach(text)
    pair.teach(other)
    group = pair.a.server.pid
    os.killpg(group, sign)
    try:
        before = pair.hits()
        got = pair.b.client.complete(text, max_tokens=8)
        again = pair.b.client.complete(other, max_tokens=8)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)
    assert pair.hits() == before
    assert_same_output(alone(pair.b.client, text), got)
    assert_same_output(alone(pair.b.client, other), again)
    if sign is signal.SIGSTOP:

        def is_back() -> bool:
            fresh_one = fresh(2 * BLOCK_TOKENS)
            pair.teach(fresh_one)
            pair.b.client.complete(fresh_one, max_tokens=1)
            return pair.hits() > before

        wait(is_back, "B does not ask A again")
