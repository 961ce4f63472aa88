# SPDX-License-Identifier: Apache-2.0
"""When chunks were used, until it is written down for later starts and other processes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

MAX_USES = 1 << 16
"""Uses not yet written down; older ones are left out."""
STEP_NS = 1000
"""Between two chunks of a prefix: the head is the last to go."""


_K = TypeVar("_K", bound=Hashable)


class Uses(Generic[_K]):
    """The last use of each chunk, in the order of use."""

    def __init__(self) -> None:
        self._uses: OrderedDict[_K, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uses)

    def note(self, keys: Sequence[_K], now_ns: int) -> None:
        """Chunks were used; a prefix is given whole, tail first."""
        for i, key in enumerate(keys):
            self._uses[key] = now_ns + STEP_NS * i
            self._uses.move_to_end(key)
        while len(self._uses) > MAX_USES:
            self._uses.popitem(last=False)

    def take(self, count: int) -> list[tuple[_K, int]]:
        """The oldest ones, at most so many."""
        return [self._uses.popitem(last=False) for _ in range(min(count, len(self._uses)))]
