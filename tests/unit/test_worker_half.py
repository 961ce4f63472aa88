# SPDX-License-Identifier: Apache-2.0
"""One rank alone: plans in, bytes moved, reports out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vllm_tiered_kv.geometry import GroupGeometry, GroupKind
from vllm_tiered_kv.protocol import (
    BlockCopy,
    Direction,
    JobResult,
    JobStatus,
    LoadJob,
    Setup,
    StepPlan,
    StoreJob,
)
from vllm_tiered_kv.worker import cpus
from vllm_tiered_kv.worker import half as module
from vllm_tiered_kv.worker.copy import open_copier
from vllm_tiered_kv.worker.half import LoadOutcome, WorkerHalf

BLOCKS, TOKENS, LAYERS = 8, 16, 2
SETUP = Setup("", b"", 4, 2 * TOKENS)


class Rank:
    """A worker half over two layers, with a gate before its copies."""

    def __init__(self, *, report_blocks: bool = True) -> None:
        self.pages = {
            f"layer{i}": torch.randint(0, 255, (BLOCKS, 1, TOKENS, 8), dtype=torch.uint8)
            for i in range(LAYERS)
        }
        groups = [GroupGeometry(GroupKind.FULL, TOKENS, 0)]
        self.half = WorkerHalf(3, [tuple(self.pages)], BLOCKS, groups, report_blocks=report_blocks)
        self.half.register(self.pages)
        self.go = threading.Event()
        self.go.set()
        self.entered = threading.Event()
        self.bad = False
        self.half._open_copier = self._open

    def _open(self, groups: Any, pool: Any) -> Any:
        inner = open_copier(groups, pool)
        rank = self

        class Gated:
            mark, close = inner.mark, inner.close

            def submit(self, *args: Any) -> Any:
                rank.entered.set()
                assert rank.go.wait(20)
                if rank.bad:
                    raise OSError("no")
                return inner.submit(*args)

        return Gated()

    def step(self, **plan: Any) -> tuple[LoadOutcome, list[JobResult]]:
        """One step in vLLM's order."""
        full = StepPlan(SETUP, **plan)
        self.half.before_step(full)
        self.half.mark()
        self.half.start_loads(full)
        self.half.start_stores(full)
        outcome = self.half.take_loads(idle=full.idle)
        report = self.half.take_report()
        return outcome, list(report.results) if report else []

    def until(self, done: Callable[[LoadOutcome, list[JobResult]], bool], **plan: Any) -> Any:
        total = LoadOutcome()
        results: list[JobResult] = []
        deadline = time.monotonic() + 20
        while True:
            outcome, more = self.step(**plan)
            total.finished |= outcome.finished
            total.failed |= outcome.failed
            total.bad_blocks |= outcome.bad_blocks
            results += more
            plan = {"idle": True}
            if done(total, results):
                return total, results
            assert time.monotonic() < deadline

    def store(self, job: int = 1, slot: int = 1, blocks: tuple[int, ...] = (2, 5)) -> Any:
        stores = (StoreJob(job, (BlockCopy(0, slot, 0, blocks),)),)
        return self.until(lambda _, results: bool(results), stores=stores)

    def load_job(self, blocks: tuple[int, ...], *, job: int = 9, first: int = 0) -> LoadJob:
        return LoadJob(job, "req", (BlockCopy(0, 1, first, blocks),), 30.0)

    def block(self, i: int) -> bytes:
        return b"".join(bytes(t[i].flatten().tolist()) for t in self.pages.values())


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.go.set()
    rank.half.shutdown()


def test_what_is_stored_is_what_is_loaded(rank: Rank) -> None:
    _, (stored,) = rank.store()
    assert (stored.job, stored.direction, stored.status) == (1, Direction.STORE, JobStatus.DONE)
    assert stored.nbytes == 2 * LAYERS * TOKENS * 8
    want, others = [rank.block(2), rank.block(5)], [rank.block(i) for i in (1, 2, 3, 5, 7)]
    outcome, results = rank.until(
        lambda o, r: bool(o.finished and r), loads=(rank.load_job((0, 6)),)
    )
    assert outcome.finished == {"req"}
    assert not outcome.failed
    assert not outcome.bad_blocks
    assert [r.status for r in results] == [JobStatus.DONE]
    assert [rank.block(0), rank.block(6)] == want
    assert [rank.block(i) for i in (1, 2, 3, 5, 7)] == others


def test_a_load_may_take_the_second_block_of_a_chunk_alone(rank: Rank) -> None:
    rank.store()
    want = rank.block(5)
    rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0,), first=1),))
    assert rank.block(0) == want


def test_a_loads_result_travels_in_the_step_that_tells_vllm(rank: Rank) -> None:
    rank.store()
    plan: dict[str, Any] = {"loads": (rank.load_job((0, 6)),)}
    for _ in range(1000):
        outcome, results = rank.step(**plan)
        assert bool(outcome.finished) == bool(results)
        if results:
            return
        plan = {"idle": True}
    raise AssertionError("the load did not end")


