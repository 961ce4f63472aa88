# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half has written to disk, and how it counts what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_tiered_kv import metrics
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.scheduler.disk import DiskPlanner, Since
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.orders import Outcome, WriteOrder

KEY = b"k" * 32
GROUPS = (GroupGeometry(GroupKind.FULL, 16, 4096), GroupGeometry(GroupKind.WINDOW, 16, 4096, 40))


class Agent:
    """Takes orders as long as it says so, and does nothing with them."""

    def __init__(self, max_queued: int = 8) -> None:
        self.settings = SimpleNamespace(max_queued=max_queued)
        self.is_writable = self.takes = True
        self.is_closed = self.is_readable = False
        self.on_disk: dict[bytes, int] = {}
        self.claims: dict[int, WriteOrder] = {}
        self.orders: list[WriteOrder] = []
        self.ended: list[Ended] = []
        self.renewed: list[list[bytes]] = []

    def groups(self, key: bytes) -> int:
        return self.on_disk.get(key, 0)

    def expect(self, order: WriteOrder) -> bool:
        if self.takes:
            self.claims[order.job] = order
        return self.takes

    def settle(self, job: int, *, good: bool) -> bool:
        order = self.claims.pop(job, None)
        return order is not None and not (good and self.write(order))

    def write(self, order: WriteOrder) -> bool:
        if self.takes:
            self.orders.append(order)
        return self.takes

    def renew(self, keys: list[bytes]) -> None:
        self.renewed.append(keys)

    def purge(self) -> None:
        pass

    def take(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def take_failures(self) -> list[str]:
        return []


class Bench:
    def __init__(self, **options: Any) -> None:
        self.agent = Agent(**options)
        self.index = ChunkIndex(64, 2)
        self.tally = metrics.Tally()
        self._job = 100
        agent: Any = self.agent
        geometry = Geometry(16, 16, GROUPS)
        self.planner = DiskPlanner(
            agent, self.index, geometry, 64, self._number, self.tally, 10.0, Admission()
        )

    def _number(self) -> int:
        self._job += 1
        return self._job

    def chunk(self, key: bytes = KEY, groups: tuple[int, ...] = (0, 1)) -> Node:
        node = self.index.reserve(key, None, groups)
        assert node is not None
        self.index.commit(node)
        self.index.unpin(node)
        return node

    def storing(self, job: int, node: Node, *groups: int) -> None:
        request: Any = SimpleNamespace(block_hashes=(node.key,), num_tokens=16)
        self.planner.begin(0)
        self.planner.storing(job, node, groups, request, 0)

    def found(self, node: Node) -> None:
        request: Any = SimpleNamespace(block_hashes=(node.key,), num_tokens=16)
        self.planner.begin(0)
        self.planner.found(node, request, 0)

    def ends(self, job: int, outcome: Outcome) -> None:
        self.agent.ended.append(Ended(job, outcome))
        self.planner.take_in()

    @property
    def dropped(self) -> float:
        key = metrics.CHUNKS.key("dropped", "disk")
        return self.tally.take().get(key, 0)


def test_a_chunk_is_being_written_until_its_last_write_has_ended() -> None:
    bench = Bench()
    node = bench.chunk()
    bench.storing(1, node, 0)
    bench.storing(2, node, 1)
    bench.planner.store_ended(1, good=True)
    bench.planner.store_ended(2, good=True)
    bench.ends(1, Outcome.DONE)
    bench.found(node)  # group 1's part is on its way still
    assert [order.job for order in bench.agent.orders] == [1, 2]
    bench.ends(2, Outcome.FAILED)
    bench.agent.on_disk[KEY] = 0b01
    bench.found(node)
    assert [part.group for part in bench.agent.orders[-1].parts] == [1]
    assert len(bench.agent.orders) == 3


@pytest.mark.parametrize("full", ["the planner", "the agent", "the tier is in trouble"])
def test_a_write_that_cannot_be_asked_for_is_counted(full: str) -> None:
    bench = Bench(max_queued=0 if full == "the planner" else 8)
    bench.agent.takes = full != "the agent"
    bench.agent.is_writable = full != "the tier is in trouble"
    bench.storing(1, bench.chunk(b"a"), 0, 1)
    assert bench.dropped == 1
    bench.found(bench.chunk(b"b"))
    assert bench.dropped == 1
    assert not bench.planner.writes


def test_a_write_whose_store_came_to_nothing_is_counted_once() -> None:
    bench = Bench()
    node = bench.chunk()
    for job in (1, 2, 3):
        bench.storing(job, node, 0, 1)
    bench.planner.store_ended(1, good=False)
    bench.planner.store_ended(1, good=False)
    bench.agent.takes = False  # too much was said to the agent
    bench.planner.store_ended(2, good=True)
    assert bench.dropped == 2
    bench.agent.takes = True
    bench.planner.store_ended(3, good=True)
    assert bench.dropped == 0
    bench.planner.forget(Since.THIS_START)
    bench.ends(3, Outcome.DROPPED)
    assert bench.dropped == 1


def test_what_need_not_be_written_is_not_counted() -> None:
    bench = Bench(max_queued=0)
    bench.agent.on_disk[KEY] = 0b11
    node = bench.chunk()
    bench.storing(1, node, 0, 1)
    bench.found(node)
    bench.agent.on_disk.clear()
    bench.agent.is_closed = True
    bench.storing(2, node, 0, 1)
    bench.found(node)
    assert bench.dropped == 0


def test_a_prefix_is_renewed_when_the_last_of_it_is_written() -> None:
    bench = Bench()
    head = bench.chunk(b"head")
    tail = bench.chunk(b"tail")
    bench.index.adopt(tail, head)
    bench.storing(1, head, 0)
    bench.storing(2, tail, 0)
    bench.storing(3, tail, 1)
    for job in (1, 2, 3):
        bench.planner.store_ended(job, good=True)
    bench.ends(1, Outcome.DONE)
    bench.ends(2, Outcome.DONE)
    assert not bench.agent.renewed
    bench.ends(3, Outcome.DROPPED)
    assert bench.agent.renewed == [[b"tail", b"head"]]
