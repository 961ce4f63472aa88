# SPDX-License-Identifier: Apache-2.0
"""The scheduler half's side of the disk tier: what is written there, and what becomes of it all.

Scheduler thread only. Everything slow is the agent's; here are its orders under way, each with a
pin on its chunk: a slot that a file is read into or written from is nobody else's.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_tiered_kv import metrics
from vllm_tiered_kv.bits import bit_mask, bits_of
from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.scheduler.events import TierEvents
from vllm_tiered_kv.scheduler.index import ABSENT, ChunkIndex, Node, NodeState
from vllm_tiered_kv.scheduler.reads import DiskReads, mask_of
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.format import ChunkFacts
from vllm_tiered_kv.tiers.disk.orders import Outcome, Part, WriteOrder

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import Request
    from vllm_tiered_kv.tiers.disk.agent import DiskAgent

TIER = "disk"
SWEEP = 256
"""Announced chunks looked at again in a step where it is not known which of them have gone."""
MAX_RENEWED = 1 << 12
"""Chunks of a prefix that are made the newest when its last has been written."""
MAX_HASHES = 128
"""Block hashes said of a chunk: about what a file's header has room for."""


class Since(enum.Enum):
    """From when on what was stored is not to be offered any more."""

    EVER = "ever"  # the weights may have changed: files say nothing about those in memory
    THIS_START = "this start"  # something stored since may be wrong


class _Write(NamedTuple):
    node: Node
    above: bytes
    """The key of the chunk before it; empty where that is not known."""


