# SPDX-License-Identifier: Apache-2.0
"""Pulls: what one rank reads for one request, from as many of the producer's ranks as have a part.

A pull is good when all of its parts are. As soon as one isn't, the others are called off; the
pull's memory is free when that of every part is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from vllm_tiered_kv.remote.transport import (
    Fence,
    Memory,
    Outcome,
    Read,
    ReadResult,
    Transport,
)
from vllm_tiered_kv.worker.remote.plan import Runs


class Part(NamedTuple):
    """What is read from one rank."""

    peer: str
    """Its `Endpoint.incarnation`."""
    runs: Runs


class PullResult(msgspec.Struct, frozen=True):
    """A pull's end; the fields are those of `ReadResult`."""

    pull: int
    outcome: Outcome
    memory: Memory
    nbytes: int
    seconds: float
    kind: str
    reason: str


class _Pull:
    """One pull under way, or in quarantine."""

    __slots__ = ("bad", "nbytes", "number", "open", "quarantined", "seconds")

    def __init__(self, number: int) -> None:
        self.number = number
        self.open: set[int] = set()
        """The transport's jobs that have not ended ..."""
        self.quarantined: set[int] = set()
        """... and those that may still write."""
        self.bad: ReadResult | None = None
        self.nbytes = 0
        self.seconds = 0.0

    def result(self) -> PullResult:
        memory = Memory.QUARANTINED if self.quarantined else Memory.FREE
        if self.bad is None:
            return PullResult(self.number, Outcome.DONE, memory, self.nbytes, self.seconds, "", "")
        bad = self.bad
        return PullResult(self.number, bad.outcome, memory, 0, self.seconds, bad.kind, bad.reason)


class Puller:
    """The pulls of one rank. One thread calls it; nobody else starts reads on the transport."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._jobs = itertools.count(1)
        self._by_job: dict[int, _Pull] = {}
        self._by_number: dict[int, _Pull] = {}
        """Those that have not ended."""
        self._results: list[PullResult] = []
        self._settled: list[int] = []

    def start(
        self, pull: int, parts: Sequence[Part], deadline: float, after: Fence | None = None
    ) -> None:
        """Begin a pull; without parts it is done.

        Args:
            pull: chosen by the caller; never used again.
            parts: from `plan_read`; of several groups too. Their memory doesn't overlap.
            deadline: `time.monotonic()` at which it is given up.
            after: see `Read`.
        """
        entry = self._by_number[pull] = _Pull(pull)
        for part in parts:
            job = next(self._jobs)
            entry.open.add(job)
            self._by_job[job] = entry
            runs = part.runs
            self._transport.start_read(
                Read(job, part.peer, runs.local, runs.remote, runs.nbytes, deadline, after)
            )
        self._end_if_done(entry)

    def cancel(self, pulls: Sequence[int]) -> None:
        """Give these up; pulls that have ended are passed over."""
        for number in pulls:
            pull = self._by_number.get(number)
            if pull is not None:
                self._transport.cancel(sorted(pull.open))

    def poll(self) -> list[PullResult]:
        """Pulls that ended since the last call; every one once."""
        while ended := self._transport.poll():
            for result in ended:
                self._part_ended(result)
        results, self._results = self._results, []
        return results

    def settled(self) -> list[int]:
        """Pulls that were polled as quarantined, and whose memory is free now; every one once."""
        for job in self._transport.settled():
            pull = self._by_job.pop(job, None)
            if pull is None:
                continue
            pull.quarantined.discard(job)
            if not pull.open and not pull.quarantined:
                self._settled.append(pull.number)
        settled, self._settled = self._settled, []
        return settled

    def _part_ended(self, result: ReadResult) -> None:
        pull = self._by_job.get(result.job)
        if pull is None:
            return
        pull.open.discard(result.job)
        pull.nbytes += result.nbytes
        pull.seconds = max(pull.seconds, result.seconds)
        if result.memory is Memory.QUARANTINED:
            pull.quarantined.add(result.job)
        else:
            del self._by_job[result.job]
        if result.outcome is not Outcome.DONE and pull.bad is None:
            pull.bad = result
            self._transport.cancel(sorted(pull.open))
        self._end_if_done(pull)

    def _end_if_done(self, pull: _Pull) -> None:
        if pull.open or self._by_number.pop(pull.number, None) is None:
            return
        self._results.append(pull.result())
