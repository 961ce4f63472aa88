# SPDX-License-Identifier: Apache-2.0
"""What a peer says of its memory is held to be possible; nothing of it ends the engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scheduler.near import NearTransport
from vllm_tiered_kv.protocol import JobStatus, PullJob, SlotRead
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, RankLayout, SlotLayout, Strip
from vllm_tiered_kv.remote.messages import RankMemory
from vllm_tiered_kv.remote.transport import Endpoint, Options, Region
from vllm_tiered_kv.worker.remote.checksums import Checker
from vllm_tiered_kv.worker.remote.pulls import Pulls

BASE, HEAD = 1 << 20, 1024
NOWHERE = (1 << 63) - 1
PEER = "11" * 16


def group(heads: Heads, address: int = BASE, entries: int = 1) -> GroupLayout:
    size = heads.count * HEAD
    strip = Strip("layer.0", address, size * entries, size, True)
    return GroupLayout("contents", 16, entries, 64, heads, (strip,))


def slots(heads: Heads, address: int) -> SlotLayout:
    size = heads.count * HEAD
    strip = Strip("layer.0", address, size, size, True, size)
    return SlotLayout(BASE, size, (GroupLayout("contents", 16, 1, 64, heads, (strip,)),))


def memory(layout: RankLayout) -> PeerMemory:
    endpoint = Endpoint(PEER, b"near", (Region(BASE, 1 << 20),))
    return PeerMemory(PEER, 1, (RankMemory(0, endpoint, layout),))


class Rank:
    """One that has the second of two heads, and what it has noted."""

    def __init__(self) -> None:
        self.failures: list[str] = []
        self.checker = Checker(lambda: None)
        self.pulls = Pulls(
            RankLayout(1, (group(Heads(1, 1, 2), entries=2),)),
            NearTransport((Region(BASE, 1 << 20),), Options()),
            self.checker,
            lambda kind, _: self.failures.append(kind),
        )


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.checker.close(20)


@pytest.mark.parametrize(
    "layout",
    [
        RankLayout(0, (group(Heads(0, 2, 2), NOWHERE),)),
        RankLayout(0, (group(Heads(0, 2, 2)),), slots(Heads(0, 2, 2), NOWHERE)),
    ],
    ids=["pages", "slots"],
)
def test_places_that_cannot_be(rank: Rank, layout: RankLayout) -> None:
    rank.pulls.meet(memory(layout))
    rank.pulls.start(1, PullJob(PEER, ((1,),), ((1,),), 10.0, (0,)))
    rank.pulls.start_slots(SlotRead(2, PEER, ((1,),), ((1,),), 10.0))
    assert [(job, status) for job, status, _ in rank.pulls.take()] == [
        (1, JobStatus.FAILED),
        (2, JobStatus.FAILED),
    ]
    assert rank.failures == ["internal", "remote_peer", "remote_peer"]


def test_too_little_for_our_blocks_is_not_taken_for_all(rank: Rank) -> None:
    rank.pulls.meet(memory(RankLayout(0, (group(Heads(0, 2, 2)),))))
    rank.pulls.start(1, PullJob(PEER, ((1, 2),), ((1, 2),), 10.0, (0,)))
    ((job, status, _),) = rank.pulls.take()
    assert (job, status) == (1, JobStatus.FAILED)
    assert rank.failures == ["remote_range"]
