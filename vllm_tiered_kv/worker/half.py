# SPDX-License-Identifier: Apache-2.0
"""The worker half of the connector: one a rank, moves bytes, decides nothing.

The hooks run on the engine's worker thread and only hand work over. Both of vLLM's model
runners are served: V1 may ask for results before ``wait_for_save``, V2 asks after it; a
result is simply reported at the next opportunity.

Run on CPU workers (one, and two with tensor parallelism). The CUDA path (marks are events
on the compute stream, copies run on side streams) has not been run on a device yet. What sleep mode
calls (``unregister``, ``restore``; vLLM 0.33) was run in tests on pages in host memory and against
the stand-in for a device, in no engine that sleeps: vLLM has none on CPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
import zmq

from vllm_tiered_kv import metrics
from vllm_tiered_kv.channel import WorkerEndpoint
from vllm_tiered_kv.geometry import Geometry, GroupGeometry
from vllm_tiered_kv.identity.adapter import Registered
from vllm_tiered_kv.layout import LayoutError
from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.protocol import (
    MAX_RESULTS,
    BlockCopy,
    Direction,
    JobResult,
    JobStatus,
    LoadJob,
    Setup,
    StepPlan,
    StoreJob,
    WorkerReport,
)
from vllm_tiered_kv.remote.memory import Heads
from vllm_tiered_kv.tiers.disk.channel import RankSockets
from vllm_tiered_kv.tiers.disk.executor import DiskExecutor
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.orders import Hello
from vllm_tiered_kv.worker.adapters import AdapterWatch
from vllm_tiered_kv.worker.copy import BlockCopies, Copier, CopyError, open_copier
from vllm_tiered_kv.worker.copy.streaming import streaming_copy
from vllm_tiered_kv.worker.cpus import NO_CPUS, copy_cpus
from vllm_tiered_kv.worker.mover import (
    COPY_TIMEOUT,
    HOST_PIECE_BYTES,
    PIECE_BYTES,
    CopyJob,
    Counts,
    Lane,
)
from vllm_tiered_kv.worker.pages import DevicePages
from vllm_tiered_kv.worker.pool import HostPool, PoolError
from vllm_tiered_kv.worker.remote.layout import OwnSlots
from vllm_tiered_kv.worker.remote.side import NOTHING as NOTHING_SAID
from vllm_tiered_kv.worker.remote.side import RemoteSide

logger = get_logger(__name__)

LOAD_THREADS = 2
STORE_NICE = 10
"""Stores in host memory stand back behind the threads that answer requests."""
IDLE_WAIT = 0.003
"""Seconds a step that computes nothing waits for a copy to end."""
CLOSE_TIMEOUT = 5.0
UNREGISTER_TIMEOUT = 30.0
"""Seconds for copies under way to end before the device's pages are taken away."""


class LoadOutcome:
    """What vLLM is told about loads in one step."""

    def __init__(self) -> None:
        self.finished: set[str] = set()
        self.failed: set[str] = set()
        """Also in ``finished``: nothing of these loads counts."""
        self.bad_blocks: set[int] = set()
        """Device blocks that did not arrive, of loads whose head does count."""
        self.sent: set[str] = set()
        """Requests whose blocks are not needed any more."""


