# SPDX-License-Identifier: Apache-2.0
"""Which objects must stay for now: those that were looked up, and those being written. No clock."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection

from vllm_tiered_kv.tiers.disk.entries import ChunkName, FileName, PolicyKey
from vllm_tiered_kv.tiers.objects.names import ObjectId

LOCK_LIFE = 600.0
"""Seconds after which a lock that nobody has taken off counts no more: its holder forgot it."""
MAX_LOCKS = 1 << 16
"""Objects that may be locked at once; what is looked up beyond may be evicted before its load."""


class _Lock:
    __slots__ = ("count", "file", "until")

    def __init__(self, file: FileName) -> None:
        self.file = file
        self.count = 0
        self.until = 0.0


class Holds:
    """Counts who holds what."""

    def __init__(self) -> None:
        self._locks: OrderedDict[ObjectId, _Lock] = OrderedDict()
        self._chunks: Counter[PolicyKey] = Counter()

    @property
    def chunks(self) -> Collection[PolicyKey]:
        """What must not be evicted."""
        return self._chunks.keys()

    @property
    def locks(self) -> int:
        """Objects that are locked."""
        return len(self._locks)

    def is_locked(self, name: ObjectId) -> bool:
        return name in self._locks

    def lock(self, name: ObjectId, file: FileName, now: float) -> None:
        """An object was found in this file; locks of one object add up."""
        lock = self._locks.get(name)
        if lock is None:
            if len(self._locks) >= MAX_LOCKS:
                return
            lock = self._locks[name] = _Lock(file)
            self.hold(file)
        lock.count += 1
        lock.until = now + LOCK_LIFE
        self._locks.move_to_end(name)

    def unlock(self, name: ObjectId) -> None:
        """Take one lock off; nothing happens where there is none."""
        lock = self._locks.get(name)
        if lock is None:
            return
        lock.count -= 1
        if lock.count == 0:
            del self._locks[name]
            self.release(lock.file)

    def expire(self, now: float) -> int:
        """Take off what is too old; how many objects that were."""
        expired = 0
        while self._locks:
            name, lock = next(iter(self._locks.items()))
            if lock.until > now:
                break
            del self._locks[name]
            self.release(lock.file)
            expired += 1
        return expired

    def hold(self, file: FileName) -> None:
        self._chunks[ChunkName(file.namespace, file.key)] += 1

    def release(self, file: FileName) -> None:
        chunk = ChunkName(file.namespace, file.key)
        self._chunks[chunk] -= 1
        if self._chunks[chunk] <= 0:
            del self._chunks[chunk]
