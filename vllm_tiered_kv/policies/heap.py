# SPDX-License-Identifier: Apache-2.0
"""A binary heap whose nodes know their place, so that any of them can be taken out in O(log n).

``heapq`` cannot do that, and the usual way around, leaving what is gone in the heap, has to clear
it away in one long walk sooner or later.
"""

from __future__ import annotations

from typing import Generic, TypeVar

N = TypeVar("N", bound="HeapNode")
OUTSIDE = -1


class HeapNode:
    """Something to be ordered: least :attr:`rank` first."""

    __slots__ = ("index", "rank")

    def __init__(self, rank: tuple[float, ...]) -> None:
        self.rank = rank
        self.index = OUTSIDE

    @property
    def inside(self) -> bool:
        return self.index != OUTSIDE


class Heap(Generic[N]):
    """A min-heap of nodes."""

    def __init__(self) -> None:
        self._nodes: list[N] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def least(self) -> N | None:
        return self._nodes[0] if self._nodes else None

    def push(self, node: N) -> None:
        """Put in a node that is not inside."""
        self._nodes.append(node)
        self._up(node, len(self._nodes) - 1)

    def take_out(self, node: N) -> None:
        """Take out a node that is inside."""
        index, node.index = node.index, OUTSIDE
        last = self._nodes.pop()
        if last is not node:
            self._settle(last, index)

    def change(self, node: N, rank: tuple[float, ...]) -> None:
        """Give a node that is inside another rank."""
        node.rank = rank
        self._settle(node, node.index)

    def _settle(self, node: N, index: int) -> None:
        self._up(node, self._down(node, index))

    def _up(self, node: N, index: int) -> None:
        nodes, rank = self._nodes, node.rank
        while index:
            above = nodes[(index - 1) >> 1]
            if above.rank <= rank:
                break
            nodes[index] = above
            above.index, index = index, above.index
        nodes[index] = node
        node.index = index

    def _down(self, node: N, index: int) -> int:
        """Move what is less up over the hole at ``index``; where the hole is then."""
        nodes, rank, end = self._nodes, node.rank, len(self._nodes)
        while (child := 2 * index + 1) < end:
            other = child + 1
            if other < end and nodes[other].rank < nodes[child].rank:
                child = other
            below = nodes[child]
            if below.rank >= rank:
                break
            nodes[index] = below
            below.index, index = index, child
        return index
