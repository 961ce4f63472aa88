# SPDX-License-Identifier: Apache-2.0
"""Orders that were wanted: those that wait, and those at the ranks. Each ends once.

No I/O and no clock: the caller gives the time, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from vllm_tiered_kv.tiers.disk.active import ActiveOrder, Ended
from vllm_tiered_kv.tiers.disk.orders import Outcome, ReadOrder, WriteOrder

MAX_WRITES = 32
"""Writes at the ranks at once."""
MAX_READS = 128
"""Reads at the ranks at once; the others wait here, where they can still be called off."""
MAX_QUEUED_READS = 16384
WRITE_PATIENCE = 60.0
"""Seconds a write waits here at most: it holds its slots."""


class Flight:
    """The orders.

    Args:
        max_queued: writes that may wait.
        tell: takes the end of each order that was wanted, once.
    """

    def __init__(self, max_queued: int, tell: Callable[[Ended], None]) -> None:
        self._max_queued = max_queued
        self._tell = tell
        self._writes: deque[tuple[WriteOrder, float]] = deque()
        self._reads: deque[tuple[ReadOrder, float]] = deque()
        self.active: dict[int, ActiveOrder] = {}
        """At the ranks."""
        self._active_reads = 0
        self.hung: set[int] = set()
        """Of those, what has been there too long."""
        self._writing: dict[bytes, int] = {}

    @property
    def is_idle(self) -> bool:
        return not self.active and not self._writes and not self._reads

    @property
    def writing(self) -> Collection[bytes]:
        """Chunks that are being written at the ranks."""
        return self._writing.keys()

    @property
    def next_write(self) -> WriteOrder | None:
        return self._writes[0][0] if self._writes else None

    # -- waiting -----------------------------------------------------------------------

    def queue_write(self, order: WriteOrder, now: float) -> None:
        if len(self._writes) >= self._max_queued:
            self.drop(order.job)
        else:
            self._writes.append((order, now + WRITE_PATIENCE))

    def queue_read(self, order: ReadOrder, now: float) -> None:
        if len(self._reads) >= MAX_QUEUED_READS:
            self.drop(order.job)
        else:
            self._reads.append((order, now + order.patience))

    def drop(self, job: int) -> None:
        """An order ends before it has begun."""
        self._tell(Ended(job, Outcome.DROPPED))

    def drop_writes(self) -> None:
        """Drop those that wait."""
        while self._writes:
            self.drop(self._writes.popleft()[0].job)

    def drop_reads(self) -> None:
        """Drop those that wait."""
        while self._reads:
            self.drop(self._reads.popleft()[0].job)

    def cancel(self, jobs: Collection[int]) -> list[int]:
        """Drop reads nobody waits for; returns those that are at the ranks already."""
        dropped = [order.job for order, _ in self._reads if order.job in jobs]
        self._reads = deque(entry for entry in self._reads if entry[0].job not in jobs)
        for job in dropped:
            self.drop(job)
        return [job for job in jobs if job in self.active]

    def expire(self, now: float) -> None:
        """Drop what has waited too long."""
        late = [order.job for order, give_up_at in self._reads if give_up_at < now]
        if late:
            self._reads = deque(entry for entry in self._reads if entry[1] >= now)
        while self._writes and self._writes[0][1] < now:
            late.append(self._writes.popleft()[0].job)
        for job in late:
            self.drop(job)

    # -- at the ranks ------------------------------------------------------------------

    def begin_reads(self, now: float) -> Iterator[ReadOrder]:
        """Those that may be sent now, with what is left of their patience."""
        while self._reads and self._active_reads < MAX_READS:
            order, give_up_at = self._reads.popleft()
            self.active[order.job] = ActiveOrder(order, now)
            self._active_reads += 1
            yield msgspec.structs.replace(order, patience=max(0.0, give_up_at - now))

    @property
    def may_begin_write(self) -> bool:
        return len(self.active) - self._active_reads < MAX_WRITES

    def take_write(self) -> WriteOrder:
        """The next write, which waits no more: to be begun or dropped."""
        return self._writes.popleft()[0]

    def begin_write(self, order: WriteOrder, reserved: Sequence[int], now: float) -> None:
        """Args: reserved: bytes that are kept for each rank's files."""
        self.active[order.job] = ActiveOrder(order, now, reserved)
        self._writing[order.key] = self._writing.get(order.key, 0) + 1

    def end(self, active: ActiveOrder) -> None:
        """Every rank has answered."""
        order = active.order
        del self.active[order.job]
        self.hung.discard(order.job)
        if isinstance(order, ReadOrder):
            self._active_reads -= 1
        elif self._writing[order.key] > 1:
            self._writing[order.key] -= 1
        else:
            del self._writing[order.key]
        self._tell(active.ended())

    def overdue(self, now: float, deadline: float) -> list[ActiveOrder]:
        """Orders that have become hung since the last call."""
        late = [
            active
            for job, active in self.active.items()
            if now - active.since > deadline and job not in self.hung
        ]
        self.hung.update(active.order.job for active in late)
        return late
