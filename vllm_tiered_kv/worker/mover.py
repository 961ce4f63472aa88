# SPDX-License-Identifier: Apache-2.0
"""Runs copy jobs on threads of its own: the engine's thread only leaves work here.

Loads and stores have a lane each, so a load never waits behind stores. A lane cuts its jobs
into pieces of bounded size; several threads may work on one job. What a job's end means is
decided once, when its last piece is done and nothing writes any more.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm_tiered_kv.protocol import BlockCopy, Direction, JobResult, JobStatus

PIECE_BYTES = 8 << 20
"""A device's piece: large enough to be efficient, small enough not to hold the copy engines."""
HOST_PIECE_BYTES = 64 << 20
"""In host memory a piece is one call without the GIL: the fewer, the less often a thread waits
for a main thread that spins."""
WORTH_SHARING = 4 << 20
"""Below this a job's bytes are not divided over a lane's threads."""
LOOKS = 8
"""Pieces at least of a job that may be given up on the way, where they are worth sharing: it can
be looked at only before each."""
EARLY = 1 / 3
"""Of the time in which a job is not late, after which its pace is believed."""
COPY_TIMEOUT = 60.0
"""Seconds after which a device copy counts as hung."""
IDLE_SECONDS = 5.0

CopyPiece = Callable[[Direction, Sequence[BlockCopy], Any], int]
"""Copies some blocks and returns the bytes moved; raises on failure."""


class Counts(enum.Enum):
    """What of a job is of use if the rest of it is not copied."""

    HEAD = "head"  # all before the first copy that is missing
    WHOLE = "whole"  # nothing


class CopyJob:
    """A job in a lane. Fields are guarded by the lane's lock."""

    __slots__ = (
        "after",
        "begun",
        "copies",
        "counts",
        "failed",
        "give_up_at",
        "is_late",
        "job",
        "nbytes",
        "pending",
        "queued_at",
        "sizes",
        "started",
        "total",
        "verdict",
        "worth",
    )

    def __init__(
        self,
        job: int,
        copies: Sequence[BlockCopy],
        sizes: Sequence[int],
        after: Any,
        give_up_at: float | None,
        worth: float | None = None,
        counts: Counts = Counts.WHOLE,
    ) -> None:
        self.job = job
        self.copies = copies
        self.sizes = sizes
        """Bytes of each copy."""
        self.after = after
        self.give_up_at = give_up_at
        """When it is late: then it does not begin, and perhaps does not go on."""
        self.worth = worth
        """Seconds that doing without all of it takes; None: what has begun is finished."""
        self.counts = counts
        self.total = sum(sizes)
        self.begun = 0
        """Bytes of the pieces that have begun."""
        self.is_late = False
        """Its rest was given up."""
        self.pending = 0
        """Pieces not yet ended."""
        self.queued_at = 0.0
        self.failed: set[int] = set()
        self.nbytes = 0
        self.started: float | None = None
        self.verdict: JobStatus | None = None
        """Set early when the job must not end well: fenced, cancelled, not begun in time."""

    def is_too_slow(self, now: float) -> bool:
        """Whether doing without what has not begun is faster, by how it went until now."""
        if self.worth is None or self.started is None or not self.begun or self.give_up_at is None:
            return False
        early = self.queued_at + EARLY * (self.give_up_at - self.queued_at)
        left = self.total - self.begun
        rest = (now - self.started) * left / self.begun
        if now < early or now + rest <= self.give_up_at:
            return False
        return rest > (self.worth * left / self.total if self.counts is Counts.HEAD else self.worth)

    def is_overdue(self, now: float) -> bool:
        """Whether it was to begin earlier, and nothing of it has."""
        return self.started is None and self.give_up_at is not None and now > self.give_up_at