class DiskPlanner:
    """Orders reads and writes of chunks.

    Args:
        agent: runs the tier.
        index: the CPU tier's.
        geometry: the cut.
        num_slots: slots of the CPU tier.
        number: gives the next job's number.
        tally: takes counts.
        patience: seconds a look-up waits for its files.
        admission: which chunks are written.
        events: publishes the tier; None where KV events are off.
    """

    def __init__(
        self,
        agent: DiskAgent,
        index: ChunkIndex,
        geometry: Geometry,
        num_slots: int,
        number: Callable[[], int],
        tally: metrics.Tally,
        patience: float,
        admission: Admission,
        events: TierEvents | None = None,
    ) -> None:
        self.agent = agent
        self.lookups = DiskReads(agent, index, geometry, num_slots, number, patience)
        self.events = events
        self._index = index
        self._geometry = geometry
        self._number = number
        self._tally = tally
        self._admission = admission
        self._writes: dict[int, _Write] = {}
        self._writing: Counter[bytes] = Counter()
        self._above: Counter[bytes] = Counter()
        """Chunks, by how many of those right behind them are being written."""
        self._used_ns = 0
        self._evicted = 0
        self._to_sweep = 0
        """Announced chunks still to be looked at again."""
        self._asked: tuple[Node, bool] | None = None

    @property
    def writes(self) -> int:
        """Chunks being written, or waiting for it."""
        return len(self._writes)

    @property
    def reads(self) -> int:
        return len(self.lookups)

    # -- writing -----------------------------------------------------------------------

    def begin(self, used_ns: int) -> None:
        """Another request's chunks are looked at: a chunk of both is seen once more.

        Args:
            used_ns: since when it uses them, nanoseconds since the epoch.
        """
        self._asked = None
        self._used_ns = used_ns

    def storing(
        self, job: int, node: Node, groups: Iterable[int], request: Request, chunk: int
    ) -> None:
        """A store is under way; what it brings is to be written when it has ended well.

        Args:
            job: the store's.
            node: the chunk.
            groups: whose parts are stored.
            request: whose chunk it is.
            chunk: its index there.
        """
        self._say(node.key, request, chunk)
        if self.agent.is_closed or not self._admits(node, request.num_tokens):
            return
        order = self._order(job, node, groups, request, chunk)
        if order is None:
            return
        if self._may_write() and self.agent.expect(order):
            self._begin_write(job, node, request, chunk)
        else:
            self._count("dropped")

    def store_ended(self, job: int, *, good: bool) -> None:
        """A store has ended, or will not be trusted whatever it says."""
        if job in self._writes and self.agent.settle(job, good=good):
            self._count("dropped")
            self._end_write(job)

    def found(self, node: Node, request: Request, chunk: int) -> None:
        """A chunk is in use again: have it written if it is not on disk; see :meth:`storing`."""
        self._say(node.key, request, chunk)
        if node.state is not NodeState.READY or node.key in self._writing:
            return
        missing = mask_of(node) & ~self.agent.groups(node.key) & ~bit_mask(node.coming)
        if not missing or self.agent.is_closed or not self._admits(node, request.num_tokens):
            return
        job = self._number()
        order = self._order(job, node, bits_of(missing), request, chunk)
        if order is None:
            return
        if self._may_write() and self.agent.write(order):
            self._begin_write(job, node, request, chunk)
        else:
            self._count("dropped")

    def used(self, keys: Sequence[bytes], *, again: Sequence[bytes] = ()) -> None:
        """A prefix is in use: it goes from the folder after what is not.

        Args:
            keys: its chunks that are used once more, head first.
            again: those before them, whose use by this request was told, head first.
        """
        self.agent.used_now(keys[::-1], again[::-1])

    def _say(self, key: bytes, request: Request, chunk: int) -> None:
        """Announce what lies on disk of a chunk in use: who wrote it may be long gone."""
        if self.events is not None:
            self.events.there(key, self.agent.groups(key), request, chunk)

    def _admits(self, node: Node, prefix_tokens: int) -> bool:
        if not self._admission.keeps(prefix_tokens):
            return False
        if self._asked is None or self._asked[0] is not node:  # several parts are one sighting
            self._asked = (node, self._admission.admits(node.key))
        return self._asked[1]

    def _may_write(self) -> bool:
        return self.agent.is_writable and len(self._writes) < self.agent.settings.max_queued

    def _order(
        self, job: int, node: Node, groups: Iterable[int], request: Request, chunk: int
    ) -> WriteOrder | None:
        there = self.agent.groups(node.key)
        parts = tuple(
            Part(group, node.coming.get(group, node.slots[group]))
            for group in groups
            if not there >> group & 1
        )
        if not parts or any(part.slot == ABSENT for part in parts):
            return None
        used_ns = max(0, self._used_ns - 1000 * chunk)  # the tail of a prefix goes first
        facts = chunk_facts(request, chunk, self._geometry)
        return WriteOrder(job, node.key, parts, facts, used_ns)

    def _begin_write(self, job: int, node: Node, request: Request, chunk: int) -> None:
        self._index.pin(node)
        above = node.parent.key if node.parent is not None else b""
        self._writes[job] = _Write(node, above)
        self._writing[node.key] += 1
        self._above[above] += 1
        if self.events is not None:
            self.events.storing(node.key, request, chunk)

    def _end_write(self, job: int) -> None:
        node, above = self._writes.pop(job)
        _count_down(self._writing, node.key)
        _count_down(self._above, above)
        if node.key not in self._above and node.key not in self._writing:
            self._renew(node)
        self._index.unpin(node)
        if self.events is not None:
            self.events.log.ended(node.key, self.agent.groups(node.key))

    def _renew(self, node: Node | None) -> None:
        """The last of a prefix has been written: what was written before it is not older."""
        keys: list[bytes] = []
        while node is not None and node.state is not NodeState.GONE and len(keys) < MAX_RENEWED:
            keys.append(node.key)
            node = node.parent
        if len(keys) > 1:
            self.agent.renew(keys)

    # -- what came of it ---------------------------------------------------------------

    def take_in(self) -> None:
        """Take in the orders that have ended; at the start of every hook."""
        for ended in self.agent.take():
            if ended.job in self.lookups:
                self._read_ended(ended)
            elif ended.job in self._writes:
                self._write_ended(ended)
            else:
                self.lookups.looked(ended.job)
        for kind in self.agent.take_failures():
            self._tally.add(metrics.FAILURES.key(kind))
        if self.events is not None:
            self._take_back(self.events)

    def _read_ended(self, ended: Ended) -> None:
        if ended.outcome is Outcome.DONE:
            self._count_copy("load", ended)
            self._count("loaded")
        elif ended.outcome is not Outcome.DROPPED:
            self._count("failed")
        self.lookups.ended(ended.job, ended.outcome, ended.at)

    def _write_ended(self, ended: Ended) -> None:
        if ended.outcome is Outcome.DONE:
            self._count_copy("store", ended)
            self._count("stored")
        else:
            self._count("dropped" if ended.outcome is Outcome.DROPPED else "failed")
        self._end_write(ended.job)

    def _take_back(self, events: TierEvents) -> None:
        """Have it said which chunks, or parts of them, have gone from disk."""
        keys, missed = self.agent.take_gone()
        if missed:
            self._to_sweep = len(events.log.told)
        if self._to_sweep:
            keys += events.log.oldest(SWEEP)
            self._to_sweep = max(0, self._to_sweep - SWEEP)
        for key in keys:
            events.log.reduced(key, self.agent.groups(key))

    def forget(self, since: Since) -> None:
        """Offer nothing of what was stored, and write nothing that is on its way."""
        for job in list(self._writes):
            self.store_ended(job, good=False)
        if since is Since.THIS_START:
            self.agent.purge()
            return
        self.agent.close()
        if self.events is not None:
            self.events.log.cleared()

    # -- figures -----------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        agent = self.agent
        if (evicted := agent.evicted) != self._evicted:
            self._count("evicted", evicted - self._evicted)
            self._evicted = evicted
        return {
            metrics.CAPACITY.key(TIER): float(agent.settings.capacity),
            metrics.USAGE.key(TIER): float(agent.used),
            metrics.DEGRADED.key(TIER): float(agent.is_degraded),
            metrics.IN_FLIGHT.key("write"): float(len(self._writes)),
            metrics.IN_FLIGHT.key("read"): float(self.reads),
        }

    def _count(self, event: str, count: int = 1) -> None:
        self._tally.add(metrics.CHUNKS.key(event, TIER), count)

    def _count_copy(self, direction: str, ended: Ended) -> None:
        self._tally.add(metrics.BYTES.key(direction, TIER), ended.nbytes)
        self._tally.add(metrics.SECONDS.key(direction, TIER), ended.seconds)


def _count_down(counts: Counter[bytes], key: bytes) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def chunk_facts(request: Request, chunk: int, geometry: Geometry) -> ChunkFacts:
    """What a file says of its chunk."""
    count = geometry.hashes_per_chunk
    first = chunk * count
    hashes = tuple(request.block_hashes[first : first + min(count, MAX_HASHES)])
    return ChunkFacts(hashes, count, chunk, geometry.chunk_tokens)
