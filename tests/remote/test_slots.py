# SPDX-License-Identifier: Apache-2.0
"""Two ranks over NIXL: out of one's slots into the other's pages, compared with checksums."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_tiered_kv.geometry import GroupGeometry, GroupKind
from vllm_tiered_kv.layout import group_pages
from vllm_tiered_kv.protocol import (
    JobStatus,
    LoadJob,
    PullJob,
    RankSums,
    RemoteSetup,
    Setup,
    StepPlan,
    SumJob,
)
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import Heads, Place
from vllm_tiered_kv.remote.messages import RankMemory
from vllm_tiered_kv.worker.pool import HostPool
from vllm_tiered_kv.worker.remote.layout import OwnSlots
from vllm_tiered_kv.worker.remote.side import RemoteSide, Said

pytest.importorskip("nixl")

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, CONTENT = 3, 12, 16, 2, 32
PER_SLOT, SLOTS = 2, 8
CHUNK = PER_SLOT * BLOCK_TOKENS
PAGE_BYTES = HEADS * BLOCK_TOKENS * CONTENT
SLOT_BYTES = -(-PER_SLOT * LAYERS * PAGE_BYTES // 4096) * 4096
NAMES = tuple(f"layer.{i}" for i in range(LAYERS))
SETUP = Setup("", b"", SLOTS, CHUNK)
WAIT = 20.0


class Rank:
    """One rank's pages, slots, and its side of hand-overs."""

    def __init__(self, seed: int, *, sends: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (LAYERS, BLOCKS, HEADS, BLOCK_TOKENS, CONTENT)
        self.cache = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tensors = dict(zip(NAMES, self.cache, strict=True))
        self.pool = HostPool(SLOTS, SLOT_BYTES, pin=False)
        self.failures: list[str] = []
        self._news = threading.Event()
        group = GroupGeometry(GroupKind.FULL, BLOCK_TOKENS, LAYERS * PAGE_BYTES)
        self.side = RemoteSide(
            0,
            (group,),
            (NAMES,),
            BLOCKS,
            (Heads(0, HEADS, HEADS),),
            lambda kind, _: self.failures.append(kind),
            self._news.set,
        )
        self.side.take(tensors)
        pages = group_pages(list(tensors.values()), BLOCKS)
        address = self.pool.tensor.data_ptr()
        own = OwnSlots(address, SLOT_BYTES, SLOTS, CHUNK, (pages,))
        self.side.open(RemoteSetup("127.0.0.1", sends, not sends, "contents"), own)
        self.said = self.side.take_said()
        assert self.said.layout is not None

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """As a copy to slots leaves it; what was on the device is gone."""
        memory = self.pool.tensor.numpy()
        for i, block in enumerate(blocks):
            at = slots[i // PER_SLOT] * SLOT_BYTES + i % PER_SLOT * LAYERS * PAGE_BYTES
            image = self.cache[:, block].reshape(-1).numpy()
            memory[at : at + len(image)] = image
        self.cache.zero_()

    def sums(self, job: SumJob) -> RankSums:
        self.side.follow(StepPlan(SETUP, sums=(job,)))
        while not (said := self.next_said()).sums:
            pass
        return said.sums[0]

    def pull(self, memory: PeerMemory, order: PullJob) -> JobStatus:
        self.side.follow(StepPlan(SETUP, peers=(memory,)))
        load = LoadJob(1, "request", (), WAIT, pull=order)
        assert self.side.begin(load, None, holds=True)
        while True:
            for result in self.side.whole((), {1: load}):
                assert result.pulled is not None
                assert not result.pulled.may_write
                return result.status
            self.next_said()

    def next_said(self) -> Said:
        assert self._news.wait(WAIT)
        self._news.clear()
        return self.side.take_said()

    def close(self) -> None:
        assert self.side.close(WAIT)
        self.pool.close()


@pytest.fixture
def ranks() -> Iterator[tuple[Rank, Rank]]:
    producer, consumer = Rank(1, sends=True), Rank(2, sends=False)
    yield producer, consumer
    consumer.close()
    producer.close()


def test_out_of_slots_into_pages_and_compared(ranks: tuple[Rank, Rank]) -> None:
    producer, consumer = ranks
    theirs, slots, ours = [7, 2, 9, 4, 0], [5, 0, 3], [1, 8, 3]
    before, values = consumer.cache.clone(), producer.cache[:, theirs].clone()
    producer.store(theirs, slots)
    tokens = 5 * BLOCK_TOKENS - 3
    sums = producer.sums(SumJob(9, tokens, Place.SLOTS, (tuple(slots),), (0,)))
    layout, endpoint = producer.said.layout, producer.said.endpoint
    assert layout is not None
    assert endpoint is not None
    memory = PeerMemory("a" * 32, 1, (RankMemory(0, endpoint, layout),))
    # Its first two blocks are here already; the rest begins with the second slot.
    order = PullJob(
        memory.engine,
        (tuple(ours),),
        (tuple(slots),),
        WAIT,
        (2 * BLOCK_TOKENS,),
        Place.SLOTS,
        (sums.groups,),
    )
    assert consumer.pull(memory, order) is JobStatus.DONE
    before[:, ours] = values[:, 2:]
    assert torch.equal(consumer.cache, before)
    assert not producer.failures
    assert not consumer.failures


def test_what_has_changed_since_is_refused(ranks: tuple[Rank, Rank]) -> None:
    producer, consumer = ranks
    slots = (5, 0)
    producer.store([7, 2, 9], list(slots))
    sums = producer.sums(SumJob(9, 3 * BLOCK_TOKENS, Place.SLOTS, (slots,), (0,)))
    np.bitwise_xor.at(producer.pool.tensor.numpy(), SLOT_BYTES * 5 + PAGE_BYTES + 77, 4)
    layout, endpoint = producer.said.layout, producer.said.endpoint
    assert layout is not None
    assert endpoint is not None
    memory = PeerMemory("a" * 32, 1, (RankMemory(0, endpoint, layout),))
    local = ((1, 8, 3),)
    order = PullJob(memory.engine, local, (slots,), WAIT, (0,), Place.SLOTS, (sums.groups,))
    assert consumer.pull(memory, order) is JobStatus.FAILED
    assert consumer.failures == ["remote_verify"]
