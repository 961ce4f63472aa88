# SPDX-License-Identifier: Apache-2.0
"""Which chunks of the CPU tier peers may read, and which of them somebody reads.

The one thing that the scheduler's thread and the agent's share. The one puts chunks on the shelf
and asks before it takes one away; the other lends them without asking. A lock is held for a few
dictionary operations at a time, never while anybody waits for anything.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

Owner = TypeVar("Owner")

BATCH = 64
"""Chunks looked for at a time, before others have their turn."""


class Lent(Generic[Owner]):
    """One chunk on the shelf. Changed under the shelf's lock alone."""

    __slots__ = ("awaited", "owner", "readers", "slots", "sums")

    def __init__(self, slots: tuple[int, ...], owner: Owner, sums: bytes) -> None:
        self.slots = slots
        """By KV cache group."""
        self.owner = owner
        self.sums = sums
        """See `remote.messages.ChunkSums`; empty: there are none."""
        self.readers = 0
        """Leases that it is in."""
        self.awaited = False
        """The scheduler wants to be told when nobody reads it any more."""


class Shelf(Generic[Owner]):
    """The chunks that can be read. It has at most those that are in the tier, and those being read.

    Args:
        max_slots: slots that may be lent at once: those cannot be given to other chunks.
    """

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._lock = threading.Lock()
        self._chunks: dict[bytes, Lent[Owner]] = {}
        self._reading: set[Lent[Owner]] = set()
        self._slots = 0
        self._returned: deque[Owner] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def lent_slots(self) -> int:
        """Slots that somebody may be reading."""
        return self._slots

    # -- the scheduler's thread --------------------------------------------------------

    def offer(self, key: bytes, slots: tuple[int, ...], owner: Owner, sums: bytes = b"") -> None:
        """A chunk can be read from these slots.

        Args:
            owner: what :meth:`take_returned` names it by.
            sums: checksums of it.
        """
        with self._lock:
            chunk = self._chunks.get(key)
            if not self._is_closed and (chunk is None or not chunk.readers):
                self._chunks[key] = Lent(slots, owner, sums)

    def lets_go(self, key: bytes, owner: Owner) -> bool:
        """Take a chunk away, so that its slots can be used for others.

        Returns:
            False: somebody may be reading it. It stays, and :meth:`take_returned` names it in time.
        """
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.owner is not owner:
                return True
            if chunk.readers:
                chunk.awaited = True
                return False
            del self._chunks[key]
            return True

    def withdraw(self, key: bytes, owner: Owner) -> bool:
        """Lend a chunk to nobody any more.

        Returns:
            Whether somebody may still be reading it and it was not awaited before; then
            :meth:`take_returned` names it in time.
        """
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.owner is not owner:
                return False
            del self._chunks[key]
            if not chunk.readers or chunk.awaited:
                return False
            chunk.awaited = True
            return True

    def clear(self, *, close: bool = False) -> list[Owner]:
        """Lend nothing of what there is any more.

        Args:
            close: and nothing that comes.

        Returns:
            What somebody may still be reading and was not awaited before.
        """
        with self._lock:
            self._is_closed = self._is_closed or close
            self._chunks = {}
            left = [chunk for chunk in self._reading if not chunk.awaited]
            for chunk in left:
                chunk.awaited = True
            return [chunk.owner for chunk in left]

    def take_returned(self) -> list[Owner]:
        """What was awaited and was read by nobody for a moment; it may be lent once more by now."""
        return [self._returned.popleft() for _ in range(len(self._returned))]

    # -- the agent's thread ------------------------------------------------------------

    def lend(self, keys: Sequence[bytes]) -> list[Lent[Owner]]:
        """The chunks of these that are there, from the first on; each is to be given back once."""
        lent: list[Lent[Owner]] = []
        for i in range(0, len(keys), BATCH):
            batch = keys[i : i + BATCH]
            with self._lock:
                lent += self._lend(batch)
            if len(lent) < i + len(batch):
                break
        return lent

    def give_back(self, lent: Sequence[Lent[Owner]]) -> None:
        """A lease on these is over, and nobody reads under it."""
        for i in range(0, len(lent), BATCH):
            with self._lock:
                for chunk in lent[i : i + BATCH]:
                    self._give_back(chunk)

    def _lend(self, keys: Sequence[bytes]) -> list[Lent[Owner]]:
        lent = []
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                break
            if not chunk.readers:
                if self._slots + len(chunk.slots) > self._max_slots:
                    break
                self._slots += len(chunk.slots)
                self._reading.add(chunk)
            chunk.readers += 1
            lent.append(chunk)
        return lent

    def _give_back(self, chunk: Lent[Owner]) -> None:
        chunk.readers -= 1
        if chunk.readers:
            return
        self._slots -= len(chunk.slots)
        self._reading.discard(chunk)
        if chunk.awaited:
            chunk.awaited = False
            self._returned.append(chunk.owner)
