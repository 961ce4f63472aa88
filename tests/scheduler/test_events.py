# SPDX-License-Identifier: Apache-2.0
"""KV events of vLLM's real scheduler: who reads only them knows what the index knows."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored, EventPublisher, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from tests._kv_subscriber import CPU, GPU, Clears, Subscriber
from tests.scheduler.sim import BLOCK, Sim, prompt
from vllm_tiered_kv.compat import event_groups
from vllm_tiered_kv.scheduler import event_log
from vllm_tiered_kv.scheduler.index import ABSENT, NodeState

Make = Callable[..., Sim]


class Recorder(EventPublisher):
    """Stands for the ZeroMQ publisher: the same bytes, without the socket."""

    def __init__(self, *subscribers: Subscriber) -> None:
        super().__init__()
        self._subscribers = subscribers
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self.batches: list[list[Any]] = []

    def publish(self, events: Any) -> None:
        batch = self._decoder.decode(self._encoder.encode(events)).events
        self.batches.append(batch)
        for subscriber in self._subscribers:
            subscriber.apply(batch)

    def shutdown(self) -> None:
        pass


class Watched:
    """An engine with KV events on, and two readings of them."""

    def __init__(self, make: Make, **options: Any) -> None:
        config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.engine = make(kv_events_config=config, **options)
        self.exact = Subscriber(Clears.DEVICE)
        self.forgetful = Subscriber(Clears.EVERYTHING)
        self.recorder = Recorder(self.exact, self.forgetful)
        self.engine.scheduler.kv_event_publisher = self.recorder
        self._ticks = 0

    @property
    def log(self) -> Any:
        return self.engine.half.core.events.log

    def events(self, kind: type, medium: str) -> list[Any]:
        """What was published of one medium so far."""
        all_events = [e for batch in self.recorder.batches for e in batch]
        return [e for e in all_events if isinstance(e, kind) and e.medium == medium]

    def tick(self) -> None:
        """A step of vLLM that stores nothing."""
        self._ticks += 1
        self.engine.complete(f"tick-{self._ticks}", [9, 8, 9])

    def catch_up(self) -> None:
        """Step until all that has happened is published."""
        self.engine.settle()
        self.tick()
        for _ in range(1000):
            stale = any(told.epoch != self.log._epoch for told in self.log._told.values())
            if not len(self.log) and not stale:
                return
            self.tick()
        raise AssertionError("events are left over")

    def ready(self, group: int) -> set[Any]:
        """What the index can offer of a group, by its blocks' published names."""
        core = self.engine.half.core
        count = core.geometry.hashes_per_chunk
        blocks = {}
        for request in self.engine.requests.values():
            for i, key in enumerate(request.block_hashes):
                if (i + 1) % count == 0:
                    blocks[key] = request.block_hashes[i + 1 - count : i + 1]
        held = set()
        for key, node in core.index._nodes.items():
            if node.state is NodeState.READY and node.slots[group] != ABSENT:
                held.update(int.from_bytes(h[-8:], "big") for h in blocks[key])
        return held

    def check(self) -> None:
        """Those who keep the media apart know it all; the others know nothing that is not so."""
        self.catch_up()
        known = {}
        for request_id, request in self.engine.requests.items():
            for i, key in enumerate(request.block_hashes):
                tokens = self.engine.tokens[request_id][: (i + 1) * BLOCK]
                known[int.from_bytes(key[-8:], "big")] = tokens
        for group in range(len(self.engine.ranks[0].windows)):
            ready = self.ready(group)
            assert self.exact.held(CPU, group) == ready
            assert self.forgetful.held(CPU, group) <= ready
            for block in ready:
                assert self.exact.prefix(block, group) == known[block]


