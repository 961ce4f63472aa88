# SPDX-License-Identifier: Apache-2.0
"""Who may read what until when: a table with a clock of its callers, no thread and no lock.

A lease is open until somebody takes it; who does is a *holder*. The memory is free when the last
holder has released it, when nobody came in time, or a *grace* after a holder's time was over: a
holder begins no read under a lease that is over, and one that is under way has ended by then, or is
refused by the holder itself.
"""

from __future__ import annotations

import enum
import heapq
import math
from collections.abc import Iterable

MAX_HOLDERS = 64
"""Of one lease."""
LONGEST = 3600.0
"""Seconds after which no lease is renewed any more."""


_SPARE = 1024
"""Looks at leases that are over, kept beside those at leases that are not."""


class Denial(enum.Enum):
    """Why a lease is not to be had."""

    UNKNOWN = "unknown"  # never there, over, or released by all
    TOO_MANY = "too many"  # holders


class _Lease:
    __slots__ = ("free_at", "holders", "last", "until")

    def __init__(self, until: float, last: float) -> None:
        self.until = until
        """While nobody holds it: when it is over."""
        self.last = last
        """From then on nobody is granted anything."""
        self.holders: dict[str, float] = {}
        """Who may read until when."""
        self.free_at = -math.inf
        """Before this a read of a former holder may be under way."""

    def next_look(self) -> float:
        """When something may have to be done about it."""
        if self.holders:
            return min(self.holders.values())
        return max(self.until, self.free_at)


class LeaseTable:
    """All leases of one engine. One thread only.

    Args:
        seconds: that a lease lasts, from the grant or from the last word of a holder.
        grace: seconds by which memory outlives a holder's time.
        limit: leases at once.
    """

    def __init__(self, seconds: float, grace: float, limit: int) -> None:
        self.seconds = seconds
        self._grace = grace
        self._limit = limit
        self._leases: dict[int, _Lease] = {}
        self._due: list[tuple[float, int]] = []
        """When to look at a lease again, a heap."""
        self._freed: list[int] = []
        self.expired = 0
        """Leases or holders whose time was over."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, number: int, now: float) -> bool:
        """Open a lease; its number has not been used before. False: there are too many."""
        if len(self._leases) >= self._limit or number in self._leases:
            return False
        self._leases[number] = _Lease(now + self.seconds, now + LONGEST)
        heapq.heappush(self._due, (now + self.seconds, number))
        return True

    def take(self, number: int, holder: str, now: float) -> Denial | None:
        """Become a holder for :attr:`seconds`, or remain one.

        Returns:
            None if it is granted.
        """
        self.expire(now)
        lease = self._leases.get(number)
        if lease is None or now >= lease.last or not (lease.holders or now < lease.until):
            return Denial.UNKNOWN
        if holder not in lease.holders and len(lease.holders) >= MAX_HOLDERS:
            return Denial.TOO_MANY
        lease.holders[holder] = now + self.seconds
        return None

    def renew(self, number: int, holder: str, now: float) -> bool:
        """Hold it for :attr:`seconds` from now. False: the holder's time is over."""
        self.expire(now)
        lease = self._leases.get(number)
        if lease is None or holder not in lease.holders or now >= lease.last:
            return False
        lease.holders[holder] = now + self.seconds
        return True

    def release(self, number: int, holder: str, now: float) -> bool:
        """A holder reads no more, nor does any read of it go on. False: it is none."""
        self.expire(now)
        lease = self._leases.get(number)
        if lease is None or lease.holders.pop(holder, None) is None:
            return False
        if not lease.holders:
            lease.until = now
            self._settle(number, lease, now)
        return True

    def revoke(self, now: float, numbers: Iterable[int] | None = None) -> None:
        """Nobody may begin to read anything of what there is now; who reads has its time.

        Args:
            numbers: the leases that are meant; None: all.
        """
        for number in tuple(self._leases) if numbers is None else numbers:
            lease = self._leases.get(number)
            if lease is None:
                continue
            lease.last = now
            if not lease.holders:
                lease.until = min(lease.until, now)
                self._settle(number, lease, now)

    def expire(self, now: float) -> None:
        """End what is over."""
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            if (lease := self._leases.get(number)) is not None:
                self._expire_one(number, lease, now)

    def take_freed(self) -> list[int]:
        """Leases whose memory has become free since the last call; each once."""
        freed, self._freed = self._freed, []
        return freed

    @property
    def next_due(self) -> float | None:
        """When :meth:`expire` may have something to do."""
        return self._due[0][0] if self._due else None

    def _expire_one(self, number: int, lease: _Lease, now: float) -> None:
        late = [holder for holder, until in lease.holders.items() if until <= now]
        for holder in late:
            lease.free_at = max(lease.free_at, lease.holders.pop(holder) + self._grace)
            lease.until = now
        self.expired += len(late)
        if lease.holders:
            heapq.heappush(self._due, (lease.next_look(), number))
            return
        if lease.free_at == -math.inf:
            self.expired += 1  # nobody ever came
        self._settle(number, lease, now)

    def _settle(self, number: int, lease: _Lease, now: float) -> None:
        """Free a lease that nobody holds, or look at it again when its grace is over."""
        if lease.next_look() > now:
            heapq.heappush(self._due, (lease.next_look(), number))
            return
        del self._leases[number]
        self._freed.append(number)
        if len(self._due) > _SPARE + 4 * len(self._leases):
            # Most are of leases that were released long before their time.
            self._due = [(lease.next_look(), number) for number, lease in self._leases.items()]
            heapq.heapify(self._due)
