# SPDX-License-Identifier: Apache-2.0
"""Jobs the ranks are working on, and what their ends mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from vllm_tiered_kv.protocol import BlockCopy, JobResult, JobStatus
from vllm_tiered_kv.scheduler.index import Node
from vllm_tiered_kv.scheduler.pulls import ActivePull

_WORSE = {JobStatus.DONE: 0, JobStatus.LATE: 1, JobStatus.DROPPED: 2, JobStatus.FAILED: 3}


class _Job:
    """Counts one result a rank, however often it arrives."""

    __slots__ = ("nbytes", "ranks", "seconds", "status")

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.status = JobStatus.DONE
        self.nbytes = 0
        self.seconds = 0.0

    def _note(self, rank: int, result: JobResult) -> bool:
        if rank in self.ranks:
            return False
        self.ranks.add(rank)
        self.nbytes += result.nbytes
        self.seconds = max(self.seconds, result.seconds)
        if _WORSE[result.status] > _WORSE[self.status]:
            self.status = result.status
        return True


class ActiveStore(_Job):
    """A chunk on its way out of the device."""

    __slots__ = ("blocks", "extends", "is_lent", "node")

    def __init__(
        self,
        node: Node,
        blocks: tuple[int, ...],
        extends: tuple[int, ...] = (),
        *,
        is_lent: bool = False,
    ) -> None:
        super().__init__()
        self.node = node
        self.blocks = blocks
        self.extends = extends
        """The groups whose part is added to a chunk that is stored already; empty: a new one."""
        self.is_lent = is_lent
        """It goes to slots that are not in the index."""


class ActiveLoad(_Job):
    """A prefix on its way into a request's device blocks."""

    __slots__ = (
        "copies",
        "failed",
        "from_disk",
        "from_peers",
        "job",
        "nodes",
        "pull",
        "request_id",
        "sources",
        "stale",
        "tokens",
    )

    def __init__(
        self,
        request_id: str,
        nodes: tuple[Node, ...],
        copies: tuple[BlockCopy, ...],
        sources: tuple[int, ...],
        tokens: int,
    ) -> None:
        super().__init__()
        self.request_id = request_id
        self.nodes = nodes
        self.copies = copies
        self.sources = sources
        """For each copy the index in ``nodes`` it reads."""
        self.tokens = tokens
        self.from_disk = 0
        """Those of ``tokens`` that were read from disk for this load."""
        self.from_peers = 0
        """Those that were read out of other engines' CPU tiers for this load."""
        self.failed: set[int] = set()
        self.stale = False
        """Its bytes are from before a cache reset, or were read too late: it must end as failed."""
        self.job = 0
        """Its number, once it is in the ledger."""
        self.pull: ActivePull | None = None
        """What another engine hands over to it; not in :attr:`tokens`."""

    def _note(self, rank: int, result: JobResult) -> bool:
        fresh = super()._note(rank, result)
        if fresh:
            self.failed.update(i for i in result.failed if 0 <= i < len(self.copies))
            if self.pull is not None and result.pulled is not None:
                self.pull.note(rank, result.pulled)
        return fresh


class JobLedger:
    """All jobs under way. A job ends when every rank has reported it.

    Args:
        world_size: ranks that report each job.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._next = 0
        self.stores: dict[int, ActiveStore] = {}
        self._storing: Counter[Node] = Counter()
        self.loads: dict[int, ActiveLoad] = {}
        self._readers: dict[int, set[int]] = {}  # device block -> store jobs that read it

    def add_store(self, store: ActiveStore) -> int:
        job = self.number()
        self.stores[job] = store
        self._storing[store.node] += 1
        for block in store.blocks:
            self._readers.setdefault(block, set()).add(job)
        return job

    def add_load(self, load: ActiveLoad) -> int:
        job = load.job = self.number()
        self.loads[job] = load
        return job

    def is_storing(self, node: Node) -> bool:
        """Whether a store writes to a node's slots."""
        return node in self._storing

    def has_readers(self, block: int) -> bool:
        """Whether a store still reads a device block."""
        return block in self._readers

    def void_readers(self, block: int) -> Iterable[int]:
        """Store jobs that still read a device block; none of them may end well any more.

        Decided here and not by the ranks: a rank may see a fence before the job it is for,
        when both travel with one plan, or after a runner has zeroed the block.
        """
        jobs = self._readers.get(block, ())
        for job in jobs:
            self.stores[job].status = JobStatus.DROPPED
        return jobs

    def store_result(self, rank: int, result: JobResult) -> ActiveStore | None:
        """Note one rank's result; returns the store when it was the last one missing."""
        store = self.stores.get(result.job)
        if store is None or not store._note(rank, result) or len(store.ranks) < self._world_size:
            return None
        del self.stores[result.job]
        self._storing[store.node] -= 1
        if not self._storing[store.node]:
            del self._storing[store.node]
        for block in store.blocks:
            readers = self._readers[block]
            readers.discard(result.job)
            if not readers:
                del self._readers[block]
        return store

    def load_result(self, rank: int, result: JobResult) -> ActiveLoad | None:
        """Note one rank's result; returns the load when it was the last one missing."""
        load = self.loads.get(result.job)
        if load is None or not load._note(rank, result) or len(load.ranks) < self._world_size:
            return None
        del self.loads[result.job]
        return load

    def number(self) -> int:
        """The next job's, never given twice."""
        self._next += 1
        return self._next
