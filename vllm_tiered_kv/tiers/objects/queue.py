# SPDX-License-Identifier: Apache-2.0
"""Parts of tasks that wait, and those that threads are at. No I/O and no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from vllm_tiered_kv.tiers.objects.tasks import Part


class PartQueue:
    """Of one kind.

    Args:
        max_queued: parts that may wait.
        max_bytes: bytes of objects that may wait.
        at_once: parts that threads may have.
    """

    def __init__(self, max_queued: int, max_bytes: int, at_once: int) -> None:
        self._max_queued = max_queued
        self._max_bytes = max_bytes
        self._at_once = at_once
        self._waiting: deque[Part] = deque()
        self.active: set[Part] = set()
        """With threads."""
        self.hung: set[Part] = set()
        """Of those, what has been there too long."""
        self.queued_bytes = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def next(self) -> Part | None:
        return self._waiting[0] if self._waiting else None

    @property
    def may_begin(self) -> bool:
        """Whether a part waits and a thread is there for it."""
        return bool(self._waiting) and len(self.active) < self._at_once

    def put(self, part: Part) -> bool:
        """Whether there was room for it; the first always fits."""
        if len(self._waiting) >= self._max_queued:
            return False
        if self._waiting and self.queued_bytes + part.nbytes > self._max_bytes:
            return False
        self._waiting.append(part)
        self.queued_bytes += part.nbytes
        return True

    def take(self) -> Part:
        """The next one, which waits no more."""
        part = self._waiting.popleft()
        self.queued_bytes -= part.nbytes
        return part

    def begin(self, part: Part, now: float) -> None:
        part.since = now
        self.active.add(part)

    def end(self, part: Part) -> None:
        """A thread is done with it."""
        self.active.discard(part)
        self.hung.discard(part)

    def drop_all(self) -> Iterator[Part]:
        """What waits; it waits no more."""
        while self._waiting:
            yield self.take()

    def expired(self, now: float) -> list[Part]:
        """What has waited too long; it waits no more."""
        late = []
        while self._waiting and self._waiting[0].give_up_at < now:
            late.append(self.take())
        return late

    def overdue(self, now: float, deadline: float) -> list[Part]:
        """Parts that have become hung since the last call."""
        late = [p for p in self.active if now - p.since > deadline and p not in self.hung]
        self.hung.update(late)
        return late
