# SPDX-License-Identifier: Apache-2.0
"""A rank's part: each order is answered once, whatever happens to it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.disk._agent import FILE, PART, SLOT, SPACE, FaultyFiles, key_of
from vllm_tiered_kv.tiers.disk.channel import AgentSockets, RankSockets
from vllm_tiered_kv.tiers.disk.direct import aligned_buffer
from vllm_tiered_kv.tiers.disk.executor import READERS, DiskExecutor
from vllm_tiered_kv.tiers.disk.format import ChunkFacts
from vllm_tiered_kv.tiers.disk.orders import (
    CancelReads,
    OpenFolder,
    OrderResult,
    Outcome,
    Part,
    ReadOrder,
    WriteOrder,
)

FACTS = ChunkFacts((), 1, 0, 16)


class Bench:
    def __init__(self, root: Path, part_bytes: tuple[int, ...] = (PART, 0)) -> None:
        self.files = FaultyFiles(0)
        self.agent = AgentSockets()
        self.memory = aligned_buffer(64 * SLOT)
        self.now = 0.0
        self.cpu = max(os.sched_getaffinity(0))
        self.reads_over = threading.Event()
        self.executor = DiskExecutor(
            0,
            RankSockets(
                0, self.agent.reports_address, self.agent.orders_address, self.agent.secret
            ),
            self.view,
            part_bytes,
            self.files,
            clock=lambda: self.now,
            cpus={self.cpu},
            reads_over=self.reads_over.set,
        )
        self.opening = OpenFolder(str(root), SPACE, False)
        self.results: dict[int, OrderResult] = {}
        while self.agent.ranks == 0:
            self.agent.wait(0.05)

    def view(self, slot: int, nbytes: int) -> memoryview | None:
        return self.memory[slot * SLOT : slot * SLOT + nbytes] if slot < 64 else None

    def say(self, *orders: Any) -> None:
        assert self.agent.send(0, orders)

    def hear(self, *jobs: int) -> list[Outcome]:
        """The ends of these orders."""
        for _ in range(600):
            if set(jobs) <= set(self.results):
                return [self.results[job].outcome for job in jobs]
            for report in self.agent.wait(0.1):
                for result in report.results:
                    assert result.job not in self.results, "answered twice"
                    self.results[result.job] = result
        raise AssertionError(f"no answer to {set(jobs) - set(self.results)}")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.files.flow.set()
    assert made.executor.close(30)
    made.agent.close()


def write(job: int, *slots: int, key: int = 1) -> WriteOrder:
    return WriteOrder(job, key_of(key), tuple(Part(0, s) for s in slots), FACTS, 0)


def read(job: int, *parts: Part, key: int = 1, patience: float = 10.0) -> ReadOrder:
    return ReadOrder(job, key_of(key), parts or (Part(0, 0),), patience)


def test_orders_before_the_folder_is_known_are_dropped(bench: Bench) -> None:
    bench.say(write(1, 0), read(2))
    assert bench.hear(1, 2) == [Outcome.DROPPED] * 2


def test_a_group_without_layers_here_takes_no_file(bench: Bench) -> None:
    both = (Part(0, 0), Part(1, 1))
    bench.say(bench.opening, WriteOrder(1, key_of(1), both, FACTS, 0))
    assert bench.hear(1) == [Outcome.DONE]
    assert bench.results[1].sizes == (FILE, 0)
    bench.say(read(2, *both))
    assert bench.hear(2) == [Outcome.DONE]


@pytest.mark.parametrize("part", [Part(7, 0), Part(0, 64)])
def test_a_part_that_cannot_be_is_a_failure(bench: Bench, part: Part) -> None:
    bench.say(bench.opening, read(1, part), WriteOrder(2, key_of(1), (part,), FACTS, 0))
    assert bench.hear(1, 2) == [Outcome.FAILED] * 2


def test_a_namespace_that_cannot_be_does_not_end_the_thread(bench: Bench) -> None:
    bench.say(OpenFolder("/nowhere", "NO/SUCH", False), read(1))
    assert bench.hear(1) == [Outcome.DROPPED]
    bench.say(bench.opening, bench.opening, write(2, 0))
    assert bench.hear(2) == [Outcome.DONE]


def test_what_was_read_before_the_part_that_is_missing_is_said(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (PART, PART))
    bench.say(bench.opening, write(1, 0), read(2, Part(0, 0), Part(1, 1)))
    bench.hear(1, 2)
    bench.say(read(3, Part(0, 0), Part(1, 1)))
    assert bench.hear(3) == [Outcome.MISSING]
    assert bench.results[3].sizes == (FILE,)
    assert bench.executor.close(30)
    bench.agent.close()


def test_reads_behind_hung_ones_are_dropped_when_called_off_or_late(bench: Bench) -> None:
    bench.say(bench.opening)
    bench.files.flow.clear()
    bench.say(*(read(i) for i in range(READERS)))
    for _ in range(READERS):
        assert bench.files.waiting.acquire(timeout=30)
    bench.say(read(10), read(11, patience=5.0), CancelReads((10,)))
    assert bench.hear(10) == [Outcome.DROPPED]
    assert 11 not in bench.results
    bench.now = 6.0
    assert bench.hear(11) == [Outcome.DROPPED]
    bench.files.flow.set()
    assert bench.hear(*range(READERS)) == [Outcome.MISSING] * READERS


def test_who_waits_for_reads_is_told_when_the_last_is_answered(bench: Bench) -> None:
    bench.say(bench.opening)
    bench.files.flow.clear()
    bench.say(*(read(i) for i in range(READERS)))
    for _ in range(READERS):
        assert bench.files.waiting.acquire(timeout=30)
    bench.say(read(10), CancelReads((10,)))
    assert bench.hear(10) == [Outcome.DROPPED]
    assert bench.executor.is_reading
    assert not bench.reads_over.is_set()
    bench.files.flow.set()
    assert bench.reads_over.wait(30)
    assert not bench.executor.is_reading
    bench.reads_over.clear()
    bench.say(write(20, 0), read(21))
    assert bench.hear(20, 21)[0] is Outcome.DONE
    assert bench.reads_over.wait(30)


def test_its_threads_run_where_they_are_told_to(bench: Bench) -> None:
    bench.say(bench.opening, read(1), write(2, 0))
    bench.hear(1, 2)
    heard, *others = [thread.native_id for thread in bench.executor._threads]
    assert heard is not None
    assert os.sched_getaffinity(heard) == {bench.cpu}
    served = [os.sched_getaffinity(number or 0) for number in others]
    assert {bench.cpu} in served


def test_an_exception_is_an_answer(bench: Bench) -> None:
    bench.say(bench.opening)
    bench.executor._slot = lambda slot, nbytes: 1 / 0  # type: ignore[assignment, return-value]
    bench.say(read(1), write(2, 0))
    assert bench.hear(1, 2) == [Outcome.FAILED] * 2
    assert bench.results[1].reason == "ZeroDivisionError"
    assert all(thread.is_alive() for thread in bench.executor._threads)


def test_answers_that_could_not_be_sent_are_sent_later_in_order(bench: Bench) -> None:
    sockets, refused = bench.executor._sockets, []
    real = sockets.send
    sockets.send = lambda report: bool(refused.append(report))  # type: ignore[method-assign, func-returns-value]
    bench.say(read(1), read(2), read(3))
    while len(bench.executor._unsent) < 3:
        bench.agent.wait(0.05)
    sockets.send = real  # type: ignore[method-assign]
    bench.hear(1, 2, 3)
    assert list(bench.results) == [1, 2, 3]


def test_what_has_not_begun_is_dropped_at_the_end(bench: Bench) -> None:
    bench.say(bench.opening)
    bench.files.flow.clear()
    bench.say(*(read(i) for i in range(READERS)))
    for _ in range(READERS):
        assert bench.files.waiting.acquire(timeout=30)
    bench.say(read(10))
    while not bench.executor._reads:
        bench.agent.wait(0.05)
    assert not bench.executor.close(0.1)
    assert bench.hear(10) == [Outcome.DROPPED]