class Lane:
    """One direction: a queue of pieces, threads that copy them, and a way to call jobs off.

    Args:
        direction: which way this lane copies.
        copy: copies one piece.
        on_end: told each job's result once; on a lane thread, never under the lane's lock.
        threads: how many pieces may be copied at once.
        piece_bytes: the most bytes of a piece of more than one copy.
        cpus: processors the threads may use; empty: those of the process.
        nice: how much the threads stand back behind others that want to run.
    """

    def __init__(
        self,
        direction: Direction,
        copy: CopyPiece,
        on_end: Callable[[JobResult], None],
        threads: int = 1,
        piece_bytes: int = PIECE_BYTES,
        cpus: Iterable[int] = (),
        nice: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._direction = direction
        self._piece_bytes = piece_bytes
        self._cpus = frozenset(cpus)
        self._nice = nice
        self._copy = copy
        self._on_end = on_end
        self._clock = clock
        self._wake = threading.Condition()
        self._queue: deque[tuple[CopyJob, tuple[int, ...]]] = deque()
        self._jobs: dict[int, CopyJob] = {}
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"tiered-kv-{direction.value}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, jobs: Iterable[CopyJob]) -> None:
        """Queue jobs; returns at once. A closed lane drops them."""
        dropped: list[JobResult] = []
        with self._wake:
            for job in jobs:
                if self._closing:
                    job.verdict = JobStatus.DROPPED
                    dropped.append(self._result(job))
                    continue
                self._jobs[job.job] = job
                job.queued_at = self._clock()
                pieces = list(self._pieces(job)) or [()]
                job.pending = len(pieces)
                self._queue.extend((job, piece) for piece in pieces)
            self._wake.notify_all()
        for result in dropped:
            self._on_end(result)

    def call_off(self, jobs: Iterable[int], verdict: JobStatus) -> None:
        """Let these jobs end with ``verdict``, whatever they have copied. Does not wait.

        Pieces not begun are skipped. A piece that is being copied runs on, and what it wrote
        is not trusted; the job ends when it does. Unknown jobs have ended already.
        """
        with self._wake:
            for number in jobs:
                job = self._jobs.get(number)
                if job is not None and job.verdict is None:
                    job.verdict = verdict

    def drop_overdue(self) -> None:
        """End jobs that are late and that no thread has come to: the threads may hang."""
        with self._wake:
            now = self._clock()
            overdue = [job for job in self._jobs.values() if job.is_overdue(now)]
            if not overdue:
                return
            for job in overdue:
                self._miss(job)
                del self._jobs[job.job]
            self._queue = deque(each for each in self._queue if each[0].job in self._jobs)
            results = [self._result(job) for job in overdue]
        for result in results:
            self._on_end(result)

    @property
    def in_flight(self) -> int:
        with self._wake:
            return len(self._jobs)

    def close(self, timeout: float) -> bool:
        """Call everything off and end the threads; False if one did not end in time."""
        with self._wake:
            self._closing = True
            for job in self._jobs.values():
                job.verdict = job.verdict or JobStatus.DROPPED
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # not allowed, or a processor went: run as we are
            if self._nice:
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
            if self._cpus:
                os.sched_setaffinity(0, self._cpus)
        while True:
            with self._wake:
                while not self._queue and not self._closing:
                    self._wake.wait(IDLE_SECONDS)
                if not self._queue:
                    return
                job, piece = self._queue.popleft()
                skip = self._begin(job, piece)
            self._work(job, piece, skip)

    def _work(self, job: CopyJob, piece: tuple[int, ...], skip: bool) -> None:
        """Copy a piece that has begun, or pass it by; end the job with its last one."""
        moved, failed, broke = 0, skip, False
        if not skip and piece:
            try:
                copies = [job.copies[i] for i in piece]
                moved = self._copy(self._direction, copies, job.after)
            except Exception:  # noqa: BLE001 - a lane never dies: the job fails
                failed = broke = True
        with self._wake:
            job.nbytes += moved
            job.is_late = job.is_late and not broke
            if failed:
                job.failed.update(piece)
            job.pending -= 1
            if job.pending:
                return
            self._jobs.pop(job.job, None)
            result = self._result(job)
        self._on_end(result)

    def _begin(self, job: CopyJob, piece: Sequence[int]) -> bool:
        """Note that a piece of the job begins; True if it is to be skipped."""
        now = self._clock()
        if job.is_overdue(now):
            self._miss(job)
        if job.started is None:
            job.started = now
        if job.verdict is not None or job.failed:
            return True
        if job.is_too_slow(now):
            job.is_late = True
            return True
        job.begun += sum(job.sizes[i] for i in piece)
        return False

    @staticmethod
    def _miss(job: CopyJob) -> None:
        """A job does not begin any more; it took as long as it was queued."""
        job.started = job.queued_at
        job.verdict = job.verdict or JobStatus.DROPPED

    def _result(self, job: CopyJob) -> JobResult:
        status = JobStatus.DONE
        if job.failed:
            status = JobStatus.LATE if job.is_late else JobStatus.FAILED
        status = job.verdict or status
        seconds = 0.0 if job.started is None else self._clock() - job.started
        return JobResult(
            job.job, self._direction, status, tuple(sorted(job.failed)), job.nbytes, seconds
        )

    def _pieces(self, job: CopyJob) -> Iterable[tuple[int, ...]]:
        """Cut a job's copies into runs: bounded, as many for each thread, the longer ones first.

        Else one thread has more to do than the others, and the job ends when it does.
        """
        sizes, total, limit = job.sizes, job.total, self._piece_bytes
        if job.worth is not None:
            limit = min(limit, max(WORTH_SHARING, -(-total // LOOKS)))
        count = -(-total // limit)
        if total >= WORTH_SHARING:
            count += -count % len(self._threads)
        run: list[int] = []
        filled, left = 0, total
        for i, size in enumerate(sizes):
            if run and (filled * count >= left or filled + size > self._piece_bytes):
                yield tuple(run)
                left -= filled
                count = max(1, count - 1)
                run, filled = [], 0
            run.append(i)
            filled += size
        if run:
            yield tuple(run)
