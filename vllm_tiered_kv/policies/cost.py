# SPDX-License-Identifier: Apache-2.0
"""Cost-aware eviction: what is cheap to compute again, large or seldom used goes first.

GreedyDual-Size-Frequency (Ludmila Cherkasova, "Improving WWW proxies performance with
Greedy-Dual-Size-Frequency caching policy", HP Labs HPL-98-69, 1998), which adds a count of uses to
GreedyDual-Size (Pei Cao and Sandy Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997): an
entry's worth is ``L + uses * cost / nbytes``, and ``L``, the worth of the last victim, lets what is
not used any more grow old. The cost of a chunk is the time to compute it again behind its prefix.

What is added or used tail first, in one go, raises each chunk to the worth of the one behind it at
least, so that tails go first also where nobody knows parents.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Generic

from vllm_tiered_kv.policies.heap import Heap, HeapNode
from vllm_tiered_kv.policies.policy import Item, K, Place

DOUBLING_TOKENS = 32_768
"""Where in a prompt a token costs twice what the first one costs.

A token costs ``2 P`` operations in the ``P`` weights and ``4 L d`` for each token before it, in
``L`` layers of attention ``d`` wide: for 8 billion weights, 32 layers and 4,096 wide they are equal
at 30,500 tokens, for 70 billion, 80 and 8,192 at 53,400.
"""

MAX_MOVES = 64
"""Entries whose rank is brought up to date for one victim; who asks must not wait for them all."""


def compute_cost(item: Item) -> float:
    """Time to compute a chunk again behind its prefix, in that of a prompt's first token."""
    return item.tokens * (1 + item.position * item.tokens / DOUBLING_TOKENS)


class _Entry(HeapNode, Generic[K]):
    __slots__ = ("cost", "due", "gain", "key", "position", "uses")

    def __init__(self, key: K, item: Item) -> None:
        super().__init__((0.0,))
        self.key = key
        self.cost = compute_cost(item)
        self.gain = self.cost / max(item.nbytes, 1)
        self.position = item.position
        self.uses = 1
        self.due = self.rank
        """Its rank by what is known now; the one in the heap may be from before its last uses."""


class Cost(Generic[K]):
    """The policy. Uses cost O(1): ranks are brought up to date when a victim is looked for."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._entries: dict[K, _Entry[K]] = {}
        self._heap: Heap[_Entry[K]] = Heap()
        self._age = 0.0
        """L, the worth of the last victim."""
        self._clock = 0
        self._behind = (0, 0.0)
        """Position and worth of what was added last."""

    def add(self, key: K, item: Item) -> None:
        entry = _Entry(key, item)
        self._clock += 1
        position, worth = self._behind
        least = worth if item.position == position - 1 else 0.0
        self._behind = (item.position, self._rank(entry, least))
        entry.rank = entry.due
        self._entries[key] = entry
        self._heap.push(entry)

    def use(self, keys: Iterable[K]) -> None:
        self._used(keys, 1)

    def renew(self, keys: Iterable[K]) -> None:
        self._used(keys, 0)

    def resize(self, key: K, nbytes: int) -> None:
        entry = self._entries.get(key)
        if entry is None:
            return
        gain = entry.cost / max(nbytes, 1)
        worth, *others = entry.due
        entry.due = (worth + entry.uses * (gain - entry.gain), *others)
        entry.gain = gain
        if entry.inside and entry.due < entry.rank:  # what rises is brought up to date later
            self._heap.change(entry, entry.due)

    def _used(self, keys: Iterable[K], times: int) -> None:
        self._clock += 1
        entries, (behind, worth) = self._entries, self._behind
        self._behind = (0, 0.0)
        first = True
        for key in keys:
            if (entry := entries.get(key)) is not None:
                if first and entry.position != behind - 1:
                    worth = 0.0
                first = False
                entry.uses += times
                worth = self._rank(entry, worth)

    def hold(self, key: K) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.inside:
            self._heap.take_out(entry)

    def release(self, key: K, place: Place = Place.NEWEST) -> None:
        entry = self._entries[key]
        if not entry.inside:
            entry.rank = entry.due
            self._heap.push(entry)

    def victim(self, coming: Hashable | None = None) -> K | None:
        best: _Entry[K] | None = None
        for _ in range(MAX_MOVES):
            entry = self._heap.least()
            if entry is None:
                return None
            if best is None or entry.due < best.due:
                best = entry
            if entry.rank == entry.due:
                break
            self._heap.change(entry, entry.due)
        return best.key if best is not None else None

    def evict(self, key: K) -> None:
        if (entry := self._entries.get(key)) is not None:
            self._age = max(self._age, entry.due[0])
            self.remove(key)

    def remove(self, key: K) -> None:
        if (entry := self._entries.pop(key, None)) is not None and entry.inside:
            self._heap.take_out(entry)

    def may_evict(self, key: K) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.inside

    def _rank(self, entry: _Entry[K], least: float) -> float:
        """Set what is due to an entry now, at least ``least``; returns its worth."""
        worth = max(self._age + entry.uses * entry.gain, least)
        entry.due = (worth, -entry.position, self._clock)
        return worth
