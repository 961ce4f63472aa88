# SPDX-License-Identifier: Apache-2.0
"""ARC: recency and frequency, balanced by what is missed.

Nimrod Megiddo and Dharmendra Modha, "ARC: a self-tuning, low overhead replacement cache",
FAST 2003, figure 4; the short names are the paper's. What was used once stands in T1, what was used
again in T2, and B1 and B2 remember what was evicted of each. A miss that B1 remembers gives T1 more
of the room, one that B2 remembers gives T2 more.

Sizes are bytes where the paper counts pages, and the cache's size c is what the entries take now,
which is the tier's capacity whenever a victim is asked for. Held entries count, and
keep their age.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic

from vllm_tiered_kv.policies.ghosts import Ghosts
from vllm_tiered_kv.policies.policy import Identity, Item, K, Place, itself
from vllm_tiered_kv.policies.queue import Member, Queue


class ARC(Generic[K]):
    """The policy. It remembers evicted entries of at most the bytes of those that are here."""

    def __init__(self, identity: Identity[K] = itself) -> None:
        self._identity = identity
        self.clear()

    def clear(self) -> None:
        self._entries: dict[K, Member[K]] = {}
        self._once: Queue[K] = Queue()  # T1
        self._again: Queue[K] = Queue()  # T2
        self._once_ghosts = Ghosts()  # B1
        self._again_ghosts = Ghosts()  # B2
        self._target = 0.0
        """p: the bytes that T1 should have."""
        self._adapted: Hashable | None = None
        """Whose coming has moved the target already."""

    def add(self, key: K, item: Item) -> None:
        name = self._identity(key)
        if name != self._adapted:
            self._adapt(name)
        self._adapted = None
        known = [ghosts.pop(name) for ghosts in (self._once_ghosts, self._again_ghosts)]
        queue = self._once if known == [None, None] else self._again
        self._entries[key] = Member(key, item.nbytes, queue)
        self._trim(slack=0)

    def use(self, keys: Iterable[K]) -> None:
        once, again = self._once, self._again
        for key in keys:
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.queue is once:
                once.leave(entry)
                again.join(entry)
            else:
                again.renew(entry)

    def renew(self, keys: Iterable[K]) -> None:
        for key in keys:
            if (entry := self._entries.get(key)) is not None:
                entry.queue.renew(entry)

    def resize(self, key: K, nbytes: int) -> None:
        if (entry := self._entries.get(key)) is not None:
            entry.queue.resize(entry, nbytes)

    def hold(self, key: K) -> None:
        if (entry := self._entries.get(key)) is not None:
            entry.queue.hold(entry)

    def release(self, key: K, place: Place = Place.NEWEST) -> None:
        entry = self._entries[key]
        entry.queue.release(entry)

    def victim(self, coming: Hashable | None = None) -> K | None:
        if coming is not None and coming != self._adapted:
            self._adapt(coming)
            self._adapted = coming
        first, second = self._once.oldest(), self._again.oldest()
        excess = self._once.nbytes - self._target
        from_once = excess > 0 or (excess == 0 and coming in self._again_ghosts)
        entry = first if second is None or (first is not None and from_once) else second
        return entry.key if entry is not None else None

    def evict(self, key: K) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        ghosts = self._once_ghosts if entry.queue is self._once else self._again_ghosts
        ghosts.add(self._identity(key), entry.nbytes)
        # What comes in may be one of those remembered, and then leaves its list.
        self._trim(slack=entry.nbytes)
        self.remove(key)

    def remove(self, key: K) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            entry.queue.leave(entry)

    def may_evict(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.held

    def _adapt(self, name: Hashable) -> None:
        """Cases II and III: the list that was just missed gets more of the room."""
        once, again = self._once_ghosts, self._again_ghosts
        if size := once.get(name):  # what takes no room moves nothing
            step = size * max(1.0, again.nbytes / once.nbytes)
            self._target = min(self._target + step, self._once.nbytes + self._again.nbytes)
        elif size := again.get(name):
            step = size * max(1.0, once.nbytes / again.nbytes)
            self._target = max(self._target - step, 0.0)

    def _trim(self, slack: int) -> None:
        """Case IV: T1 and B1 have at most c, all four lists at most 2 c."""
        room = self._once.nbytes + self._again.nbytes + slack
        self._once_ghosts.trim(room - self._once.nbytes)
        self._again_ghosts.trim(room - self._once_ghosts.nbytes)
