# SPDX-License-Identifier: Apache-2.0
"""What of the CPU tier peers may read: the index tells what comes and goes, and asks first.

Scheduler thread only. The shelf is what the agent's thread lends from, without asking here. A chunk
that somebody reads is not evicted; one that has to go is held by a pin until nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.scheduler.index import ABSENT, ChunkIndex, Node

if TYPE_CHECKING:
    from vllm_tiered_kv.protocol import RankSums, SlotSumJob
    from vllm_tiered_kv.remote.shelf import Shelf
    from vllm_tiered_kv.scheduler.shelf_sums import ShelfSums


class Shelving:
    """Keeps the shelf in step with the index.

    Args:
        shelf: what is lent from.
        index: the CPU tier's, still empty.
        sums: what chunks must have before they are lent; None: they need none.
    """

    def __init__(
        self, shelf: Shelf[Node], index: ChunkIndex, sums: ShelfSums | None = None
    ) -> None:
        self._shelf = shelf
        self._index = index
        self._sums = sums
        index.guard(self)

    @property
    def lent_slots(self) -> int:
        return self._shelf.lent_slots

    @property
    def summing(self) -> int:
        """Chunks that are not lent yet, for want of checksums."""
        return len(self._sums) if self._sums is not None else 0

    # -- from the index ----------------------------------------------------------------

    def stored(self, node: Node) -> None:
        """A chunk can be offered; peers want all of it."""
        if ABSENT in node.slots:
            return
        if self._sums is not None:
            self._sums.want(node)
        else:
            self._shelf.offer(node.key, node.slots, node)

    def lets_go(self, node: Node) -> bool:
        """Whether a chunk can be evicted; if not, the index pins it until :meth:`take_in`."""
        if self._sums is not None:
            self._sums.forget(node)
        return self._shelf.lets_go(node.key, node)

    def withdraws(self, node: Node) -> bool:
        """A chunk is not to be offered any more; whether the index pins it until then."""
        if self._sums is not None:
            self._sums.forget(node)
        return self._shelf.withdraw(node.key, node)

    def clears(self) -> list[Node]:
        """Nothing is to be offered any more; what the index pins until then."""
        if self._sums is not None:
            self._sums.clear()
        return self._shelf.clear()

    # -- from and for the ranks --------------------------------------------------------

    def take_orders(self) -> Sequence[SlotSumJob]:
        """Checksums that the ranks are to make; each order once."""
        return self._sums.take_orders() if self._sums is not None else ()

    def made(self, rank: int, sums: RankSums) -> None:
        """A rank has made some."""
        for node, made in self._sums.made(rank, sums) if self._sums is not None else ():
            self._shelf.offer(node.key, node.slots, node, made)

    # -- from the agent ----------------------------------------------------------------

    def take_in(self) -> None:
        """Give up the pins on what nobody reads any more; costs nothing where there is none."""
        for node in self._shelf.take_returned():
            self._index.unpin(node)

    def close(self) -> None:
        """Lend nothing that comes either."""
        self._sums = None
        for node in self._shelf.clear(close=True):
            self._index.pin(node)