class WorkerHalf:
    """Moves chunks between device pages and slots.

    Args:
        rank: this worker's rank.
        group_layers: the layer names of each KV cache group, in the geometry's order.
        num_blocks: device blocks.
        groups: the geometry's groups; what a block has in bytes is this rank's own matter.
        report_blocks: whether a failed load may name its bad blocks (one full-attention
            group) or fails as a whole (several groups, or a sliding window).
        memory: bytes that this rank may take for its slots.
        find_adapters: looks for this process's LoRA adapters once the model is there; None
            where LoRA is off.
        heads: this rank's KV heads, by group, where KV is handed over between engines; else None.
    """

    def __init__(
        self,
        rank: int,
        group_layers: Sequence[Sequence[str]],
        num_blocks: int,
        groups: Sequence[GroupGeometry],
        *,
        report_blocks: bool,
        memory: int | None = None,
        find_adapters: Callable[[], Registered | None] | None = None,
        heads: Sequence[Heads] | None = None,
    ) -> None:
        self._rank = rank
        self._find_adapters = find_adapters
        self.adapters = AdapterWatch(rank, None)
        self._groups = groups
        self._report_blocks = report_blocks
        self._memory = memory
        self._room: int | None = None
        """Slots there are, where they are fewer than was said and the scheduler half must know."""
        self._pages = DevicePages(group_layers, num_blocks)
        """Without any, every job is dropped."""
        self._setup: Setup | None = None
        self._slot_bytes = 0
        self._pool: HostPool | None = None
        self._copier: Copier | None = None
        self._lanes: dict[Direction, Lane] = {}
        self._hung: list[Lane] = []
        """Closed, and still copying."""
        self._channel: WorkerEndpoint | None = None
        self._disk: DiskExecutor | None = None
        self.remote: RemoteSide | None = None
        """This rank's part in hand-overs between engines; None without them."""
        if heads is not None:
            self.remote = RemoteSide(
                rank, groups, group_layers, num_blocks, heads, self._fail, self._wake_idle
            )
        self._open_files: Callable[[], Files] = Files
        self._trouble = OncePerKind(logger)
        self._lock = threading.Lock()
        self._copy_ended = threading.Condition(self._lock)
        self._woken = False
        """Whether a read of a peer's pages or of a file ended since loads were last taken."""
        self._load_results: list[JobResult] = []  # engine thread only
        self._results: list[JobResult] = []  # stores, not yet in worker metadata
        self._counts = metrics.Tally()
        self._loads: dict[int, LoadJob] = {}  # engine thread only
        self._ended: list[JobResult] = []  # loads whose end vLLM has not been told
        self._refail: set[str] = set()
        self._sent: set[str] = set()
        self._mark: Any = None
        self._plan: StepPlan | None = None
        self._unstarted: tuple[StoreJob, ...] = ()
        self._open_copier: Callable[..., Copier] = open_copier
        self._clock: Callable[[], float] = time.monotonic

    # -- set-up --------------------------------------------------------------------

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Learn where this rank's pages are.

        Raises:
            LayoutError: pages that are not contiguous; the engine must not start so.
        """
        self._pages.take(kv_caches)
        if self.remote is not None:
            self.remote.take(kv_caches)
        find, self._find_adapters = self._find_adapters, None  # once: see compat.find_adapters
        if find is not None:
            self.adapters.registered = find()
            if self.adapters.registered is None:
                logger.warning(
                    "tiered-kv: requests with LoRA adapters are computed without the tier"
                )
        streaming_copy()  # compiled now, not when the first request waits for it
        if self._pool is not None and not self._lanes:
            self._reopen(self._pool)

    def unregister(self) -> None:
        """The device's pages are about to be taken away (sleep mode): let go of them.

        Jobs under way end as dropped, and so does every job until :meth:`restore`. When this
        returns, no copy touches a page and nothing here keeps one. May be called again.

        Raises:
            CopyError: a copy does not end, or other engines may be reading the pages. vLLM must not
                take them away then.
        """
        if self.remote is not None and self.remote.is_open:
            raise CopyError("other engines may be reading the KV cache: it cannot be given up")
        self._drop(self._unstarted)
        self._unstarted = ()
        lanes, self._lanes = [*self._lanes.values(), *self._hung], {}
        deadline = time.monotonic() + UNREGISTER_TIMEOUT
        self._hung = [
            lane for lane in lanes if not lane.close(max(0.0, deadline - time.monotonic()))
        ]
        if self._hung:
            self._fail("hung", f"a copy did not end in {UNREGISTER_TIMEOUT} s: no CPU tier now")
            raise CopyError("a copy of KV blocks hangs: the KV cache cannot be given up")
        self._mark = None
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        self._pages.drop()

    def restore(self) -> None:
        """The device's pages are there again, wherever they are now. May be called again."""
        if self._pages.groups:
            return
        try:
            self._pages.take_again()
        except LayoutError as error:
            self._fail("pool", f"no CPU tier on rank {self._rank} after sleep: {error}")
            return
        if self._pool is not None:
            self._reopen(self._pool)

    def _reopen(self, pool: HostPool) -> None:
        """Copy again between the pages as they are now and the slots there were."""
        try:
            if self._setup is None or self._slot_size(self._setup.chunk_tokens) != self._slot_bytes:
                raise CopyError("the pages are of another size than before")
            self._copier = self._open_copier(self._pages.groups, pool)
            self._open_lanes()
        except (CopyError, OSError, RuntimeError, MemoryError) as error:
            self._lanes = {}
            self._fail("pool", f"no CPU tier on rank {self._rank} any more: {error}")

    def set_up(self, setup: Setup) -> None:
        """Open pool, copier, lanes and side channel as the scheduler half says; once."""
        if setup == self._setup or not self._pages.groups:
            return  # without pages there is nothing to copy; a later plan says the same again
        self._setup = setup
        slot_bytes = self._slot_size(setup.chunk_tokens)
        slots = setup.num_slots
        if self._memory is not None and slots * slot_bytes > self._memory:
            slots = self._room = self._memory // slot_bytes
            logger.warning(
                "tiered-kv: rank %d has room for %d of %d slots: it has more layers of one KV "
                "cache group than the first pipeline stage leads to expect",
                self._rank,
                slots,
                setup.num_slots,
            )
        try:
            pool = HostPool(slots, slot_bytes, pin=torch.cuda.is_available())
            copier = self._open_copier(self._pages.groups, pool)
            self._slot_bytes = slot_bytes
            self._pool, self._copier = pool, copier
            self._open_lanes()
            pool.prefault()
        except (PoolError, CopyError, OSError, RuntimeError, MemoryError) as error:
            # Without a pool every job is dropped, and the engine serves without us.
            self._lanes = {}
            self._fail("pool", f"no CPU tier on rank {self._rank}: {error}")
            return
        if setup.endpoint:
            self._channel = WorkerEndpoint(setup.endpoint, setup.secret)
        if setup.disk_orders:
            self._open_disk(setup, pool)
        if self.remote is not None and setup.remote is not None:
            address = pool.tensor.data_ptr()
            own = OwnSlots(address, slot_bytes, slots, setup.chunk_tokens, self._pages.groups)
            self.remote.open(setup.remote, own)

    def _open_disk(self, setup: Setup, pool: HostPool) -> None:
        """Be ready for the disk agent's orders."""
        sizes = tuple(
            group.kept_blocks(setup.chunk_tokens) * pages.block_bytes if pages.rows else 0
            for group, pages in zip(self._groups, self._pages.groups, strict=True)
        )
        try:
            sockets = RankSockets(
                self._rank,
                setup.disk_reports,
                setup.disk_orders,
                setup.disk_secret,
                Hello(sizes),
            )
            self._disk = DiskExecutor(
                self._rank,
                sockets,
                pool.view,
                sizes,
                self._open_files(),
                cpus=self._copy_cpus(),
                reads_over=self._wake_idle,
            )
        except (OSError, RuntimeError, zmq.ZMQError) as error:
            self._fail("disk_folder", f"no disk tier on rank {self._rank}: {error}")

    def _open_lanes(self) -> None:
        """A lane a direction; in host memory the copying itself takes place on its threads."""
        on_device, cpus = self._pages.are_on_device, self._copy_cpus()
        piece_bytes = PIECE_BYTES if on_device else HOST_PIECE_BYTES
        self._lanes = {
            Direction.LOAD: Lane(
                Direction.LOAD,
                self._copy,
                self._load_ended,
                threads=LOAD_THREADS,
                piece_bytes=piece_bytes,
                cpus=cpus,
            ),
            Direction.STORE: Lane(
                Direction.STORE,
                self._copy,
                self._store_ended,
                piece_bytes=piece_bytes,
                cpus=cpus,
                nice=0 if on_device else STORE_NICE,
            ),
        }

    def _copy_cpus(self) -> frozenset[int]:
        return NO_CPUS if self._pages.are_on_device else copy_cpus()

    # -- the step, in vLLM's order ----------------------------------------------------

    def before_step(self, plan: StepPlan) -> None:
        """Blocks are about to be handed on: what still reads them is void."""
        if plan is self._plan:
            return  # told again of the same step, whose forward pass is still to come
        self._plan = plan
        self.set_up(plan.setup)
        self.adapters.follow(plan.watch, plan.unwatch)
        self.adapters.observe()
        if self.remote is not None:
            self.remote.follow(plan)
            self.remote.read_slots(plan.reads, plan.uncalled)
        if self._unstarted:
            # This rank's runner left the last step without coming to its stores, as it does on
            # all but the last stage of a pipeline with draft tokens. Their blocks still hold
            # what that step computed, unless they are fenced now.
            fenced = set(plan.fences)
            self._submit_stores([store for store in self._unstarted if store.job not in fenced])
            self._drop([store for store in self._unstarted if store.job in fenced])
        self._unstarted = plan.stores
        if plan.fences and (lane := self._lanes.get(Direction.STORE)) is not None:
            lane.call_off(plan.fences, JobStatus.DROPPED)

    def mark(self) -> None:
        """Loads of this step come after all that the device was given until now."""
        self._mark = self._copier.mark() if self._copier is not None else None

    def start_loads(self, plan: StepPlan) -> None:
        self._refail.update(plan.refail)
        self._sent.update(plan.sent)
        self._submit_loads(plan.loads)
        if plan.cancels and (lane := self._lanes.get(Direction.LOAD)) is not None:
            lane.call_off(plan.cancels, JobStatus.DROPPED)

    def start_stores(self, plan: StepPlan) -> None:
        """The forward pass has been given to the device: copy out after it."""
        self._unstarted = ()
        self.adapters.observe()
        self._submit_stores(plan.stores)

    def _submit_stores(self, stores: Sequence[StoreJob]) -> None:
        if not stores:
            return
        lane = self._lanes.get(Direction.STORE)
        if lane is None or self._copier is None:
            self._drop(stores)
            return
        after = self._copier.mark()
        holds = self.adapters.holds
        self._drop([store for store in stores if not holds(store.adapter)])
        lane.submit([self._store_job(store, after) for store in stores if holds(store.adapter)])

    def _drop(self, stores: Iterable[StoreJob]) -> None:
        for store in stores:
            self._store_ended(JobResult(store.job, Direction.STORE, JobStatus.DROPPED))

    def take_loads(self, *, idle: bool = False) -> LoadOutcome:
        """Loads that ended since the last call; each request once.

        Args:
            idle: this step computes nothing, and neither can the next before a load, or a
                store or reads of files that somebody waits for, end: wait for it a little
                here, where waiting keeps nobody from anything, rather than spin through steps
                that take the copying and reading threads' time.
        """
        outcome = LoadOutcome()
        if self._loads and (lane := self._lanes.get(Direction.LOAD)) is not None:
            lane.drop_overdue()
        with self._lock:
            news = self._woken or self._ended or self._results
            if idle and not news and self._copying():
                self._copy_ended.wait(IDLE_WAIT)
            self._woken = False  # before they are looked at: what ends later is seen next time
            ended, self._ended = self._ended, []
        whole = ended if self.remote is None else self.remote.whole(ended, self._loads)
        for result in whole:
            load = self._loads.pop(result.job, None)
            if load is None:
                continue
            holds = self.adapters.holds(load.adapter)
            if result.status is JobStatus.DONE and not holds:
                # Other weights took the place of those that the request was to go on with.
                result = msgspec.structs.replace(result, status=JobStatus.DROPPED)
            self._load_results.append(result)  # travels with the same step's output
            outcome.finished.add(load.request_id)
            if result.status is JobStatus.DONE:
                continue
            has_head = result.status in (JobStatus.FAILED, JobStatus.LATE) and holds
            if has_head and self._report_blocks and load.pull is None:
                for i in result.failed:
                    outcome.bad_blocks.update(load.copies[i].blocks)
            else:
                outcome.failed.add(load.request_id)
        outcome.finished |= self._refail
        outcome.failed |= self._refail
        self._refail = set()
        outcome.sent, self._sent = self._sent, set()
        return outcome

    def take_report(self) -> WorkerReport | None:
        """What the scheduler half has to know, through vLLM's worker metadata."""
        loads, self._load_results = self._load_results, []
        with self._lock:
            stores, self._results = self._results[:MAX_RESULTS], self._results[MAX_RESULTS:]
            counters = self._counts.take()
        adapters = self.adapters.take()
        room, self._room = self._room, None
        said = self.remote.take_said() if self.remote is not None else NOTHING_SAID
        news = loads or stores or counters or adapters or said
        if not news and room is None:
            return None
        results = (*loads, *stores)
        return WorkerReport(self._rank, results, tuple(counters.items()), adapters, room, *said)

    def count(self, key: str, value: float) -> None:
        with self._lock:
            self._counts.add(key, value)

    def shutdown(self) -> None:
        """End threads and give memory back; jobs under way are called off."""
        self.adapters.close(CLOSE_TIMEOUT)
        lanes, self._lanes = self._lanes, {}
        ended = [lane.close(CLOSE_TIMEOUT) for lane in (*lanes.values(), *self._hung)]
        if self._disk is not None:
            ended.append(self._disk.close(CLOSE_TIMEOUT))
            self._disk = None
        if self.remote is not None:
            ended.append(self.remote.close(CLOSE_TIMEOUT))
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if not all(ended):
            # A copy hangs: its memory must outlive it.
            self._trouble.warn("shutdown", f"a copy did not end in {CLOSE_TIMEOUT} s")
            return
        if self._copier is not None:
            self._copier.close()
            self._copier = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    # -- jobs ---------------------------------------------------------------------------

    def _submit_loads(self, loads: Sequence[LoadJob]) -> None:
        if not loads:
            return
        lane = self._lanes.get(Direction.LOAD)
        jobs = []
        now = self._clock()
        for load in loads:
            self._loads[load.job] = load
            holds = self.adapters.holds(load.adapter)
            if self.remote is not None and self.remote.begin(load, self._mark, holds=holds):
                continue
            if lane is None or not load.copies or not holds:
                self._load_ended(JobResult(load.job, Direction.LOAD, JobStatus.DROPPED))
                continue
            sizes = [self._size(copy) for copy in load.copies]
            by, counts = now + load.deadline, Counts.HEAD if self._report_blocks else Counts.WHOLE
            job = CopyJob(load.job, load.copies, sizes, self._mark, by, load.worth, counts)
            jobs.append(job)
        if lane is not None:
            lane.submit(jobs)

    def _store_job(self, store: StoreJob, after: Any) -> CopyJob:
        sizes = [self._size(copy) for copy in store.copies]
        return CopyJob(store.job, store.copies, sizes, after, None)

    def _copy(self, direction: Direction, copies: Sequence[BlockCopy], after: Any) -> int:
        """Copy one piece; on a lane thread.

        Raises:
            CopyError: it failed, or the device did not finish it in time.
        """
        try:
            return self._copy_piece(direction, copies, after)
        except Exception as error:
            self._fail(f"copy_{direction.value}", f"copying failed: {error}")
            raise

    def _copy_piece(self, direction: Direction, copies: Sequence[BlockCopy], after: Any) -> int:
        pool, copier = self._pool, self._copier
        if pool is None or copier is None:
            raise CopyError("the pool is closed")
        for copy in copies:
            if not pool.ensure(copy.slot):
                raise CopyError(f"slot {copy.slot} cannot be used")
        batches = [self._batch(copy) for copy in copies if self._pages.groups[copy.group].rows]
        if not batches:
            return 0
        transfer = copier.submit(direction, batches, after)
        while not transfer.wait(COPY_TIMEOUT):
            if direction is Direction.STORE:
                raise CopyError(f"a copy did not end in {COPY_TIMEOUT} s")
            # It may still write: its blocks stay with the request for as long as it takes.
            self._fail("hung", f"a load has not ended in {COPY_TIMEOUT} s; still waiting")
        return sum(self._size(copy) for copy in copies)

    def _batch(self, copy: BlockCopy) -> BlockCopies:
        block_bytes = self._pages.groups[copy.group].block_bytes
        base = copy.slot * self._slot_bytes + copy.first * block_bytes
        offsets = tuple(base + i * block_bytes for i in range(len(copy.blocks)))
        return BlockCopies(copy.group, copy.blocks, offsets)

    def _size(self, copy: BlockCopy) -> int:
        return len(copy.blocks) * self._pages.groups[copy.group].block_bytes

    def _slot_size(self, chunk_tokens: int) -> int:
        return Geometry.align_slot(
            max(
                group.kept_blocks(chunk_tokens) * pages.block_bytes
                for group, pages in zip(self._groups, self._pages.groups, strict=True)
            )
        )

    def _copying(self) -> bool:
        """Whether a load, a store, a read of a file or of a peer's slots, or a checksum goes on."""
        if self._loads or (self._disk is not None and self._disk.is_reading):
            return True
        if self.remote is not None and (self.remote.is_summing or self.remote.is_reading):
            return True
        lane = self._lanes.get(Direction.STORE)
        return lane is not None and lane.in_flight > 0

    def _wake_idle(self) -> None:
        with self._lock:
            self._woken = True
            self._copy_ended.notify_all()

    # -- results (lane threads) ------------------------------------------------------------

    def _load_ended(self, result: JobResult) -> None:
        with self._lock:
            self._ended.append(result)
            self._copy_ended.notify_all()

    def _store_ended(self, result: JobResult) -> None:
        with self._lock:
            self._results.append(result)
            self._copy_ended.notify_all()
        if self._channel is not None:
            self._channel.send(WorkerReport(self._rank, (result,)))
        if self._disk is not None and result.status is JobStatus.DONE:
            self._disk.stored(result)

    def _fail(self, kind: str, message: str) -> None:
        self.count(metrics.FAILURES.key(kind), 1)
        self._trouble.warn(kind, message)
