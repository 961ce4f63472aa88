# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO: three queues that pass over what is seen once.

Juncheng Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023, section 4. What
is new waits in a small queue for a tenth of the room; what is used twice there moves to the main
queue, the rest is evicted and remembered. What comes back while it is remembered goes to the main
queue at once. The main queue gives what was used another round.

The room is what the entries take now, which is the tier's capacity whenever a victim is asked for,
so that nobody has to say it. A held entry keeps its age.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic

from vllm_tiered_kv.policies.ghosts import Ghosts
from vllm_tiered_kv.policies.policy import Identity, Item, K, Place, itself
from vllm_tiered_kv.policies.queue import Member, Queue

SMALL_SHARE = 0.1
"""Of the room; the paper's choice."""

PROMOTED_AT = 2
"""Uses in the small queue that take an entry to the main queue."""

MAX_USES = 3
"""As far as uses are counted: two bits in the paper."""

MAX_MOVES = 64
"""Entries given another round for one victim; who asks must not wait for a walk over them all."""


class _Entry(Member[K]):
    __slots__ = ("uses",)

    def __init__(self, key: K, nbytes: int, queue: Queue[K]) -> None:
        super().__init__(key, nbytes, queue)
        self.uses = 0


class S3FIFO(Generic[K]):
    """The policy. It remembers evicted entries of as many bytes as the main queue may have."""

    def __init__(self, identity: Identity[K] = itself) -> None:
        self._identity = identity
        self.clear()

    def clear(self) -> None:
        self._entries: dict[K, _Entry[K]] = {}
        self._small: Queue[K] = Queue()
        self._main: Queue[K] = Queue()
        self._ghosts = Ghosts()
        """What was evicted from the small queue."""

    def add(self, key: K, item: Item) -> None:
        known = self._ghosts.pop(self._identity(key)) is not None
        queue = self._main if known else self._small
        self._entries[key] = _Entry(key, item.nbytes, queue)

    def use(self, keys: Iterable[K]) -> None:
        entries = self._entries
        for key in keys:
            entry = entries.get(key)
            if entry is not None and entry.uses < MAX_USES:
                entry.uses += 1

    def renew(self, keys: Iterable[K]) -> None:
        """A queue is by when its members came, whatever happened to them since."""

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
        small, main = self._small, self._main
        key = None
        for _ in range(MAX_MOVES):
            first, second = small.oldest(), main.oldest()
            from_small = small.nbytes >= SMALL_SHARE * (small.nbytes + main.nbytes)
            oldest = first if second is None or (first is not None and from_small) else second
            if oldest is None:
                return None
            key = oldest.key
            entry = self._entries[key]
            if entry.queue is small and entry.uses >= PROMOTED_AT:
                small.leave(entry)
                main.join(entry)
                entry.uses = 0
            elif entry.queue is main and entry.uses:
                main.renew(entry)
                entry.uses -= 1
            else:
                break
        return key

    def evict(self, key: K) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        room = self._small.nbytes + self._main.nbytes
        self.remove(key)
        if entry.queue is self._small:
            self._ghosts.add(self._identity(key), entry.nbytes)
            self._ghosts.trim((1 - SMALL_SHARE) * room)

    def remove(self, key: K) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            entry.queue.leave(entry)

    def may_evict(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and not entry.held
