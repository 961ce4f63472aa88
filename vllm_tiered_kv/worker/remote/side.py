# SPDX-License-Identifier: Apache-2.0
"""One rank's part in hand-overs: its pages for peers to read, and loads that come from peers.

Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from vllm_tiered_kv.geometry import GroupGeometry
from vllm_tiered_kv.layout import LayoutError
from vllm_tiered_kv.protocol import (
    Direction,
    JobResult,
    JobStatus,
    LoadJob,
    PullResult,
    RankSums,
    RemoteSetup,
    SlotRead,
    SlotReadEnd,
    StepPlan,
)
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import Heads, RankLayout
from vllm_tiered_kv.remote.transport import (
    Endpoint,
    MemoryKind,
    Options,
    Region,
    TransportError,
    open_transport,
)
from vllm_tiered_kv.worker.remote.checksums import Checker
from vllm_tiered_kv.worker.remote.layout import OwnSlots
from vllm_tiered_kv.worker.remote.opening import Opening
from vllm_tiered_kv.worker.remote.pulls import OwnPages, Pulls, both, own_pages, rank_layout
from vllm_tiered_kv.worker.remote.summing import Summing

OPEN_WAIT = 10.0
"""Seconds the step that opens the transport waits for it; later ones look whether it is there."""
QUARANTINE_SHARE = 0.25
"""Of the pages; see `Options`."""


class Said(NamedTuple):
    """What the scheduler half has to know."""

    layout: RankLayout | None
    endpoint: Endpoint | None
    settled: tuple[int, ...]
    sums: tuple[RankSums, ...]
    reads: tuple[SlotReadEnd, ...]
    slot_sums: tuple[RankSums, ...]

    def __bool__(self) -> bool:
        news = self.settled or self.sums or self.reads or self.slot_sums
        return self.layout is not None or bool(news)


class RemoteSide:
    """Serves and pulls.

    Args:
        rank: this worker's rank.
        groups: the geometry's groups.
        group_layers: the layer names of each.
        num_blocks: device blocks.
        heads: KV heads of this rank, by group.
        fail: takes each kind of failure, and a sentence.
        notify: called when a pull may have ended; on another thread.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[GroupGeometry],
        group_layers: Sequence[Sequence[str]],
        num_blocks: int,
        heads: Sequence[Heads],
        fail: Callable[[str, str], None],
        notify: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._groups = groups
        self._group_layers = group_layers
        self._num_blocks = num_blocks
        self._heads = heads
        self._fail = fail
        self._notify = notify
        self._own: OwnPages | None = None
        self._opening: tuple[Opening, RankLayout] | None = None
        self._checker: Checker | None = None
        self._summing: Summing | None = None
        self._pulls: Pulls | None = None
        self._met: dict[str, PeerMemory] = {}
        """Engines that the transport, when it is there, is to know."""
        self._layout: RankLayout | None = None
        """Not yet told."""
        self._settled: list[int] = []
        """Not yet told."""
        self._ended: list[JobResult] = []
        """Parts of loads that ended where they began."""
        self._halves: dict[int, JobResult] = {}
        """How one part of a load ended whose other part is under way."""
        self._reads: set[int] = set()
        """Slots of peers that are being read into ours."""
        self._read: list[SlotReadEnd] = []
        """Not yet told."""
        self.open_transport: Callable[..., Any] = open_transport
        self.open_checker: Callable[[Callable[[], None]], Checker] = Checker
        self.clock: Callable[[], float] = time.monotonic

    # -- set-up ------------------------------------------------------------------------

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """These are the pages, by layer name; none is kept.

        Raises:
            LayoutError: they are not contiguous.
        """
        self._own = own_pages(tensors, self._group_layers, self._num_blocks, self._heads)

    def open(self, setup: RemoteSetup, slots: OwnSlots | None = None) -> None:
        """Be ready to read other engines' memory, and let them read ours.

        Args:
            setup: what the scheduler half says.
            slots: the host pool, mapped until :meth:`close` has returned True; None where peers
                have no business in it.
        """
        own = self._own
        if own is None or self.is_open:
            return
        regions = own.regions
        pages = sum(region.nbytes for region in regions)
        try:
            layout = rank_layout(self._rank, self._groups, self._heads, own, setup.contents, slots)
        except LayoutError as error:
            self._fail("remote_agent", f"no hand-overs on rank {self._rank}: {error}")
            return
        if slots is not None:
            regions = (*regions, Region(slots.address, slots.num_slots * slots.slot_bytes))
        # Pages alone are what reads leave in quarantine.
        share = QUARANTINE_SHARE * pages / sum(region.nbytes for region in regions)
        options = Options(setup.host, setup.sends, setup.receives, quarantine_share=share)
        opening = Opening(lambda: self.open_transport(regions, options, notify=self._notify))
        self._opening = opening, layout
        self._look_at_opening(OPEN_WAIT)

    def _look_at_opening(self, timeout: float = 0.0) -> None:
        """Go on with the transport if it is there."""
        if self._opening is None:
            return
        opening, layout = self._opening
        if not opening.ended(timeout):
            return
        self._opening = None
        try:
            transport = opening.take()
        except TransportError as error:
            self._fail("remote_agent", f"no hand-overs on rank {self._rank}: {error}")
            return
        self._checker = self.open_checker(self._notify)
        self._summing = Summing(
            layout,
            self._checker,
            self._fail,
            pages_in_host_memory=self._are_pages_in_host_memory,
        )
        self._pulls = Pulls(layout, transport, self._checker, self._fail, self.clock)
        self._layout = layout

    @property
    def _are_pages_in_host_memory(self) -> bool:
        regions = self._own.regions if self._own is not None else ()
        return all(region.kind is MemoryKind.DRAM for region in regions)

    @property
    def is_open(self) -> bool:
        """Whether peers may be reading our memory, or we theirs."""
        return self._pulls is not None or self._opening is not None

    def close(self, timeout: float) -> bool:
        """False if something may still read or write our memory."""
        self._look_at_opening(timeout)
        pulls, self._pulls = self._pulls, None
        ended = self._opening is None and (pulls is None or pulls.close(timeout))
        checker, self._checker = self._checker, None
        return (checker is None or checker.close(timeout)) and ended

    @property
    def is_summing(self) -> bool:
        """Whether checksums are being made that somebody waits for."""
        return self._summing is not None and self._summing.is_busy

    # -- a step ------------------------------------------------------------------------

    def follow(self, plan: StepPlan) -> None:
        """Know the engines that this step's pulls come from."""
        self._look_at_opening()
        for engine in plan.gone:  # who is met again with the same plan is there once more
            self._met.pop(engine, None)
        for memory in plan.peers:
            self._met[memory.engine] = memory
        if self._pulls is None:
            return
        for engine in plan.gone:
            self._pulls.part(engine)
        met, self._met = self._met, {}
        for memory in met.values():
            self._pulls.meet(memory)
        if self._summing is not None:
            for job in plan.sums:
                self._summing.start(job)
            for slots in plan.slot_sums:
                self._summing.start_slots(slots)

    def read_slots(self, reads: Sequence[SlotRead], unwanted: Sequence[int]) -> None:
        """Begin to read slots of peers into ours; what nobody waits for is given up."""
        for read in reads:
            self._reads.add(read.job)
            if self._pulls is not None:
                self._pulls.start_slots(read)
            else:
                nothing = PullResult(0, 0.0, 0.0, may_write=False)
                self._read_ended(read.job, JobStatus.DROPPED, nothing)
        if self._pulls is not None and unwanted:
            self._pulls.cancel(unwanted)

    @property
    def is_reading(self) -> bool:
        """Whether slots are being read."""
        return bool(self._reads)

    def begin(self, load: LoadJob, mark: Any, *, holds: bool) -> bool:
        """Begin what a load pulls, if it does.

        Args:
            mark: work on the device that comes before.
            holds: the weights that it is for are there.

        Returns:
            Whether nothing else is to be done for the load.
        """
        if load.pull is None:
            return False
        if self._pulls is not None and holds:
            self._pulls.start(load.job, load.pull, mark)
        else:
            nothing = PullResult(0, 0.0, 0.0, may_write=False)
            self._part_ended(load.job, JobStatus.DROPPED, nothing)
        if load.copies:
            return False
        self._ended.append(JobResult(load.job, Direction.LOAD, JobStatus.DONE))
        return True

    def whole(
        self, copied: Sequence[JobResult], loads: Mapping[int, LoadJob]
    ) -> Iterator[JobResult]:
        """Results of loads; of one that is a pull as well, when both parts have ended.

        Args:
            copied: results of copies.
            loads: those under way.
        """
        if self._pulls is not None:
            for job, status, part in self._pulls.take():
                end = self._read_ended if job in self._reads else self._part_ended
                end(job, status, part)
            self._settled += self._pulls.settled()
        ended, self._ended = self._ended, []
        for result in (*copied, *ended):
            load = loads.get(result.job)
            if load is None or load.pull is None:
                yield result
            elif (other := self._halves.pop(result.job, None)) is None:
                self._halves[result.job] = result
            else:
                yield both(other, result)

    def take_said(self) -> Said:
        """What has not been told."""
        layout, self._layout = self._layout, None
        settled, self._settled = self._settled, []
        endpoint = self._pulls.endpoint if layout is not None and self._pulls is not None else None
        summing = self._summing
        sums = tuple(summing.take()) if summing is not None else ()
        slot_sums = tuple(summing.take_slots()) if summing is not None else ()
        read, self._read = self._read, []
        return Said(layout, endpoint, tuple(settled), sums, tuple(read), slot_sums)

    def _part_ended(self, job: int, status: JobStatus, result: PullResult) -> None:
        self._ended.append(JobResult(job, Direction.LOAD, status, pulled=result))

    def _read_ended(self, job: int, status: JobStatus, result: PullResult) -> None:
        self._reads.discard(job)
        self._read.append(SlotReadEnd(job, status, result))


NOTHING = Said(None, None, (), (), (), ())
