# SPDX-License-Identifier: Apache-2.0
"""What of the CPU tier peers may read: the index tells what comes and goes, and asks first.

Scheduler thread only. The shelf is what the agent's thread lends from, without asking here. A chunk
that somebody reads is not evicted; one that has to go is held by a pin until nobody reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tiered_kv.scheduler.index import ABSENT, ChunkIndex, Node

if TYPE_CHECKING:
    from vllm_tiered_kv.remote.shelf import Shelf


class Shelving:
    """Keeps the shelf in step with the index.

    Args:
        shelf: what is lent from.
        index: the CPU tier's, still empty.
    """

    def __init__(self, shelf: Shelf[Node], index: ChunkIndex) -> None:
        self._shelf = shelf
        self._index = index
        index.guard(self)

    @property
    def lent_slots(self) -> int:
        return self._shelf.lent_slots

    # -- from the index ----------------------------------------------------------------

    def stored(self, node: Node) -> None:
        """A chunk can be offered; peers want all of it."""
        if ABSENT not in node.slots:
            self._shelf.offer(node.key, tuple(node.slots), node)

    def lets_go(self, node: Node) -> bool:
        """Whether a chunk can be evicted; if not, the index pins it until :meth:`take_in`."""
        return self._shelf.lets_go(node.key, node)

    def withdraws(self, node: Node) -> bool:
        """A chunk is not to be offered any more; whether the index pins it until then."""
        return self._shelf.withdraw(node.key, node)

    def clears(self) -> list[Node]:
        """Nothing is to be offered any more; what the index pins until then."""
        return self._shelf.clear()

    # -- from the agent ----------------------------------------------------------------

    def take_in(self) -> None:
        """Give up the pins on what nobody reads any more; costs nothing where there is none."""
        for node in self._shelf.take_returned():
            self._index.unpin(node)

    def close(self) -> None:
        """Lend nothing that comes either."""
        for node in self._shelf.clear(close=True):
            self._index.pin(node)
