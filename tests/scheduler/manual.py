# SPDX-License-Identifier: Apache-2.0
"""Everything that is asynchronous, by hand: nothing moves before somebody says so.

The real halves, with the lanes' threads, the side channel's socket and the clock replaced at their
seams. Copies are real copies of real bytes, made in the moment they are asked for.
"""

from __future__ import annotations

import contextlib
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from tests.scheduler.manual_disk import ManualAgent, ManualExecutor, by_hand
from tests.scheduler.manual_peers import HandChecker, HandTransport, Peers, remote_by_hand
from tests.scheduler.sim import BLOCK, Sim
from tests.scheduler.tokens import layer_keys
from vllm_tiered_kv.connector import ReportMetadata
from vllm_tiered_kv.protocol import Direction, JobResult, Setup, WorkerReport
from vllm_tiered_kv.worker.mover import CopyJob, Lane


class Pace(enum.Enum):
    """How far copies get by themselves."""

    ALL = "all"  # everything ends and is known
    ONE_LANE = "one lane"  # one direction on one rank, in turn: ranks and directions drift apart
    NONE = "none"


class ManualLane(Lane):
    """A lane without threads: pieces begin, are copied and their jobs reported one by one."""

    def __init__(
        self,
        direction: Direction,
        copy: Callable[..., int],
        on_end: Callable[[JobResult], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(direction, copy, self._hold, threads=0, piece_bytes=1, clock=clock)
        self._tell = on_end
        self.begun: list[tuple[CopyJob, tuple[int, ...], bool]] = []
        self.ended: list[JobResult] = []

    @property
    def jobs(self) -> set[int]:
        """Jobs that have not been reported."""
        return {*self._jobs, *(result.job for result in self.ended)}

    def begin(self, at: int) -> None:
        """A thread takes a piece, and gets no further."""
        if self._queue:
            at %= len(self._queue)
            job, piece = self._queue[at]
            del self._queue[at]
            self.begun.append((job, piece, self._begin(job, piece)))

    def copy(self, at: int) -> None:
        """Copy a piece that has begun, or begin one."""
        if not self.begun:
            self.begin(at)
        if self.begun:
            self._work(*self.begun.pop(at % len(self.begun)))

    def report(self, at: int) -> None:
        """A job's end reaches the worker half."""
        if self.ended:
            self._tell(self.ended.pop(at % len(self.ended)))

    def finish(self) -> None:
        while self._queue or self.begun:
            self.copy(0)
        while self.ended:
            self.report(0)

    def _hold(self, result: JobResult) -> None:
        self.ended.append(result)


class ManualChannel:
    """Both ends of the side channel; messages arrive when they are let through."""

    def __init__(self) -> None:
        self.sent: list[WorkerReport] = []
        self.arrived: list[WorkerReport] = []
        self.malformed = 0

    def send(self, report: WorkerReport) -> bool:
        self.sent.append(report)
        return True

    def drain(self, limit: int = 64) -> list[WorkerReport]:
        arrived, self.arrived = self.arrived[:limit], self.arrived[limit:]
        return arrived

    def close(self) -> None:
        pass


class ManualSim(Sim):
    """An engine in which copies, reports and time move only by hand."""

    def __init__(self, **options: Any) -> None:
        self.now = 0.0
        named = threading.Event()
        with contextlib.ExitStack() as made_by_hand:
            made_by_hand.enter_context(by_hand(lambda: self.now))
            made_by_hand.enter_context(remote_by_hand(lambda: self.now, named))
            super().__init__(**options)
        disk = self.half.core.disk
        self.agent: ManualAgent | None = disk.agent if disk is not None else None
        if self.agent is not None:
            assert self.agent.named.wait(60), "the namespace is not known"
        self.peers: Peers | None = None
        """Other engines; None where nobody is asked."""
        if self.half.remote is not None:
            assert named.wait(60), "the namespace is not known"
            verify = options["extra"]["remote"]["verify"]
            self.peers = Peers(self, verify=verify)
        self.pace = Pace.ALL
        """What goes on while the engine pauses."""
        self.tick = 0.0
        """Seconds that pass whenever a lane looks at the clock."""
        self.hold_stores = False
        """Whether results of stores miss the output of their step, and come late."""
        self.late: list[WorkerReport] = []
        self.channel = ManualChannel()
        self.lanes: list[ManualLane] = []
        self.half._endpoint.close()
        self.half._endpoint = self.channel
        self.half._setup = Setup(
            "",
            b"",
            self.half.core.settings.num_slots,
            self.half.core.geometry.chunk_tokens,
            *(self.agent.addresses if self.agent is not None else ("", "", b"")),
            self.half.remote.setup if self.half.remote is not None else None,
        )
        self.half.core.clock = lambda: self.now
        for rank in self.ranks:
            self._take_over(rank.tiered._worker)
        self.on_result = self._hold_back

    def _take_over(self, worker: Any) -> None:
        def open_lanes() -> None:
            worker._lanes = {
                Direction.LOAD: self._lane(worker, Direction.LOAD, worker._load_ended),
                Direction.STORE: self._lane(worker, Direction.STORE, worker._store_ended),
            }

        def open_disk(setup: Setup, pool: Any) -> None:
            rank, agent = worker._rank, self.agent
            sizes = tuple(
                group.kept_blocks(setup.chunk_tokens) * pages.block_bytes
                for group, pages in zip(worker._groups, worker._pages.groups, strict=True)
            )
            executor = ManualExecutor(rank, agent.reports.append, pool.view, sizes)
            worker._disk = agent.executors[rank] = executor

        worker._open_lanes = open_lanes
        worker._open_disk = open_disk
        worker._clock = lambda: self.now
        worker._channel = self.channel
        worker._copying = lambda: False  # an idle step waits for no thread: there is none
        if worker.remote is not None:
            worker.remote.open_transport = self._transport
            worker.remote.open_checker = HandChecker
            worker.remote.clock = lambda: self.now

    def _lane(self, worker: Any, direction: Direction, on_end: Any) -> ManualLane:
        lane = ManualLane(direction, worker._copy, on_end, self._look_at_clock)
        self.lanes.append(lane)
        return lane

    def _transport(self, *args: Any, **kwargs: Any) -> HandTransport:
        transport = HandTransport(*args, **kwargs)
        assert self.peers is not None
        transport.gone = self.peers.gone
        return transport

    def _look_at_clock(self) -> float:
        self.now += self.tick
        return self.now

    # -- what happens by itself elsewhere ----------------------------------------------

    def pause(self) -> None:
        if self.pace is Pace.ALL:
            self.let_through()
        elif self.pace is Pace.ONE_LANE and self.lanes:
            self.lanes[self.steps % len(self.lanes)].finish()
            self._deliver()
            if self.agent is not None:
                self._disk_goes_on(self.agent)
            if self.peers is not None:
                self.peers.goes_on(self.steps)

    def let_through(self) -> None:
        """Every copy ends and every report arrives."""
        for lane in self.lanes:
            lane.finish()
        self._deliver()
        if self.agent is not None:
            self.agent.look_round()
            self.agent.finish()
        if self.peers is not None:
            self.peers.finish()

    def _disk_goes_on(self, agent: ManualAgent) -> None:
        """A file here, a report there."""
        agent.think()
        agent.keep()
        agent.hear(0)
        if agent.executors:
            agent.executors[self.steps % len(agent.executors)].do(0)

    def _deliver(self) -> None:
        self.channel.arrived += self.channel.sent + self.late
        self.channel.sent, self.late = [], []

    def arrive(self, at: int, *, again: bool) -> None:
        """A message on the side channel arrives; it may arrive again."""
        waiting = self.channel.sent
        if waiting:
            at %= len(waiting)
            self.channel.arrived.append(waiting[at])
            if not again:
                del waiting[at]

    def lose(self, at: int) -> None:
        """A message on the side channel is lost; the same report travels with a step's output."""
        if self.channel.sent:
            del self.channel.sent[at % len(self.channel.sent)]

    def arrive_late(self, at: int, *, again: bool) -> None:
        """A report that missed its step's output arrives; it may arrive again."""
        if self.late:
            at %= len(self.late)
            self.channel.arrived.append(self.late[at])
            if not again:
                del self.late[at]

    def _hold_back(self, output: KVConnectorOutput) -> None:
        if not self.hold_stores:
            return
        meta = output.kv_connector_worker_meta
        if isinstance(meta, MultiKVConnectorWorkerMetadata):
            parts = tuple(self._strip(part) for part in meta.metadata)
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(parts)
        else:
            output.kv_connector_worker_meta = self._strip(meta)

    def _strip(self, meta: Any) -> Any:
        if not isinstance(meta, ReportMetadata):
            return meta
        reports: Sequence[WorkerReport] = meta.reports
        kept = []
        for report in reports:
            stores = tuple(r for r in report.results if r.direction is Direction.STORE)
            loads = tuple(r for r in report.results if r.direction is Direction.LOAD)
            if stores:
                self.late.append(WorkerReport(report.rank, stores))
            kept.append(msgspec.structs.replace(report, results=loads))
        return ReportMetadata(tuple(kept))

    def image(self, key: bytes, rank: int, group: int) -> np.ndarray[Any, Any]:
        """What a chunk's slot holds, by the weights the engine began with; int64."""
        per_chunk = self.half.core.geometry.chunk_tokens // BLOCK
        keys = layer_keys(len(self.ranks[0].windows), rank)[group]
        names = self.audit.names(key, per_chunk)
        return (names[:, None, :] ^ keys[:, None]).reshape(-1)

    # -- what must hold ------------------------------------------------------------------

    def check_ledger(self) -> None:
        """Whatever the scheduler half waits for is on its way somewhere."""
        ledger = self.half.core.ledger
        known: set[int] = {job.job for job in (*self.half.loads.jobs, *self.half.stores.jobs)}
        for _, output, _ in self._scheduled:
            known |= _planned(output.kv_connector_metadata)
        for rank in self.ranks:
            worker = rank.tiered._worker
            known |= {job.job for job in worker._unstarted}
            known |= {*worker._loads}
            known |= {result.job for result in (*worker._results, *worker._load_results)}
        for lane in self.lanes:
            known |= lane.jobs
        reports = [*self.channel.sent, *self.channel.arrived, *self.late]
        for _, _, result in self._in_flight:
            reports += _reports(result.kv_connector_output.kv_connector_worker_meta)
        known |= {result.job for report in reports for result in report.results}
        lost = {*ledger.stores, *ledger.loads} - known
        assert not lost, f"jobs {lost} will never be reported"


def _planned(meta: Any) -> set[int]:
    for part in getattr(meta, "metadata", (meta,)):
        if hasattr(part, "plan"):
            return {job.job for job in (*part.plan.loads, *part.plan.stores)}
    return set()


def _reports(meta: Any) -> list[WorkerReport]:
    parts = meta.metadata if isinstance(meta, MultiKVConnectorWorkerMetadata) else (meta,)
    return [r for part in parts if isinstance(part, ReportMetadata) for r in part.reports]
