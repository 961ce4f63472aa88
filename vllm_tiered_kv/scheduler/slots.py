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

    @property
    def free(self) -> int:
        ahead = sum(slot >= self._next for slot in self._kept)
        return self._num_slots - self._next - ahead + len(self._returned)

    @property
    def used(self) -> int:
        return self._num_slots - self.free

    def take(self) -> int | None:
        """A free slot, or None."""
        if self._returned:
            return self._returned.pop()
        while self._next < self._num_slots:
            slot = self._next
            self._next += 1
            if slot not in self._kept:
                return slot
            self._kept.discard(slot)
        return None

    def give_back(self, slot: int) -> None:
        """Return a slot got from :meth:`take` or kept by :meth:`reset`."""
        if slot >= self._next:
            self._kept.discard(slot)  # kept across a reset; the counter will come to it
            return
        self._returned.append(slot)

    def reset(self, held: Iterable[int]) -> None:
        """Free every slot but those in ``held``, which are given back one by one later."""
        self._next = 0
        self._returned = []
        self._kept = set(held)
