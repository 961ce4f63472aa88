# SPDX-License-Identifier: Apache-2.0
"""Simulated engines that hand KV over to each other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.scheduler.near import NearTransport
from tests.scheduler.sim import BLOCK, Sim, prompt
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.messages import Identity

TO_PRODUCER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
IDENTITY = Identity("a" * 32, "b" * 32)
LEASE = 30.0
ODD = 5 * BLOCK + 3
"""Tokens that end within a block."""


class Clock:
    """Real time, and more of it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Engine:
    """A simulated engine that hands KV over, and its transports."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.clock = Clock()
        self.remote = sim.half.remote
        self.remote.agent.clock = self.clock
        self.remote.agent._server._clock = self.clock
        self.remote.agent._client._clock = self.clock

    @property
    def transport(self) -> Any:
        return self.sim.worker._worker.remote._pulls._transport

    @property
    def failures(self) -> dict[str, float]:
        prefix = "failures|"
        return {
            key.removeprefix(prefix): value
            for key, value in self.sim.counters.items()
            if key.startswith(prefix)
        }

    def count(self, key: str) -> float:
        self.sim._collect()
        return self.sim.counters.get(key, 0.0)

    def pass_time(self, seconds: float) -> None:
        """Here alone, after the agent has come to all that was said to it."""
        self.come_to_it()
        self.clock.ahead += seconds

    def come_to_it(self) -> None:
        """Wait until the agent has done all that was said to it."""
        come_to: list[int] = []
        self.remote.agent._errands.insist(come_to.append, 1)
        wait(lambda: bool(come_to), "the agent is stuck")

    def is_free(self) -> bool:
        self.sim.half.drain()
        return bool(self.sim.free_blocks == self.sim.free_at_start)

    def wait_free(self) -> None:
        wait(self.is_free, "blocks are still held")


def wait(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def pass_time(engines: Sequence[Engine], seconds: float) -> None:
    """Everywhere, as leases count on: no clock may run ahead of another by their grace."""
    for engine in engines:
        engine.come_to_it()
    for engine in engines:
        engine.clock.ahead += seconds


class Fleet:
    """Makes engines that share a key."""

    def __init__(self, make: Callable[..., Sim], folder: Path) -> None:
        self._make = make
        self._folder = folder
        self._names = itertools.count()
        keys.write(folder / "fleet.key", keys.generate())

    def engine(self, role: str, *, key: str = "fleet.key", **options: Any) -> Engine:
        remote = {
            "listen": "127.0.0.1:0",
            "key_file": str(self._folder / key),
            "lease": LEASE,
            **options.pop("remote", {}),
        }
        extra = {"remote": remote, **options.pop("extra", {})}
        sim = self._make(role=role, extra=extra, **options)
        for rank in sim.ranks:
            rank.tiered._worker.remote.open_transport = NearTransport
        engine = Engine(sim)
        sim.complete("first", prompt(BLOCK, seed=999), 1)  # ranks come with an engine's first step
        sim.settle()
        sim.flush_device()
        if role != "kv_consumer":
            wait(lambda: engine.remote.agent.sends, "the producer is not ready")
        return engine


def prefill(producer: Engine, tokens: list[int], name: str = "p", **kw: Any) -> dict[str, Any]:
    """What a router learns from the producer."""
    producer.sim.add(name, tokens, 1, params=TO_PRODUCER, **kw)
    producer.sim.run()
    return producer.sim.handed[name]


def decode(
    consumer: Engine, tokens: list[int], params: Any, name: str = "d", count: int = 5, **kw: Any
) -> None:
    consumer.sim.add(name, tokens, count, params=params, **kw)
    consumer.sim.run()
    assert consumer.sim.outputs[name] == consumer.sim.expected(name)


def wait_held(engine: Engine, reads: int = 1) -> None:
    deadline = time.monotonic() + 20
    while len(engine.transport.held) < reads:
        assert time.monotonic() < deadline
        engine.sim.advance()


def begin_held(producer: Engine, consumer: Engine, tokens: list[int]) -> None:
    """Request "d", whose read is under way and stands still."""
    consumer.transport.is_held = True
    consumer.sim.add("d", tokens, 3, params=prefill(producer, tokens))
    wait_held(consumer)


def abort_while_bytes_come(producer: Engine, consumer: Engine, prompts: list[list[int]]) -> None:
    """Each is aborted while it is read; what it holds is given back afterwards."""
    for i, tokens in enumerate(prompts):
        consumer.transport.is_held = True
        consumer.sim.add(f"d{i}", tokens, 3, params=prefill(producer, tokens, f"p{i}"))
        wait_held(consumer)
        consumer.sim.abort(f"d{i}")
        consumer.sim.step()
        assert not consumer.is_free()  # bytes still come
        consumer.transport.release()
        consumer.sim.run()


def give_up_while_bytes_come(
    producer: Engine, consumer: Engine, tokens: list[int], blocks: int, *, is_aborted: bool
) -> None:
    """A read is given up, and lands late: into blocks that nobody else has until then."""
    begin_held(producer, consumer, tokens)
    if is_aborted:
        consumer.sim.abort("d")
    consumer.transport.give_up()
    consumer.transport.is_held = False
    consumer.sim.run()
    if not is_aborted:
        assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.sim.free_at_start - consumer.sim.free_blocks == blocks
    assert not producer.is_free()
    # Others use all the rest meanwhile; nothing of theirs is written to.
    for i in range(6):
        consumer.sim.add(f"other{i}", prompt(12 * BLOCK, seed=50 + i), 6)
    for _ in range(5):
        consumer.sim.advance()
    consumer.transport.land()
    consumer.sim.run()
    for i in range(6):
        assert consumer.sim.outputs[f"other{i}"] == consumer.sim.expected(f"other{i}")
    consumer.sim.complete("last", prompt(BLOCK, seed=77), 1)
    assert consumer.failures["remote_quarantine"] == 1
