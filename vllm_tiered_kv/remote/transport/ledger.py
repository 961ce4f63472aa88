# SPDX-License-Identifier: Apache-2.0
"""Jobs, their pieces, and what may still be written: a state machine without clocks or I/O.

A job ends once: all pieces done, one failed, its deadline passed, or it was called off. It then
begins no more pieces. Those under way, and those whose end NIXL left open, keep its memory in
quarantine: until each has ended for certain, or the agent that runs it is gone.

    add, planned ---> queued --begin--> under way --ended (the last)--> DONE
                        | give_up           | give_up, or a piece failed
                        v                   v
                  GIVEN_UP, free    GIVEN_UP or FAILED, free
                                            or, while pieces are left,
                                    in quarantine --ended, agent_gone--> settled
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from vllm_tiered_kv.remote.transport import Memory, Outcome, Read, ReadResult
from vllm_tiered_kv.remote.transport.pieces import Piece


class Failure(msgspec.Struct, frozen=True):
    """Why a piece ended badly."""

    kind: str
    reason: str
    certain: bool = True
    """Whether nothing of the piece can land any more."""


class Ticket(NamedTuple):
    """A piece under way."""

    number: int
    job: int
    peer: str
    agent: int
    """The agent that runs it."""
    piece: Piece


class Job:
    """One job. Only the ledger writes to it."""

    __slots__ = (
        "after",
        "begun",
        "deadline",
        "failure",
        "job",
        "lost",
        "nbytes",
        "peer",
        "quarantined_at",
        "queue",
        "read",
        "started",
        "under_way",
    )

    def __init__(self, read: Read, started: float) -> None:
        self.job = read.job
        self.peer = read.peer
        self.deadline = read.deadline
        self.after = read.after
        self.started = started
        self.read: Read | None = read
        """Until it has been cut into pieces."""
        self.queue: deque[Piece] = deque()
        self.nbytes = 0
        self.begun = False
        self.under_way: dict[int, int] = {}
        """Ticket to agent."""
        self.lost: set[int] = set()
        """Agents that may still run pieces which ended, but not for certain."""
        self.failure: Failure | None = None
        self.quarantined_at = math.inf

    @property
    def holds_memory(self) -> bool:
        return bool(self.under_way or self.lost)


MayBegin = Callable[[Job], "int | None"]
"""The agent that a job's next piece would run on; None if it has to wait."""


