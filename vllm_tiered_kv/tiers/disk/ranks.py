# SPDX-License-Identifier: Apache-2.0
"""Saying things to all ranks: when they may begin, and what is ordered. No socket of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from vllm_tiered_kv.tiers.disk.orders import (
    MAX_ORDERS,
    OpenFolder,
    Order,
    ReadOrder,
    WriteOrder,
)

PATIENCE = 60.0
"""Seconds until it is said that ranks do not come."""


class Ranks:
    """The ranks of the engine.

    Args:
        count: so many.
        send: sends orders to a rank; False if it cannot be reached.
    """

    def __init__(self, count: int, send: Callable[[int, Sequence[Order]], bool]) -> None:
        self._count = count
        self._send = send
        self._here = 0
        self._late_at: float | None = None
        self.are_open = False
        """Whether all of them know the folder."""
        self.are_late = False
        """Whether some have not come although others have, or there is work for them."""

    @property
    def here(self) -> int:
        """So many have said hello."""
        return self._here

    def connected(self, ranks: int, now: float) -> None:
        """So many have said hello, maybe some of them again: who is new has not been told."""
        self._here = ranks
        self.are_open = False
        if ranks == self._count:
            self.are_late = False
        else:
            self.expected(now)

    def expected(self, now: float) -> None:
        """A step has been made: all ranks should come."""
        if self._late_at is None and self._here < self._count:
            self._late_at = now + PATIENCE

    def become_late(self, now: float) -> bool:
        """Whether it is known since now that some do not come."""
        if self._late_at is None or now < self._late_at or self._here == self._count:
            return False
        self._late_at = math.inf
        self.are_late = True
        return True

    def open(self, opening: OpenFolder) -> None:
        """Tell all of them, once they are there."""
        if not self.are_open and self._here == self._count:
            self.are_open = all(self._send(rank, [opening]) for rank in range(self._count))

    def tell(self, orders: Sequence[Order]) -> Iterator[tuple[int, int]]:
        """Send orders to every rank.

        Returns:
            Ranks that cannot be reached, each with the number of an order it did not get. To be
            gone through to its end.
        """
        for i in range(0, len(orders), MAX_ORDERS):
            piece = orders[i : i + MAX_ORDERS]
            for rank in range(self._count):
                if self._send(rank, piece):
                    continue
                for order in piece:
                    if isinstance(order, ReadOrder | WriteOrder):
                        yield rank, order.job
