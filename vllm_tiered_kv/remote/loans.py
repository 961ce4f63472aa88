# SPDX-License-Identifier: Apache-2.0
"""The answering side of peers' questions for chunks: what is on the shelf, and leases on it.

The agent's thread only; the scheduler's is not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from vllm_tiered_kv.remote.leases import LeaseTable
from vllm_tiered_kv.remote.messages import MAX_SUMS, Find, Found, Holds, Reason, Refused
from vllm_tiered_kv.remote.shelf import Lent, Shelf


class ChunkLender:
    """Lends chunks.

    Args:
        shelf: what there is.
        leases: an empty table, this side's alone.
        clock: seconds, monotonic.
    """

    def __init__(
        self, shelf: Shelf[object], leases: LeaseTable, clock: Callable[[], float]
    ) -> None:
        self._shelf = shelf
        self._leases = leases
        self._clock = clock
        self._lent: dict[int, list[Lent[object]]] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """Leases on chunks."""
        return len(self._lent)

    def find(self, ask: Find, generation: int) -> Found | Refused:
        """Lend what is there of a run."""
        now, seconds = self._clock(), self._leases.seconds
        lent = self._shelf.lend([block_hash + ask.content for block_hash in ask.hashes])
        if not lent:
            return Found(ask.number, 0, seconds, generation, ())
        if lent[0].sums:
            most = MAX_SUMS // len(lent[0].sums)
            self._shelf.give_back(lent[most:])
            lent = lent[:most]
        lease = next(self._numbers)
        granted = self._leases.grant(lease, now)
        if not granted or self._leases.take(lease, ask.holder, now) is not None:
            self._shelf.give_back(lent)
            return Refused(ask.number, Reason.LIMIT, "too many leases on chunks of this engine")
        self._lent[lease] = lent
        slots = tuple(zip(*(chunk.slots for chunk in lent), strict=True))
        sums = tuple(chunk.sums for chunk in lent if chunk.sums)
        return Found(ask.number, lease, seconds, generation, slots, sums)

    def give_back(self, holds: Holds) -> None:
        """Who holds these reads no more."""
        now = self._clock()
        for hold in holds:
            self._leases.release(hold.lease, hold.holder, now)
        self.expire()

    def revoke(self) -> None:
        """Nobody may begin to read anything that was lent; who reads has its time."""
        self._leases.revoke(self._clock())
        self.expire()

    def expire(self) -> None:
        """Give back what is free."""
        self._leases.expire(self._clock())
        for lease in self._leases.take_freed():
            self._shelf.give_back(self._lent.pop(lease))
