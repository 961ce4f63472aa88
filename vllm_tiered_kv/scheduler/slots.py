# SPDX-License-Identifier: Apache-2.0
"""Which slots of the CPU tier are free."""

from __future__ import annotations

from collections.abc import Iterable


class SlotAllocator:
    """Hands out slot numbers, lowest first; the same number is the same slot on every rank.

    Lowest first because slots are faulted in and pinned in that order. Forgetting all but a
    few is cheap, however many there are: a cache reset happens on the scheduler thread.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._next = 0  # never handed out since the last reset
        self._returned: list[int] = []
        self._kept: set[int] = set()  # held across a reset
        self.used = 0

    @property
    def total(self) -> int:
        return self._num_slots

    @property
    def free(self) -> int:
        return max(0, self._num_slots - self.used)

    def limit(self, num_slots: int) -> None:
        """Hand out no slot from ``num_slots`` on; those that are held are given back as ever."""
        self._num_slots = min(self._num_slots, num_slots)

    def take(self) -> int | None:
        """A free slot, or None."""
        while self._returned:
            slot = self._returned.pop()
            if slot < self._num_slots:
                self.used += 1
                return slot
        while self._next < self._num_slots:
            slot = self._next
            self._next += 1
            if slot not in self._kept:
                self.used += 1
                return slot
            self._kept.discard(slot)
        return None

    def give_back(self, slot: int) -> None:
        """Return a slot got from :meth:`take` or kept by :meth:`reset`."""
        self.used -= 1
        if slot >= self._next:
            self._kept.discard(slot)  # kept across a reset; the counter will come to it
            return
        self._returned.append(slot)

    def reset(self, held: Iterable[int]) -> None:
        """Free every slot but those in ``held``, which are given back one by one later."""
        self._next = 0
        self._returned = []
        self._kept = set(held)
        self.used = len(self._kept)