def test_a_step_without_work_waits_but_not_for_what_has_ended(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.store()
    rank.go.clear()
    rank.entered.clear()
    rank.step(loads=(rank.load_job((0, 6)),))
    assert rank.entered.wait(20)
    waits: list[float] = []
    monkeypatch.setattr(rank.half._copy_ended, "wait", waits.append)
    rank.step(idle=True)
    assert waits == [module.IDLE_WAIT]
    rank.half._wake_idle()  # a peer's read ends between two steps
    rank.step(idle=True)
    assert len(waits) == 1
    rank.step(idle=True)
    assert len(waits) == 2


def test_a_fenced_store_is_dropped_and_the_step_does_not_wait_for_it(rank: Rank) -> None:
    rank.go.clear()
    rank.step(stores=(StoreJob(1, (BlockCopy(0, 0, 0, (2, 5)),)),))
    assert rank.entered.wait(20)
    rank.step(fences=(1,))  # returns though the copy is under way
    rank.go.set()
    _, results = rank.until(lambda _, r: bool(r))
    assert [r.status for r in results] == [JobStatus.DROPPED]


def test_a_cancelled_load_fails_as_a_whole(rank: Rank) -> None:
    rank.store()
    rank.go.clear()
    rank.entered.clear()
    rank.step(loads=(rank.load_job((0, 6)),))
    assert rank.entered.wait(20)
    outcome, _ = rank.step(cancels=(9,), idle=True)
    assert not outcome.finished  # something may still write to its blocks
    rank.go.set()
    outcome, results = rank.until(lambda o, _: bool(o.finished))
    assert outcome.failed == {"req"}
    assert [r.status for r in results] == [JobStatus.DROPPED]


@pytest.mark.parametrize("report_blocks", [True, False])
def test_a_failed_load_names_its_blocks_where_vllm_can_tell_them_apart(
    report_blocks: bool,
) -> None:
    rank = Rank(report_blocks=report_blocks)
    rank.store()
    rank.bad = True
    outcome, results = rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0, 6)),))
    assert outcome.finished == {"req"}
    assert outcome.bad_blocks == ({0, 6} if report_blocks else set())
    assert outcome.failed == (set() if report_blocks else {"req"})
    assert results[-1].failed == (0,)
    rank.half.shutdown()


def test_success_held_back_is_reported_again_as_failure(rank: Rank) -> None:
    outcome, _ = rank.step(refail=("req",))
    assert outcome.finished == outcome.failed == {"req"}
    outcome, _ = rank.step()
    assert not outcome.finished


def test_a_load_without_copies_fails(rank: Rank) -> None:
    outcome, results = rank.until(
        lambda o, _: bool(o.finished), loads=(LoadJob(4, "req", (), 1.0),)
    )
    assert outcome.failed == {"req"}
    assert results[0].status is JobStatus.DROPPED


def test_blocks_outside_the_cache_are_a_failure_and_touch_nothing(rank: Rank) -> None:
    before = [rank.block(i) for i in range(BLOCKS)]
    outcome, _ = rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0, BLOCKS + 3)),))
    assert outcome.bad_blocks
    assert [rank.block(i) for i in range(BLOCKS)] == before


def test_stores_a_runner_never_came_to_start_with_the_next_step(rank: Rank) -> None:
    stores = tuple(StoreJob(i, (BlockCopy(0, i, 0, (i, i + 4)),)) for i in (1, 2))
    first = StepPlan(SETUP, stores=stores)
    rank.half.before_step(first)
    rank.half.before_step(first)  # a runner that says it twice
    rank.half.start_loads(first)
    assert rank.half.take_report() is None
    want = rank.block(1)
    _, results = rank.until(lambda _, r: len(r) == 2, fences=(2,))
    assert {r.job: r.status for r in results} == {1: JobStatus.DONE, 2: JobStatus.DROPPED}
    assert bytes(rank.half._pool.tensor[rank.half._slot_bytes :][: len(want)].tolist()) == want


def test_a_load_that_hangs_is_not_reported_before_it_ends(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.store()
    waits = []

    class Slow:
        def wait(self, timeout: float) -> bool:
            waits.append(timeout)
            return len(waits) > 3

    class Device:
        def mark(self) -> None: ...
        def close(self) -> None: ...
        def submit(self, *_: object) -> Slow:
            return Slow()

    monkeypatch.setattr(rank.half, "_copier", Device())
    outcome, results = rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0, 6)),))
    assert len(waits) > 3
    assert not outcome.failed
    assert results[-1].status is JobStatus.DONE


def test_a_changed_plan_of_the_same_set_up_opens_nothing_twice(rank: Rank) -> None:
    rank.step()
    pool = rank.half._pool
    rank.step()
    assert rank.half._pool is pool


def test_copies_may_use_every_processor_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {0: {0}, os.getppid(): {0, 1}}
    monkeypatch.setattr(cpus.os, "sched_getaffinity", masks.__getitem__)
    assert cpus.copy_cpus() == {0, 1}
    masks[0] = {0, 1}
    assert cpus.copy_cpus() == cpus.NO_CPUS

    def denied(_: int) -> set[int]:
        raise PermissionError

    monkeypatch.setattr(cpus.os, "sched_getaffinity", denied)
    assert cpus.copy_cpus() == cpus.NO_CPUS


def test_no_pool_means_no_tier_and_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise module.PoolError("no memory")

    monkeypatch.setattr(module, "HostPool", refused)
    rank = Rank()
    _, results = rank.store()
    assert [r.status for r in results] == [JobStatus.DROPPED]
    outcome, _ = rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0, 6)),))
    assert outcome.failed == {"req"}
    rank.half.shutdown()