@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_a_stored_prefix_is_published_with_the_devices_names(sim: Make, chunk_blocks: int) -> None:
    watched = Watched(sim, chunk_blocks=chunk_blocks)
    watched.engine.complete("a", prompt(12 * BLOCK + 3), 2)
    watched.check()
    assert watched.exact.held(CPU) == watched.exact.held(GPU)
    assert len(watched.exact.held(CPU)) == 12
    assert watched.exact.kinds == {0: ("full_attention", None)}
    ours = watched.events(BlockStored, CPU)
    assert [len(e.block_hashes) for e in ours] == [chunk_blocks] * (12 // chunk_blocks)


def test_nothing_is_published_before_every_rank_has_stored_it(sim: Make) -> None:
    watched = Watched(sim)
    watched.engine.gate.hold("store")
    watched.engine.complete("a", prompt(6 * BLOCK))
    assert watched.exact.held(GPU)
    assert not watched.exact.held(CPU)
    watched.engine.gate.release("store")
    watched.check()
    assert len(watched.exact.held(CPU)) == 6


def test_what_failed_to_be_stored_is_never_published(sim: Make) -> None:
    watched = Watched(sim)
    watched.engine.gate.fail.add("store")
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check()
    assert not watched.exact.held(CPU)
    assert not len(watched.log)


def test_what_failed_to_load_is_taken_back(sim: Make) -> None:
    watched = Watched(sim)
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check()
    watched.engine.flush_device()
    watched.engine.gate.fail.add("load")
    watched.engine.gate.hold("store")  # or it is stored again at once
    watched.engine.complete("again", prompt(6 * BLOCK))
    assert watched.exact.removed
    watched.engine.gate.release("store")
    watched.check()


def test_evicted_chunks_are_taken_back_tail_first(sim: Make) -> None:
    watched = Watched(sim, capacity_chunks=8)
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check()
    watched.engine.complete("b", prompt(4 * BLOCK, seed=1))
    watched.check()
    assert watched.exact.removed == watched.engine.counter("chunks", "evicted", "cpu") == 2
    left = [len(watched.exact.prefix(b)) for b in watched.exact.held(CPU)]
    assert sorted(left) == [n * BLOCK for n in (1, 1, 2, 2, 3, 3, 4, 4)]


def test_a_reset_of_the_device_alone_takes_back_nothing_of_ours(sim: Make) -> None:
    """Some take vLLM's word that all is cleared for every medium: they are told again."""
    watched = Watched(sim)
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check()
    held = watched.exact.held(CPU)
    watched.engine.flush_device()
    watched.check()
    assert watched.exact.held(CPU) == held
    assert not watched.forgetful.held(CPU)
    watched.engine.complete("again", prompt(6 * BLOCK))
    watched.check()
    assert watched.forgetful.held(CPU) == watched.exact.held(CPU) == held
    told = watched.events(BlockStored, CPU)
    watched.engine.complete("and again", prompt(6 * BLOCK))
    watched.check()
    assert watched.events(BlockStored, CPU) == told  # once is enough


@pytest.mark.parametrize("limit", [event_log.MAX_REMOVED_HASHES, 5])
def test_a_reset_with_the_connector_takes_back_all_in_pieces(
    sim: Make, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(sim, chunk_blocks=2)
    monkeypatch.setattr(watched.log, "_max_removed_hashes", limit)
    for i in range(4):
        watched.engine.complete(f"a{i}", prompt(6 * BLOCK, seed=i))
    watched.check()
    assert len(watched.exact.held(CPU)) == 24
    assert watched.engine.scheduler.reset_prefix_cache(reset_connector=True)
    # What is stored again in the midst of it stays.
    watched.engine.complete("again", prompt(6 * BLOCK, seed=0))
    assert not watched.forgetful.held(CPU) - watched.ready(0)
    watched.check()
    assert len(watched.exact.held(CPU)) == len(watched.forgetful.held(CPU)) == 6
    pieces = [len(event.block_hashes) for event in watched.events(BlockRemoved, CPU)]
    assert max(pieces) == min(limit + limit % 2, sum(pieces))  # chunks are not split
    assert 18 <= sum(pieces) <= 24
    assert watched.engine.counter("chunks", "evicted", "cpu") == 0


def test_a_connector_reset_that_the_device_refuses_is_published_too(sim: Make) -> None:
    watched = Watched(sim)
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check()
    watched.engine.add("b", prompt(5 * BLOCK, seed=1), 50)
    watched.engine.step()
    assert not watched.engine.scheduler.reset_prefix_cache(reset_connector=True)
    watched.engine.run()
    watched.check()
    assert not watched.exact.held(CPU)
    assert not watched.forgetful.held(CPU)
    assert watched.forgetful.held(GPU)


def test_stores_that_outrun_the_queue_are_announced_when_they_are_used(
    sim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(sim)
    monkeypatch.setattr(watched.log, "_max_waiting", 4)
    watched.engine.gate.hold("store")
    watched.engine.complete("a", prompt(10 * BLOCK))
    with monkeypatch.context() as busy:  # nobody takes them while the stores end
        busy.setattr(watched.engine.half, "take_events", tuple)
        watched.engine.gate.release("store")
        watched.engine.settle()
    watched.catch_up()
    assert len(watched.ready(0)) == 10
    assert len(watched.exact.held(CPU)) < 10
    assert watched.engine.counter("failures", "kv_events") > 0
    for i in range(3):
        watched.engine.complete(f"again{i}", prompt(10 * BLOCK))
        watched.tick()
    watched.check()
    assert len(watched.exact.held(CPU)) == 10


def test_window_groups_are_published_where_they_have_a_part(sim: Make) -> None:
    watched = Watched(sim, windows=(0, 40), num_blocks=96, max_num_batched_tokens=64)
    watched.engine.complete("a", prompt(20 * BLOCK), 4)
    watched.check()
    assert watched.exact.kinds == {0: ("full_attention", None), 1: ("sliding_window", 40)}
    assert len(watched.exact.held(CPU, 0)) == 20
    assert watched.exact.held(CPU, 1) <= watched.exact.held(CPU, 0)


def test_generated_tokens_and_salts_are_part_of_what_is_published(sim: Make) -> None:
    watched = Watched(sim)
    watched.engine.complete("plain", prompt(4 * BLOCK), 3 * BLOCK)
    watched.engine.complete("salted", prompt(4 * BLOCK), 1, salt="salt")
    watched.check()
    longest = max((watched.exact.prefix(b) for b in watched.exact.held(CPU)), key=len)
    assert longest == watched.engine.tokens["plain"][: 6 * BLOCK]
    keys = [watched.exact.known[0, b].extra_keys for b in watched.exact.held(CPU)]
    assert keys.count(("salt",)) == 1
    assert keys.count(None) == len(keys) - 1


def test_multi_connector_passes_them_on(sim: Make) -> None:
    watched = Watched(sim)
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.engine.settle()
    silent = SimpleNamespace(take_events=lambda: ())
    multi = SimpleNamespace(_connectors=[silent, watched.engine.connector])
    watched.exact.apply(MultiConnector.take_events(multi))
    assert len(watched.exact.held(CPU)) == 6


def test_nothing_is_kept_where_events_are_off(sim: Make) -> None:
    engine = sim(kv_events_config=KVEventsConfig(enable_kv_cache_events=False))
    engine.complete("a", prompt(6 * BLOCK))
    assert event_groups(engine.vllm_config, engine.kv_cache_config) is None
    assert engine.half.core.events is None
    assert engine.half.core.index._listener is None
    assert engine.connector.take_events() == ()


def test_a_block_that_two_chunks_share_is_taken_back_with_the_last_one(sim: Make) -> None:
    watched = Watched(sim, chunk_blocks=3, capacity_chunks=2)
    head = prompt(2 * BLOCK)
    watched.engine.complete("a", head + prompt(BLOCK, seed=1))
    watched.engine.complete("b", head + prompt(BLOCK, seed=2))
    watched.check()
    assert len(watched.exact.held(CPU)) == 4
    watched.engine.complete("c", prompt(3 * BLOCK, seed=3))
    watched.check()
    assert watched.engine.counter("chunks", "evicted", "cpu") == 1
    assert len(watched.exact.held(CPU)) == 6
    watched.engine.complete("d", prompt(3 * BLOCK, seed=4))
    watched.check()
    assert len(watched.exact.held(CPU)) == 6
    assert watched.exact.removed == 4


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("windows", [(0,), (0, 48)])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(sim: Make, seed: int, windows: tuple[int, ...], depth: int) -> None:
    rng = random.Random(f"{seed} {windows} {depth}")
    chunk_blocks = rng.choice([1, 2, 3])
    watched = Watched(
        sim,
        windows=windows,
        depth=depth,
        chunk_blocks=chunk_blocks,
        num_blocks=rng.choice([48, 96]),
        capacity_chunks=rng.choice([12, 30]),
        max_num_batched_tokens=rng.choice([64, 256]),
        max_model_len=40 * BLOCK,
    )
    watched.log._max_removed_hashes = rng.choice([3, 4096])
    watched.log._max_stored_events = rng.choice([2, 512])
    engine = watched.engine
    for i in range(60):
        for direction in ("store", "load"):
            engine.gate.fail.discard(direction)
            if rng.random() < 0.1:
                engine.gate.fail.add(direction)
        text = prompt(20 * BLOCK, seed=rng.randrange(5))[: rng.randrange(BLOCK, 20 * BLOCK)]
        text += prompt(rng.randrange(1, 3 * BLOCK), seed=rng.randrange(100, 103))
        engine.add(f"r{i}", text, rng.randrange(1, 30), salt=rng.choice([None, None, "salt"]))
        for _ in range(rng.randrange(6)):
            if engine.scheduler.has_requests():
                engine.step()
        event = rng.random()
        if event < 0.08:
            engine.scheduler.reset_prefix_cache()
        elif event < 0.16:
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        elif event < 0.3:
            engine.run()
            watched.check()
    engine.gate.fail.clear()
    engine.run()
    watched.check()
    assert watched.exact.removed
    engine.check_quiet()
