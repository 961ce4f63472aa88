# SPDX-License-Identifier: Apache-2.0
"""What is read into slots for look-ups, from disk or from other engines. Scheduler thread only.

A look-up that finds more in a slow source than in the CPU tier is asked to come back. Each time it
does, a piece of what it waits for is ordered: no step of the engine pays for a long prompt at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from vllm_tiered_kv.bits import bit_mask, bits_of
from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.scheduler.fetch import Fetch, Look, possible_ends
from vllm_tiered_kv.scheduler.groups import parts_needed
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node, NodeState
from vllm_tiered_kv.tiers.disk.orders import Outcome, Part, ReadOrder

if TYPE_CHECKING:
    from vllm_tiered_kv.tiers.disk.agent import DiskAgent

FETCH_SHARE = 0.75
"""Share of the slots that may be held for look-ups that wait for files: stores need some too."""
MAX_READS = 8192
"""Reads under way at once."""
PIECE = 64
"""Chunks ordered at a time."""


class Source(Protocol):
    """Where chunks can be read from into slots."""

    @property
    def is_readable(self) -> bool: ...

    def groups(self, key: bytes) -> int:
        """The groups whose part of a chunk is there, as bits."""

    def masks(self, keys: Sequence[bytes]) -> Iterable[int]:
        """The same of several chunks, each looked up when it is asked for."""

    def read(self, orders: Sequence[ReadOrder]) -> bool:
        """Begin to read; False if nothing of it is begun."""

    def cancel(self, jobs: Sequence[int]) -> None:
        """Nobody waits for these any more."""


MAX_LOOKS = 64
"""Requests at once for which other engines' files are looked for."""
LOOK_GROWTH = 8
"""By how much more is looked for next where all was there."""


class _Read:
    __slots__ = ("fetch", "groups", "is_new", "node")

    def __init__(self, node: Node, groups: tuple[int, ...], fetch: Fetch, *, is_new: bool) -> None:
        self.node = node
        self.fetch = fetch
        self.groups = groups
        self.is_new = is_new


