# SPDX-License-Identifier: Apache-2.0
"""Lanes: every job ends once, and ends as it should."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.protocol import BlockCopy, Direction, JobResult, JobStatus
from vllm_tiered_kv.worker.mover import (
    HOST_PIECE_BYTES,
    PIECE_BYTES,
    WORTH_SHARING,
    CopyJob,
    Counts,
    Lane,
)

COPY = BlockCopy(0, 0, 0, (1,))


class Bench:
    """A lane with a copy function that can be held and made to fail."""

    def __init__(self, threads: int = 1) -> None:
        self.results: list[JobResult] = []
        self.ended = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.fail_slots: set[int] = set()
        self.copied: list[int] = []
        self.now = 0.0
        self.takes = 0.0
        """Seconds of each piece."""
        self.lock = threading.Lock()
        self.lane = Lane(
            Direction.LOAD, self._copy, self._end, threads, PIECE_BYTES, clock=lambda: self.now
        )

    def _copy(self, direction: Direction, copies: Sequence[BlockCopy], after: object) -> int:
        self.entered.release()
        assert self.go.wait(10)
        if any(c.slot in self.fail_slots for c in copies):
            raise OSError("no")
        with self.lock:
            self.now += self.takes
        self.copied.extend(c.slot for c in copies)
        return 10 * len(copies)

    def _end(self, result: JobResult) -> None:
        self.results.append(result)
        self.ended.release()

    def job(
        self,
        number: int,
        slots: Sequence[int] = (0,),
        size: int = 1,
        give_up: float = 99.0,
        **options: Any,
    ):
        copies = [BlockCopy(0, slot, 0, (1,)) for slot in slots]
        return CopyJob(number, copies, [size] * len(copies), None, give_up, **options)

    def wait(self, count: int = 1) -> list[JobResult]:
        for _ in range(count):
            assert self.ended.acquire(timeout=10)
        return self.results


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def bench(request: pytest.FixtureRequest):
    bench = Bench(request.param)
    yield bench
    bench.go.set()
    assert bench.lane.close(10)


def test_a_job_ends_once_when_its_last_piece_is_copied(bench: Bench) -> None:
    bench.lane.submit([bench.job(1, range(5), size=PIECE_BYTES)])
    (result,) = bench.wait()
    assert result.status is JobStatus.DONE
    assert result.nbytes == 50
    assert sorted(bench.copied) == [0, 1, 2, 3, 4]
    assert bench.lane.in_flight == 0


def test_small_copies_share_a_piece(bench: Bench) -> None:
    bench.lane.submit([bench.job(1, range(20), size=PIECE_BYTES // 10)])
    bench.wait()
    calls = 0
    while bench.entered.acquire(blocking=False):
        calls += 1
    assert calls == 2


def test_a_failed_piece_fails_the_job_and_names_its_copies(bench: Bench) -> None:
    bench.fail_slots = {1}
    bench.lane.submit([bench.job(1, [0, 1, 2], size=PIECE_BYTES), bench.job(2, [7])])
    results = {r.job: r for r in bench.wait(2)}
    assert results[1].status is JobStatus.FAILED
    assert 1 in results[1].failed
    assert results[2].status is JobStatus.DONE


def test_a_job_called_off_before_its_copy_begins_copies_nothing(bench: Bench) -> None:
    bench.go.clear()
    bench.lane.submit([bench.job(1), bench.job(2)])
    assert bench.entered.acquire(timeout=10)
    bench.lane.submit([bench.job(3, [33])])
    bench.lane.call_off([3], JobStatus.DROPPED)
    bench.go.set()
    results = {r.job: r for r in bench.wait(3)}
    assert results[3].status is JobStatus.DROPPED
    assert 33 not in bench.copied


def test_a_job_called_off_while_it_is_copied_ends_after_the_copy_and_is_not_trusted(
    bench: Bench,
) -> None:
    bench.go.clear()
    bench.lane.submit([bench.job(1)])
    assert bench.entered.acquire(timeout=10)
    bench.lane.call_off([1], JobStatus.DROPPED)
    assert bench.results == []  # it still reads and writes
    bench.go.set()
    (result,) = bench.wait()
    assert result.status is JobStatus.DROPPED


def test_a_job_that_waited_too_long_is_given_up(bench: Bench) -> None:
    bench.now = 5.0
    bench.lane.submit([bench.job(1, give_up=4.0), bench.job(2, give_up=6.0)])
    results = {r.job: r.status for r in bench.wait(2)}
    assert results == {1: JobStatus.DROPPED, 2: JobStatus.DONE}


def test_the_rest_of_a_load_that_is_too_slow_is_given_up(bench: Bench) -> None:
    """Six pieces of a second each, where computing all of it takes one."""
    bench.takes = 1.0
    job = bench.job(1, range(6), size=PIECE_BYTES, give_up=2.5, worth=1.0, counts=Counts.HEAD)
    bench.lane.submit([job])
    (result,) = bench.wait()
    assert result.status is JobStatus.LATE
    assert result.failed
    assert sorted([*bench.copied, *result.failed]) == list(range(6))
    assert result.nbytes == 10 * len(bench.copied)


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"worth": 4.0, "counts": Counts.HEAD}, 5),  # 5 s for what is computed in 3.3
        ({"worth": 4.0, "counts": Counts.WHOLE}, 5),
        ({"worth": 5.5, "counts": Counts.HEAD}, 5),
        ({"worth": 5.5, "counts": Counts.WHOLE}, 0),  # 5 s where all would be computed again
        ({"worth": 4.0, "counts": Counts.HEAD, "give_up": 4.5}, 4),  # in the first second it may
        ({"worth": 4.0, "counts": Counts.HEAD, "give_up": 6.5}, 0),  # it will not be late
        ({"worth": None, "counts": Counts.HEAD}, 0),
        ({"worth": 1.0, "counts": Counts.HEAD, "give_up": 99.0}, 0),
    ],
)
def test_what_will_soon_be_there_is_waited_for(options: dict[str, Any], left: int) -> None:
    bench = Bench()
    bench.takes = 1.0
    bench.lane.submit([bench.job(1, range(6), PIECE_BYTES, **{"give_up": 2.5, **options})])
    (result,) = bench.wait()
    assert result.status is (JobStatus.LATE if left else JobStatus.DONE)
    assert result.failed == tuple(range(6 - left, 6))
    assert bench.lane.close(10)


def test_a_late_load_is_not_reported_while_a_piece_is_copied() -> None:
    bench = Bench()
    ended: list[JobResult] = []
    lane = Lane(Direction.LOAD, bench._copy, ended.append, 0, 1, clock=lambda: bench.now)
    job = bench.job(1, range(3), size=2, give_up=1.0, worth=0.5, counts=Counts.HEAD)
    lane.submit([job])
    first, second, third = (0,), (1,), (2,)
    assert lane._begin(job, first) is False
    bench.now = 2.0
    assert lane._begin(job, second) is True
    lane._work(job, second, True)
    lane._work(job, third, lane._begin(job, third))
    assert not ended
    bench.fail_slots = {0}
    lane._work(job, first, False)
    (result,) = ended
    assert result.status is JobStatus.FAILED  # and so not late: its chunks are not to be trusted
    assert result.failed == (0, 1, 2)


def test_calling_off_what_has_ended_does_nothing(bench: Bench) -> None:
    bench.lane.submit([bench.job(1)])
    bench.wait()
    bench.lane.call_off([1, 77], JobStatus.FAILED)
    assert [r.status for r in bench.results] == [JobStatus.DONE]


def test_closing_ends_every_job_and_takes_no_more() -> None:
    bench = Bench()
    bench.go.clear()
    bench.lane.submit([bench.job(1), bench.job(2)])
    assert bench.entered.acquire(timeout=10)
    threading.Timer(0.05, bench.go.set).start()
    assert bench.lane.close(10)
    bench.lane.submit([bench.job(3)])
    results = {r.job: r.status for r in bench.wait(3)}
    assert set(results.values()) == {JobStatus.DROPPED}
    assert set(results) == {1, 2, 3}


def test_a_copy_that_hangs_is_told() -> None:
    bench = Bench()
    bench.go.clear()
    bench.lane.submit([bench.job(1)])
    assert bench.entered.acquire(timeout=10)
    assert bench.lane.close(0.01) is False
    bench.go.set()
    bench.wait()


def test_what_no_thread_comes_to_is_given_up_at_its_deadline(bench: Bench) -> None:
    """The threads hang in other copies: those must be waited for, and no others."""
    bench.go.clear()
    threads = len(bench.lane._threads)
    bench.lane.submit([bench.job(i) for i in range(threads)])
    for _ in range(threads):
        assert bench.entered.acquire(timeout=10)
    bench.lane.submit([bench.job(7, [7, 8], size=PIECE_BYTES, give_up=4.0), bench.job(9, [9])])
    bench.now = 3.0
    bench.lane.drop_overdue()
    assert bench.results == []
    bench.now = 5.0
    bench.lane.drop_overdue()
    (result,) = bench.wait()
    assert (result.job, result.status, result.seconds) == (7, JobStatus.DROPPED, 5.0)
    bench.go.set()
    bench.wait(threads + 1)
    assert 7 not in bench.copied
    assert 8 not in bench.copied
    assert 9 in bench.copied


@pytest.mark.parametrize(("worth", "pieces"), [(None, 2), (1.0, 8)])
def test_a_load_that_may_be_given_up_is_looked_at_on_the_way(
    worth: float | None, pieces: int
) -> None:
    bench = Bench(threads=2)
    lane = Lane(
        Direction.LOAD, bench._copy, bench._end, 2, HOST_PIECE_BYTES, clock=lambda: bench.now
    )
    lane.submit([bench.job(1, range(100), size=1 << 20, worth=worth)])
    bench.wait()
    calls = 0
    while bench.entered.acquire(blocking=False):
        calls += 1
    assert calls == pieces
    assert lane.close(10)
    assert bench.lane.close(10)


@given(
    count=st.integers(1, 200),
    size=st.sampled_from([1 << 10, 300_000, 1 << 20, 5 << 20, PIECE_BYTES, 3 * PIECE_BYTES]),
    threads=st.integers(1, 4),
    worth=st.sampled_from([None, 1.0]),
)
def test_a_job_takes_no_longer_for_being_cut(
    count: int, size: int, threads: int, worth: float | None
) -> None:
    """In pieces it ends when it would if each copy were one, but for one copy."""
    lane = Lane(Direction.LOAD, lambda *_: 0, lambda _: None, threads)
    assert lane.close(10)
    job = CopyJob(1, [], [size] * count, None, None, worth)
    pieces = list(lane._pieces(job))
    assert [i for piece in pieces for i in piece] == list(range(count))
    assert all(len(piece) == 1 or len(piece) * size <= PIECE_BYTES for piece in pieces)
    busy_until = [0] * threads
    for piece in pieces:
        first = busy_until.index(min(busy_until))
        busy_until[first] += len(piece)
    if count * size >= WORTH_SHARING:
        assert max(busy_until) <= -(-count // threads) + 1
