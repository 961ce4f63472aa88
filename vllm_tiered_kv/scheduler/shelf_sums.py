# SPDX-License-Identifier: Apache-2.0
"""Checksums of chunks that are to be lent: the ranks make them, some chunks at a time.

Scheduler thread only. What peers ask for plays no part: each chunk is read once, when it has come
into the tier, so nobody can have an engine read more than it stores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from vllm_tiered_kv.protocol import RankSums, SlotSumJob
from vllm_tiered_kv.remote.messages import SUM_BYTES
from vllm_tiered_kv.scheduler.index import Node, NodeState

PIECE = 16
"""Chunks in one order."""
MAX_ORDERS = 4
"""At once: what a rank has read from a peer, and a request waits for, is compared behind these."""


class _Order:
    __slots__ = ("by_rank", "nodes", "slots")

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.slots = [node.slots for node in nodes]
        """When it was given: what a node has since then was not read."""
        self.by_rank: dict[int, tuple[bytes, ...]] = {}


class ShelfSums:
    """Orders checksums.

    Args:
        ranks: that make them.
        groups: KV cache groups.
        number: gives the next job's number.
    """

    def __init__(self, ranks: int, groups: int, number: Callable[[], int]) -> None:
        self._ranks = ranks
        self._groups = groups
        self._number = number
        self._waiting: OrderedDict[Node, None] = OrderedDict()
        self._orders: dict[int, _Order] = {}

    def __len__(self) -> int:
        """Chunks that have none yet."""
        return len(self._waiting) + sum(len(order.nodes) for order in self._orders.values())

    def want(self, node: Node) -> None:
        """A chunk has come into the tier."""
        self._waiting[node] = None

    def forget(self, node: Node) -> None:
        """It has left the tier."""
        self._waiting.pop(node, None)

    def clear(self) -> None:
        """All have."""
        self._waiting.clear()
        for order in self._orders.values():
            order.nodes = ()  # which do not tell that they have left

    def take_orders(self) -> list[SlotSumJob]:
        """What the ranks are to do next; each once."""
        orders = []
        while self._waiting and len(self._orders) < MAX_ORDERS:
            count = min(PIECE, len(self._waiting))
            order = _Order([self._waiting.popitem(last=False)[0] for _ in range(count)])
            job = self._number()
            self._orders[job] = order
            orders.append(SlotSumJob(job, tuple(zip(*order.slots, strict=True))))
        return orders

    def made(self, rank: int, sums: RankSums) -> list[tuple[Node, bytes]]:
        """A rank has done what it was told to.

        Returns:
            Chunks that all ranks have made checksums of and that are still there, and these, see
            `remote.messages.ChunkSums`.
        """
        order = self._orders.get(sums.number)
        if order is None:
            return []
        order.by_rank[rank] = sums.groups
        if len(order.by_rank) < self._ranks:
            return []
        del self._orders[sums.number]
        parts = [part for rank in sorted(order.by_rank) for part in order.by_rank[rank]]
        expected = [len(order.nodes) * SUM_BYTES] * (self._ranks * self._groups)
        if list(map(len, parts)) != expected:
            return []  # a rank could not; it has said so
        return [
            (node, b"".join([part[i * SUM_BYTES : (i + 1) * SUM_BYTES] for part in parts]))
            for i, node in enumerate(order.nodes)
            if node.state is NodeState.READY and node.slots == order.slots[i]
        ]
