# SPDX-License-Identifier: Apache-2.0
"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic

from vllm_tiered_kv.policies.policy import Item, K, Place


class LRU(Generic[K]):
    """Evicts what was used longest ago. Knows only entries that are not held."""

    def __init__(self) -> None:
        self._order: OrderedDict[K, None] = OrderedDict()  # oldest first

    def add(self, key: K, item: Item) -> None:
        self._order[key] = None

    def use(self, keys: Iterable[K]) -> None:
        order = self._order
        for key in keys:
            if key in order:
                order.move_to_end(key)

    def renew(self, keys: Iterable[K]) -> None:
        self.use(keys)

    def resize(self, key: K, nbytes: int) -> None:
        """Sizes do not matter here."""

    def hold(self, key: K) -> None:
        self._order.pop(key, None)

    def release(self, key: K, place: Place = Place.NEWEST) -> None:
        self._order[key] = None
        if place is Place.OLDEST:
            self._order.move_to_end(key, last=False)

    def victim(self, coming: Hashable | None = None) -> K | None:
        return next(iter(self._order), None)

    def evict(self, key: K) -> None:
        self._order.pop(key, None)

    def remove(self, key: K) -> None:
        self._order.pop(key, None)

    def clear(self) -> None:
        self._order = OrderedDict()

    def may_evict(self, key: K) -> bool:
        return key in self._order
