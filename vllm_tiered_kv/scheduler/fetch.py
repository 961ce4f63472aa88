# SPDX-License-Identifier: Apache-2.0
"""Where a hit can end that is read from disk: a pure function, and what a look-up awaits."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.scheduler.groups import ends_by_parts
from vllm_tiered_kv.scheduler.index import Node


class Fetch:
    """What one look-up waits for, ordered piece by piece. Mutable; scheduler thread only.

    Args:
        keys: of the chunks that make the hit, head first.
        needed: for each of them the groups whose part is needed, as bits.
        parent: the node of the chunk before the first.
        slots: slots that are set aside for it, of those that look-ups may hold.
        ends: how many of the chunks would make a hit as well, and all.
    """

    __slots__ = (
        "_waiting",
        "added",
        "ahead",
        "arrived",
        "ended_at",
        "ends",
        "failed",
        "jobs",
        "keys",
        "needed",
        "next",
        "nodes",
        "ordered_at",
        "over",
        "parent",
        "read",
        "slots",
    )

    def __init__(
        self,
        keys: Sequence[bytes],
        needed: Sequence[int],
        parent: Node | None,
        slots: int,
        ends: Sequence[int] = (),
    ) -> None:
        self.keys = keys
        self.ends = ends
        self.needed = needed
        self.parent = parent
        self.slots = slots
        self.next = 0
        """The first chunk that was not come to."""
        self.nodes: list[Node] = []
        """The chunks before it, head first; each is pinned."""
        self.jobs: list[int] = []
        """Reads that were ordered for it."""
        self.read: set[Node] = set()
        """The chunks that come from disk."""
        self.added: set[Node] = set()
        """Those of them that came into the index for it."""
        self.over = False
        """It is not waited for any more: what has arrived is offered."""
        self._waiting: list[Node] = []
        self.ordered_at: float | None = None
        """When its first read was ordered, if it was noted."""
        self.ahead = 0
        """Reads that were under way then."""
        self.arrived = 0
        """Reads that were ordered for it and have ended well."""
        self.failed = 0
        self.ended_at: float | None = None
        """When the last of its reads ended."""

    @property
    def is_ordered(self) -> bool:
        """Whether all has been ordered that will be."""
        return self.next >= len(self.keys)

    def stop(self) -> None:
        """Order no more."""
        self.keys = self.keys[: self.next]

    def takes(self, node: Node) -> None:
        """The next chunk is this one; it has been pinned."""
        self.nodes.append(node)
        self.parent = node
        self.next += 1
        if node.is_arriving:
            self._waiting.append(node)

    @property
    def is_under_way(self) -> bool:
        """Whether any chunk is still on its way; costs next to nothing when asked again."""
        if not self.is_ordered:
            return True
        while self._waiting and not self._waiting[-1].is_arriving:
            self._waiting.pop()
        return bool(self._waiting)


class Look:
    """What one request has had looked for: chunks that other engines may have written."""

    __slots__ = ("count", "job", "over", "reach")

    def __init__(self) -> None:
        self.job: int | None = None
        self.reach = -1
        """The first chunk that was looked for; what comes before it is there."""
        self.count = 1
        """So many are looked for next: one, and where it is there many."""
        self.over = False


def possible_ends(
    geometry: Geometry, could: Sequence[int], first: int, start: int, room: int
) -> Sequence[int]:
    """How many chunks of a run can be loaded together: all the ways, shortest first.

    Args:
        geometry: the cut.
        could: for chunks ``first, first + 1, ...``: bit ``g`` where group ``g``'s part can be had;
            the run ends before a chunk that lacks what is needed of all.
        first: index of the first chunk.
        start: tokens the device holds; in or before chunk ``first``.
        room: slots that may be taken.
    """
    most = room // len(geometry.groups)
    if geometry.keeps_all:
        return range(1, min(len(could), most) + 1)
    return list(ends_by_parts(geometry, could[:most], first, start))