class Ledger:
    """All jobs of a transport. Not locked: its owner sees to that.

    Args:
        max_jobs: jobs that have not ended.
    """

    def __init__(self, max_jobs: int) -> None:
        self._max_jobs = max_jobs
        self._running: dict[int, Job] = {}
        self._quarantine: dict[int, Job] = {}
        self._unplanned: deque[Job] = deque()
        self._queues: dict[str, deque[Job]] = {}
        """By peer, jobs with pieces that have not begun; the peers take turns."""
        self._tickets = 0
        self._results: list[ReadResult] = []
        self._settled: list[int] = []
        self.news = 0
        """How often there was something to take."""

    # -- jobs ---------------------------------------------------------------------------

    def add(self, read: Read, now: float) -> None:
        """Take a job on; it begins once it is planned."""
        if max(len(self._running), len(self._unplanned)) >= self._max_jobs:
            self.refuse(read.job, Failure("remote_full", f"{self._max_jobs} reads are under way"))
            return
        if read.job in self._running or read.job in self._quarantine:
            # Its number can't tell it from the other one, whose end is still to be reported.
            return
        job = self._running[read.job] = Job(read, now)
        self._unplanned.append(job)

    def next_unplanned(self) -> Job | None:
        """A job to cut into pieces."""
        while self._unplanned:
            job = self._unplanned.popleft()
            if job.job in self._running and job.failure is None:
                return job
        return None

    def planned(self, job: Job, plan: Sequence[Piece] | Failure, now: float) -> None:
        """The job's pieces, at least one, or why it can't be read."""
        job.read = None
        if isinstance(plan, Failure):
            if self._running.get(job.job) is job:
                self._fail(job, plan)
                self._end_if_done(job, now)
            return
        if self._running.get(job.job) is not job or job.failure is not None:
            return
        job.queue.extend(plan)
        job.nbytes = sum(piece.nbytes for piece in plan)
        self._queues.setdefault(job.peer, deque()).append(job)

    def refuse(self, job: int, failure: Failure) -> None:
        """A job that never was: it fails and holds no memory."""
        self._report(ReadResult(job, Outcome.FAILED, kind=failure.kind, reason=failure.reason))

    def begin(self, may_begin: MayBegin) -> Ticket | None:
        """The next piece to post: from now on it counts as under way. None if there is none."""
        for peer in list(self._queues):
            job = self._queues[peer][0]
            agent = may_begin(job)
            if agent is None:
                continue
            queue = self._queues.pop(peer)
            piece = job.queue.popleft()
            if not job.queue:
                queue.popleft()
            if queue:
                self._queues[peer] = queue  # behind the other peers
            job.begun = True
            self._tickets += 1
            job.under_way[self._tickets] = agent
            return Ticket(self._tickets, job.job, job.peer, agent, piece)
        return None

    def ended(self, ticket: Ticket, failure: Failure | None, now: float) -> None:
        """A piece ended. What is no longer known is passed over: its agent is gone."""
        job = self._running.get(ticket.job) or self._quarantine.get(ticket.job)
        if job is None or job.under_way.pop(ticket.number, None) is None:
            return
        if failure is not None and not failure.certain:
            job.lost.add(ticket.agent)
        if job.job in self._quarantine:
            self._settle(job)
            return
        if failure is not None:
            self._fail(job, failure)
        self._end_if_done(job, now)

    def give_up(self, job: int, kind: str, reason: str, now: float) -> None:
        """End a job now; one that ended is passed over."""
        running = self._running.get(job)
        if running is None:
            return
        failure = running.failure
        if failure is None:
            self._fail(running, Failure(kind, reason))
            self._end(running, Outcome.GIVEN_UP, now)
            return
        self._end(running, Outcome.FAILED, now)

    def give_up_late(self, now: float) -> None:
        """End every job whose deadline has passed."""
        late = [job for job in self._running.values() if job.deadline <= now]
        for job in late:
            what = "arrived in time" if job.begun else "began in time"
            self.give_up(job.job, "remote_deadline", f"not all of a read {what}", now)

    def give_up_peer(self, peer: str, kind: str, reason: str, now: float) -> None:
        """End all jobs of a peer now."""
        for job in [job.job for job in self._running.values() if job.peer == peer]:
            self.give_up(job, kind, reason, now)

    def give_up_all(self, kind: str, reason: str, now: float) -> None:
        for job in list(self._running):
            self.give_up(job, kind, reason, now)

    def fail_peer(self, peer: str, failure: Failure, now: float) -> None:
        """Let a peer's jobs begin nothing more; they end when what is under way has ended."""
        for job in [job for job in self._running.values() if job.peer == peer]:
            self._fail(job, failure)
            self._end_if_done(job, now)

    def agent_gone(self, agent: int, failure: Failure, now: float) -> None:
        """An agent was destroyed: nothing of what it ran can land any more."""
        for job in [*self._running.values(), *self._quarantine.values()]:
            stopped = [ticket for ticket, ran in job.under_way.items() if ran == agent]
            for ticket in stopped:
                del job.under_way[ticket]
            job.lost.discard(agent)
            if job.job in self._quarantine:
                self._settle(job)
                continue
            if stopped:
                self._fail(job, failure)
            self._end_if_done(job, now)

    # -- what came of them ----------------------------------------------------------------

    def take_results(self) -> list[ReadResult]:
        results, self._results = self._results, []
        return results

    def take_settled(self) -> list[int]:
        """Jobs whose results have been taken; the others wait."""
        untold = {result.job for result in self._results}
        settled = [job for job in self._settled if job not in untold]
        self._settled = [job for job in self._settled if job in untold]
        return settled

    # -- questions ------------------------------------------------------------------------

    @property
    def has_queued(self) -> bool:
        """Whether there are pieces that have not begun."""
        return bool(self._queues)

    def is_running(self, job: int) -> bool:
        return job in self._running

    @property
    def next_deadline(self) -> float:
        return min((job.deadline for job in self._running.values()), default=math.inf)

    def quarantined_bytes(self) -> int:
        return sum(job.nbytes for job in self._quarantine.values())

    def quarantined_since(self) -> float:
        """When the oldest job in quarantine was put there."""
        return min((job.quarantined_at for job in self._quarantine.values()), default=math.inf)

    def is_stuck(self, peer: str) -> bool:
        """Whether a job of this peer is in quarantine."""
        return any(job.peer == peer for job in self._quarantine.values())

    def runs_on(self, agent: int) -> bool:
        """Whether a job that hasn't ended has a piece under way on this agent."""
        return any(agent in job.under_way.values() for job in self._running.values())

    def is_reading(self, peer: str) -> bool:
        """Whether pieces of this peer are under way, in quarantine or not."""
        jobs = (*self._running.values(), *self._quarantine.values())
        return any(job.peer == peer and job.under_way for job in jobs)

    # -- transitions ------------------------------------------------------------------------

    def _fail(self, job: Job, failure: Failure) -> None:
        job.failure = job.failure or failure
        if not job.queue:
            return
        job.queue.clear()
        queue = self._queues[job.peer]
        queue.remove(job)
        if not queue:
            del self._queues[job.peer]

    def _end_if_done(self, job: Job, now: float) -> None:
        if job.queue or job.under_way or (job.read is not None and job.failure is None):
            return
        self._end(job, Outcome.DONE if job.failure is None else Outcome.FAILED, now)

    def _end(self, job: Job, outcome: Outcome, now: float) -> None:
        del self._running[job.job]
        memory = Memory.FREE
        if job.holds_memory:
            memory = Memory.QUARANTINED
            job.quarantined_at = now
            self._quarantine[job.job] = job
        seconds = now - job.started
        failure = job.failure
        if failure is None:
            result = ReadResult(job.job, outcome, memory, job.nbytes, seconds)
        else:
            result = ReadResult(job.job, outcome, memory, 0, seconds, failure.kind, failure.reason)
        self._report(result)

    def _report(self, result: ReadResult) -> None:
        self._results.append(result)
        self.news += 1

    def _settle(self, job: Job) -> None:
        if job.holds_memory:
            return
        del self._quarantine[job.job]
        self._settled.append(job.job)
        self.news += 1