class SlotReads:
    """Orders reads of chunks into slots; each has a pin on its chunk.

    Args:
        source: where they come from.
        index: the CPU tier's.
        geometry: the cut.
        max_held: slots that may be held for look-ups.
        number: gives the next job's number.
        patience: seconds a read may wait before it begins.
        piece: chunks ordered at a time.
    """

    def __init__(
        self,
        source: Source,
        index: ChunkIndex,
        geometry: Geometry,
        max_held: int,
        number: Callable[[], int],
        patience: float,
        piece: int = PIECE,
    ) -> None:
        self._source = source
        self._piece = piece
        self._index = index
        self._geometry = geometry
        self._number = number
        self._patience = patience
        self._reads: dict[int, _Read] = {}
        self._max_held = max_held
        self.held = 0
        """Slots set aside for look-ups."""

    def __len__(self) -> int:
        return len(self._reads)

    # -- what is there -----------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], first: int, start: int, usable: int) -> Fetch | None:
        """Plan to read what is there and makes a longer hit.

        Args:
            keys: of the prompt's chunks.
            first: the first chunk that the device does not hold whole.
            start: tokens the device holds.
            usable: chunks from ``first`` on that the CPU tier alone can give.

        Returns:
            What to wait for: :meth:`goes_on` orders it, :meth:`release` gives it up. None: there
            is nothing to read.
        """
        if not self._source.is_readable:
            return None
        could = self._survey(keys, first, usable if self._geometry.keeps_all else 0)
        room = self._max_held - self.held
        ends = possible_ends(self._geometry, could, first, start, room)
        if not ends or ends[-1] <= usable:
            return None
        end = ends[-1]
        needed = parts_needed(self._geometry, end, first, start)
        slots = end * len(self._geometry.groups)
        self.held += slots
        parent = self._index.get(keys[first - 1]) if first else None
        return Fetch(keys[first : first + end], needed, parent, slots, ends)

    def _survey(self, keys: Sequence[bytes], first: int, known: int) -> list[int]:
        """For chunks from ``first`` on, as bits: the groups that are here or there.

        Ends before the first chunk that lacks a part which every chunk of a prefix needs; of the
        first ``known`` chunks it is known that they have those.
        """
        always = self._geometry.full_groups
        could = [always] * known
        get, simple = self._index.get, self._geometry.keeps_all
        rest = keys[first + known :]
        for key, mask in zip(rest, self._source.masks(rest), strict=True):
            if not simple or mask != always:
                node = get(key)
                if node is not None:
                    mask |= mask_of(node)
                if mask & always != always or not mask:
                    break
            could.append(mask)
        return could

    # -- ordering ----------------------------------------------------------------------

    def goes_on(self, fetch: Fetch) -> bool:
        """Order the next piece; whether anything is still on its way."""
        if fetch.is_ordered:
            return fetch.is_under_way
        orders: list[ReadOrder] = []
        end = fetch.next + self._piece
        while not fetch.is_ordered and fetch.next < end and len(self._reads) < MAX_READS:
            if not self._bring(fetch, orders):
                fetch.stop()  # no room for more: what comes before it is still worth having
        if orders and not self._source.read(orders):
            fetch.stop()
            for order in orders:
                self.ended(order.job, Outcome.DROPPED)
        return fetch.is_under_way

    def cut(self, fetch: Fetch, chunks: int, first: int, start: int) -> None:
        """Of a fetch of which nothing was ordered, only the head is wanted.

        Args:
            chunks: one of its ends.
            first: the first chunk.
            start: tokens the device holds.
        """
        if chunks == len(fetch.keys):
            return
        fetch.keys = fetch.keys[:chunks]
        fetch.needed = parts_needed(self._geometry, chunks, first, start)
        slots = chunks * len(self._geometry.groups)
        self.held -= fetch.slots - slots
        fetch.slots = slots

    def release(self, fetch: Fetch) -> None:
        """Nobody waits for it any more."""
        fetch.stop()
        for node in fetch.nodes:
            self._index.unpin(node)
        # A read that only holds its own pin now is of no use to another look-up either.
        jobs = [job for job in fetch.jobs if job in self._reads and self._reads[job].node.pins == 1]
        if jobs:
            self._source.cancel(jobs)
        self.held -= fetch.slots
        fetch.nodes = []
        fetch.slots = 0

    def _bring(self, fetch: Fetch, orders: list[ReadOrder]) -> bool:
        """Order what is missing of the next chunk; False if it cannot be had."""
        index = self._index
        key, needed = fetch.keys[fetch.next], fetch.needed[fetch.next]
        node = index.get(key)
        missing = needed
        if node is not None:
            index.adopt(node, fetch.parent)
            missing = needed & ~mask_of(node)
            if not missing or node.state is not NodeState.READY:
                index.pin(node)
                fetch.takes(node)
                return True
        if missing & ~self._source.groups(key):
            return False  # it has gone since
        groups = bits_of(missing)
        is_new = node is None
        if node is None:
            node = index.reserve(key, fetch.parent, groups)
            if node is None:
                return False
            fetch.added.add(node)
            slots: Sequence[int] | dict[int, int] = node.slots
        elif index.extend(node, groups):
            slots = node.coming
        else:
            return False
        index.pin(node)
        fetch.read.add(node)
        if missing:
            job = self._number()
            self._reads[job] = _Read(node, groups, fetch, is_new=is_new)
            parts = tuple([Part(group, slots[group]) for group in groups])
            orders.append(ReadOrder(job, key, parts, self._patience))
            fetch.jobs.append(job)
        else:  # a window has passed it by: it only links what comes after
            index.commit(node)
            index.unpin(node)
        fetch.takes(node)
        return True

    # -- what came of it ---------------------------------------------------------------

    def __contains__(self, job: int) -> bool:
        return job in self._reads

    def node(self, job: int) -> Node:
        """The chunk that a read under way brings."""
        return self._reads[job].node

    def ended(self, job: int, outcome: Outcome, at: float | None = None) -> None:
        """A read has ended on every rank, at that time."""
        read = self._reads.pop(job)
        index, node, fetch = self._index, read.node, read.fetch
        good = outcome is Outcome.DONE
        fetch.arrived += good
        fetch.failed += not good
        fetch.ended_at = at
        if not read.is_new:
            index.extended(node, read.groups, arrived=good)
            return
        if good:
            index.commit(node)
        else:
            index.discard(node)
        index.unpin(node)


class DiskReads(SlotReads):
    """Reads of files, and looks for files that other engines may have written.

    Args:
        agent: runs the tier.
        index: the CPU tier's.
        geometry: the cut.
        num_slots: slots of the CPU tier.
        number: gives the next job's number.
        patience: seconds a look-up waits for its files.
    """

    def __init__(
        self,
        agent: DiskAgent,
        index: ChunkIndex,
        geometry: Geometry,
        num_slots: int,
        number: Callable[[], int],
        patience: float,
    ) -> None:
        most = max(1, int(FETCH_SHARE * num_slots))
        super().__init__(agent, index, geometry, most, number, patience)
        self._agent = agent
        self._looks: set[int] = set()

    def look(self, look: Look, keys: Sequence[bytes], first: int) -> bool:
        """Whether it is being seen what other engines have written of a prompt."""
        if look.job in self._looks:
            return True
        if not self._agent.is_readable or len(self._looks) >= MAX_LOOKS:
            return False
        known = max(0, look.reach - first)
        reach = first + len(self._survey(keys, first, known))
        if reach >= len(keys) or reach <= look.reach:
            return False  # all is there, or what was looked for is not
        if look.reach >= 0:
            look.count *= LOOK_GROWTH
        job = self._number()
        if not self._agent.look_for(job, keys[reach : reach + look.count]):
            return False
        self._looks.add(job)
        look.job, look.reach = job, reach
        return True

    def looked(self, job: int) -> bool:
        """Whether this was a look for other engines' files; it is over."""
        if job not in self._looks:
            return False
        self._looks.discard(job)
        return True


def mask_of(node: Node) -> int:
    """Bit ``g``: the chunk has group ``g``'s part, or it is on its way."""
    return node.parts | bit_mask(node.coming) if node.coming else node.parts
