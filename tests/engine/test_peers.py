# SPDX-License-Identifier: Apache-2.0
"""An engine asks another one for chunks: two real ones, NIXL between them, no router."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine import _damage
from tests.engine._handover import IN_FLIGHT, alone, wait
from tests.engine._server import (
    BLOCK_TOKENS,
    Pool,
    Running,
    assert_same_output,
    flushed,
    prompt,
    stored,
)
from tools.serving import Client
from vllm_tiered_kv.remote import keys

pytest.importorskip("nixl")

ROOT = Path(__file__).parents[2]
LEASE = 5.0
TOKENS = 20 * BLOCK_TOKENS
_seeds = itertools.count()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def config(key: Path, port: int, peers: list[str], *, verify: bool) -> dict[str, Any]:
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
                "verify": verify,
            },
        },
    }


class Pair:
    """A, and B that asks it.

    Args:
        a: lends.
        b: borrows.
        damage: see :func:`engines`.
    """

    def __init__(self, a: Running, b: Running, damage: Path) -> None:
        self.a = a
        self.b = b
        self.damage = damage

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
        """A computes a prompt, and lends it."""
        self.a.client.complete(tokens, max_tokens=1)
        stored(self.a.client)
        wait(lambda: lends(self.a.client), "A makes no checksums")


def lends(client: Client) -> bool:
    """Whether an engine lends all that it has stored; its figures move with requests only."""
    client.complete([9, 8, 9], max_tokens=1)
    return not client.metrics().value(IN_FLIGHT, direction="sum")


def fresh(tokens: int) -> list[int]:
    return prompt(f"lent {next(_seeds)}", tokens)


@contextlib.contextmanager
def engines(servers: Pool, folder: Path, *, verify: bool) -> Iterator[Pair]:
    """Two that know each other; while there is a file "damage" what A lends with checksums changes
    when they have been made."""
    key = folder / "fleet.key"
    faulty = {
        "kv_connector": _damage.DamagedSlotsTieredKVConnector.__name__,
        "kv_connector_module_path": _damage.__name__,
    }
    env = {_damage.VARIABLE: str(folder / "damage"), "PYTHONPATH": str(ROOT)}
    keys.write(key, keys.generate())
    ports = free_port(), free_port()
    with contextlib.ExitStack() as stack:
        made = []
        for own, other, more in ((*ports, faulty), (*ports[::-1], {})):
            setup = {**config(key, own, [f"127.0.0.1:{other}"], verify=verify), **more}
            made.append(stack.enter_context(servers.private(kv_transfer_config=setup, env=env)))
        for running in made:
            running.client.complete([9, 8, 9], max_tokens=1)  # ranks come with a first step
        pair = Pair(*made, folder / "damage")
        wait(lambda: asks(pair), "B does not ask A")
        yield pair


def asks(pair: Pair) -> bool:
    """Whether B has found something at A."""
    before, text = pair.hits(), fresh(2 * BLOCK_TOKENS)
    pair.teach(text)
    pair.b.client.complete(text, max_tokens=1)
    return pair.hits() > before


@pytest.fixture(scope="module")
def pair(servers: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with engines(servers, tmp_path_factory.mktemp("keys"), verify=True) as pair:
        yield pair


def test_chunks_of_a_peer(pair: Pair) -> None:
    text = fresh(TOKENS)
    pair.teach(text)
    before = pair.hits()
    asked = [*text, 5, 6, 7]
    got = pair.b.client.complete(asked, max_tokens=8)
    assert pair.hits() - before == TOKENS
    assert_same_output(alone(pair.b.client, asked), got)
    assert_same_output(alone(pair.a.client, asked), got)
    # What was read is B's own now.
    assert flushed(pair.b.client)
    before = pair.hits()
    assert_same_output(got, pair.b.client.complete(asked, max_tokens=8))
    assert pair.hits() == before
    assert pair.failures() <= {"remote_unanswered"}  # greetings, before the other was there


def computes(pair: Pair, texts: list[list[int]]) -> None:
    """B answers these rightly, and without the peer."""
    before = pair.hits()
    for text in texts:
        got = pair.b.client.complete(text, max_tokens=8)
        assert_same_output(alone(pair.b.client, text), got)
    assert pair.hits() == before


def test_a_wrong_byte_in_a_peers_memory_is_never_used(pair: Pair) -> None:
    texts: list[list[int]] = []

    def is_seen() -> bool:
        texts.append(fresh(TOKENS))
        pair.teach(texts[-1])
        computes(pair, texts[-1:])
        return "remote_verify" in pair.failures()

    pair.damage.touch()
    try:
        wait(is_seen, "B never came across a wrong byte")
    finally:
        pair.damage.unlink()
    # Nor is it in B's own tier: what B has computed is.
    assert flushed(pair.b.client)
    computes(pair, texts)
    wait(lambda: asks(pair), "B does not ask A any more")


def test_a_peer_that_stands_still_and_goes_on(pair: Pair) -> None:
    texts = [fresh(TOKENS), fresh(TOKENS)]
    for text in texts:
        pair.teach(text)
    with pair.a.server.standing_still():
        computes(pair, texts)
    wait(lambda: asks(pair), "B does not ask A again")


def test_after_a_reset_nothing_is_lent(pair: Pair) -> None:
    text = fresh(TOKENS)
    pair.teach(text)
    assert pair.a.client.reset_prefix_cache(external=True)
    again = fresh(TOKENS)
    pair.teach(again)
    computes(pair, [text, again])


def test_a_peer_that_is_killed(servers: Pool, tmp_path: Path) -> None:
    with engines(servers, tmp_path, verify=False) as pair:
        texts = [fresh(TOKENS), fresh(TOKENS)]
        for text in texts:
            pair.teach(text)
        os.killpg(pair.a.server.pid, signal.SIGKILL)
        computes(pair, texts)
