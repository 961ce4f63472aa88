# SPDX-License-Identifier: Apache-2.0
"""What a policy remembers of entries that it has evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_DROPS = 8
"""Forgotten at once at most, so that no call is long; one is added a call."""


class Ghosts:
    """Identities of evicted entries with their sizes, oldest first."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()
        self.nbytes = 0

    def __contains__(self, name: Hashable) -> bool:
        return name in self._sizes

    def add(self, name: Hashable, nbytes: int) -> None:
        self.pop(name)
        self._sizes[name] = nbytes
        self.nbytes += nbytes

    def get(self, name: Hashable) -> int | None:
        """The size of the entry, None if it is not remembered."""
        return self._sizes.get(name)

    def pop(self, name: Hashable) -> int | None:
        """Forget one; its size, None if it was not remembered."""
        nbytes = self._sizes.pop(name, None)
        self.nbytes -= nbytes or 0
        return nbytes

    def trim(self, limit: float) -> None:
        """Forget the oldest until there are ``limit`` bytes, or some of them if there are many."""
        for _ in range(MAX_DROPS):
            if self.nbytes <= limit or not self._sizes:
                return
            self.nbytes -= self._sizes.popitem(last=False)[1]
