# SPDX-License-Identifier: Apache-2.0
"""Slots of another process's pool, read into ours as the scheduler half orders it."""

from __future__ import annotations

import time

import numpy as np
import xxhash

from tests.remote._peer import Peer
from tests.remote._reader import PATIENCE, UNTOUCHED, Reader
from vllm_tiered_kv.protocol import JobStatus, PullResult, SlotRead
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, RankLayout, SlotLayout, Strip
from vllm_tiered_kv.remote.messages import RankMemory
from vllm_tiered_kv.worker.remote.checksums import Checker
from vllm_tiered_kv.worker.remote.pulls import Pulls

SLOT_BYTES, STEP, PER_SLOT = 1 << 20, 1 << 19, 2
SLOTS = 16
ENGINE = "ab" * 16


def layout(base: int, per_slot: int = PER_SLOT) -> RankLayout:
    """A pool at this address; what the device's pages are does not matter here."""
    strip = Strip("layer.0", base, STEP, STEP, True)
    pages = GroupLayout("contents", 16, 1, SLOTS, Heads(0, 1, 1), (strip,))
    there = Strip("layer.0", base, SLOT_BYTES, STEP, True, STEP)
    group = GroupLayout("contents", 16, 1, SLOTS, Heads(0, 1, 1), (there,), per_slot)
    return RankLayout(0, (pages,), SlotLayout(base, SLOT_BYTES, (group,)))


def peer_memory(peer: Peer, per_slot: int = PER_SLOT) -> PeerMemory:
    there = layout(peer.region.base, per_slot)
    return PeerMemory(ENGINE, 1, (RankMemory(0, peer.endpoint, there),))


class Side:
    """A rank's reads, and what was said of them."""

    def __init__(self, reader: Reader) -> None:
        self.failures: list[str] = []
        self.pulls = Pulls(
            layout(reader.memory.ctypes.data),
            reader.transport,
            Checker(lambda: None),
            lambda kind, _: self.failures.append(kind),
        )

    def end_of(self, job: int) -> tuple[JobStatus, PullResult]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for number, status, result in self.pulls.take():
                assert number == job
                return status, result
            time.sleep(0.001)
        raise AssertionError("it does not end")


def test_slots_arrive_whole_and_nothing_else_is_touched(transports: str) -> None:
    with Peer(5, SLOTS * SLOT_BYTES, transports) as peer, Reader(SLOTS * SLOT_BYTES) as reader:
        side = Side(reader)
        side.pulls.meet(peer_memory(peer))
        side.pulls.start_slots(SlotRead(1, ENGINE, ((3, 9, 0),), ((7, 2, 15),), PATIENCE))
        status, result = side.end_of(1)
        assert (status, result.may_write) == (JobStatus.DONE, False)
        assert result.nbytes == 3 * SLOT_BYTES
        want = np.full_like(reader.memory, UNTOUCHED)
        for here, there in ((3, 7), (9, 2), (0, 15)):
            at, source = here * SLOT_BYTES, there * SLOT_BYTES
            want[at : at + SLOT_BYTES] = peer.bytes[source : source + SLOT_BYTES]
        assert np.array_equal(reader.memory, want)
        assert side.failures == []


def test_slots_are_compared_when_they_have_arrived(transports: str) -> None:
    with Peer(8, SLOTS * SLOT_BYTES, transports) as peer, Reader(SLOTS * SLOT_BYTES) as reader:
        side = Side(reader)
        side.pulls.meet(peer_memory(peer))
        slots = np.split(peer.bytes, SLOTS)
        sums = tuple(xxhash.xxh3_128_digest(slot) for slot in slots)
        there = (7, 2, 15)
        good = tuple(sums[slot] for slot in there)
        side.pulls.start_slots(SlotRead(1, ENGINE, ((3, 9, 0),), (there,), PATIENCE, good))
        assert side.end_of(1)[0] is JobStatus.DONE
        assert side.failures == []
        for job, wrong in ((2, good[::-1]), (3, good[:2]), (4, (b"", b"", b"")), (5, good[:1] * 3)):
            side.pulls.start_slots(SlotRead(job, ENGINE, ((3, 9, 0),), (there,), PATIENCE, wrong))
            status, result = side.end_of(job)
            assert (status, result.may_write) == (JobStatus.FAILED, False)
        assert side.failures == ["remote_verify"] * 4


def test_a_read_that_is_called_off_says_whether_it_may_still_write(tcp: str) -> None:
    with Peer(6, SLOTS * SLOT_BYTES, tcp) as peer, Reader(SLOTS * SLOT_BYTES) as reader:
        side = Side(reader)
        side.pulls.meet(peer_memory(peer))
        every = tuple(range(SLOTS))
        side.pulls.start_slots(SlotRead(1, ENGINE, ((0,),), ((0,),), PATIENCE))
        assert side.end_of(1)[0] is JobStatus.DONE  # they are connected
        peer.stop()
        side.pulls.start_slots(SlotRead(2, ENGINE, (every,), (every,), PATIENCE))
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            assert side.pulls.take() == []
            time.sleep(0.01)
        side.pulls.cancel([2])
        status, result = side.end_of(2)
        assert status is JobStatus.DROPPED
        assert side.failures == []
        peer.resume()
        end = time.monotonic() + PATIENCE
        while result.may_write and side.pulls.settled() != [2]:
            assert time.monotonic() < end
            side.pulls.take()
            time.sleep(0.001)


def test_what_cannot_be_read_is_said_and_not_begun() -> None:
    with Peer(7, SLOTS * SLOT_BYTES) as peer, Reader(SLOTS * SLOT_BYTES) as reader:
        side = Side(reader)
        side.pulls.start_slots(SlotRead(1, ENGINE, ((0,),), ((0,),), PATIENCE))
        assert side.end_of(1)[0] is JobStatus.FAILED
        assert side.failures == ["remote_peer"]
        side.pulls.meet(peer_memory(peer))
        for job, there in ((2, SLOTS), (3, -1)):
            side.pulls.start_slots(SlotRead(job, ENGINE, ((0,),), ((there,),), PATIENCE))
            assert side.end_of(job)[0] is JobStatus.FAILED
        assert side.failures[1:] == ["remote_range"] * 2
        side.pulls.meet(peer_memory(peer, per_slot=1))
        side.pulls.start_slots(SlotRead(4, ENGINE, ((0,),), ((0,),), PATIENCE))
        assert side.end_of(4)[0] is JobStatus.FAILED
        assert not reader.memory.any()
