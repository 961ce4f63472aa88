# SPDX-License-Identifier: Apache-2.0
"""A rank's part of the disk tier: does what the agent orders, between slots and this rank's files.

Threads of its own: one hears the orders, a few read and a few write. An order is answered once,
whatever happens; an I/O call that never returns holds its thread and its slot, and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.protocol import JobResult
from vllm_tiered_kv.tiers.disk.channel import RankSockets
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import file_bytes, padded
from vllm_tiered_kv.tiers.disk.orders import (
    CancelReads,
    OpenFolder,
    Order,
    OrderResult,
    Outcome,
    RankReport,
    ReadOrder,
    WriteOrder,
)
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus, WriteStatus

logger = get_logger(__name__)

READERS = 6
WRITERS = 4
"""Of each, one or two hash what they read or will write while the others wait for the disk."""
MAX_QUEUED = 8192
"""Orders that have not begun; the agent sends far fewer."""
WRITE_PATIENCE = 60.0
"""Seconds a write waits before it begins: it holds its slots."""
MAX_UNSENT = 16384
"""Reports that could not be sent; what is beyond tells of no order."""
WRITER_NICE = 10
"""Writers stand back behind the threads that answer requests."""
HEAR = 0.2
"""Seconds a thread sleeps at most before it looks whether all is over."""

SlotView = Callable[[int, int], memoryview | None]
"""``(slot, nbytes)``: the first bytes of a slot; None if it cannot be used."""

_READ = {
    ReadStatus.OK: Outcome.DONE,
    ReadStatus.MISSING: Outcome.MISSING,
    ReadStatus.DAMAGED: Outcome.DAMAGED,
    ReadStatus.FAILED: Outcome.FAILED,
}


_O = TypeVar("_O", ReadOrder, WriteOrder)


class DiskExecutor:
    """Reads and writes one rank's files.

    Args:
        rank: this rank.
        sockets: its end of the channel.
        slot: gives the memory of a slot.
        part_bytes: for each KV cache group the bytes of a chunk's part on this rank.
        files: what makes the file calls.
        cpus: processors the threads may use; empty: those of the thread that starts them.
        reads_over: told when every read that was ordered has been answered; on any thread here.
    """

    def __init__(
        self,
        rank: int,
        sockets: RankSockets,
        slot: SlotView,
        part_bytes: tuple[int, ...],
        files: Files,
        clock: Callable[[], float] = time.monotonic,
        *,
        cpus: Iterable[int] = (),
        reads_over: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._sockets = sockets
        self._slot = slot
        self._part_bytes = part_bytes
        self._files = files
        self._clock = clock
        self._cpus = frozenset(cpus)
        self._reads_over = reads_over
        self._folder: RankFolder | None = None
        self._closing = False
        self._wake = threading.Condition()
        self._reads: deque[tuple[ReadOrder, float]] = deque()
        self._writes: deque[tuple[WriteOrder, float]] = deque()
        self._unanswered: set[int] = set()
        """Reads, queued and under way."""
        self._unsent: deque[RankReport] = deque()
        self._unsent_lock = threading.Lock()
        self._malformed = 0
        self._trouble = OncePerKind(logger)
        loops = [
            ("tiered-kv-orders", self._hear),
            *((f"tiered-kv-read-{i}", self._read_loop) for i in range(READERS)),
            *((f"tiered-kv-write-{i}", self._write_loop) for i in range(WRITERS)),
        ]
        self._running = len(loops)
        self._threads = [
            threading.Thread(target=self._run, args=(loop,), name=name, daemon=True)
            for name, loop in loops
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_reading(self) -> bool:
        """Whether a read is queued or under way. Any thread."""
        return bool(self._unanswered)

    def stored(self, result: JobResult) -> None:
        """Tell the agent that a copy out of the device has ended; any thread, does not wait."""
        self._send(RankReport(self._rank, stores=(result,)))

    def close(self, timeout: float) -> bool:
        """Drop what has not begun and end the threads; False if one is held up by its I/O.

        The slots' memory must outlive a thread that is.
        """
        with self._wake:
            self._closing = True
            dropped = [order.job for order, _ in self._reads]
            dropped += [order.job for order, _ in self._writes]
            self._reads.clear()
            self._writes.clear()
            self._wake.notify_all()
        self._drop(dropped)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not self._threads[0].is_alive():  # the one that uses the sockets besides the lock
            self._sockets.close()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(OSError):  # a processor went: run where we are
                if self._cpus:
                    os.sched_setaffinity(0, self._cpus)
            loop()
        finally:
            with self._wake:
                self._running -= 1
                folder = self._folder if self._running == 0 else None
            if folder is not None:  # here, since closing a file may wait for the disk
                folder.close()

    # -- orders ------------------------------------------------------------------------

    def _hear(self) -> None:
        while not self._closing:
            try:
                for order in self._sockets.receive(HEAR):
                    self._take(order)
                self._expire()
                self._send_again()
            except Exception:  # noqa: BLE001 - without this thread no order is ever answered
                self._trouble.error("internal", "unexpected error while taking the disk's orders")
            if self._sockets.malformed != self._malformed:
                self._malformed = self._sockets.malformed
                self._trouble.warn("report", "a message from the disk agent was not understood")

    def _take(self, order: Order) -> None:
        match order:
            case OpenFolder():
                self._open(order)
            case CancelReads():
                jobs = frozenset(order.jobs)
                with self._wake:
                    dropped = [read.job for read, _ in self._reads if read.job in jobs]
                    self._reads = deque(entry for entry in self._reads if entry[0].job not in jobs)
                self._drop(dropped)
            case ReadOrder() | WriteOrder():
                if not self._queue(order):
                    self._drop([order.job])

    def _open(self, order: OpenFolder) -> None:
        mode = IoMode.DIRECT if order.direct else IoMode.BUFFERED
        old = self._folder
        same = old is not None and (str(old.root), old.namespace, old.mode) == (
            str(Path(order.root)),
            order.namespace,
            mode,
        )
        if same:
            return
        try:
            folder = RankFolder(
                Path(order.root), order.namespace, self._rank, files=self._files, mode=mode
            )
        except ValueError as error:
            self._trouble.warn("disk_folder", f"no disk tier on rank {self._rank}: {error}")
            return
        with self._wake:
            self._folder = folder
        if old is not None:
            old.close()

    def _queue(self, order: ReadOrder | WriteOrder) -> bool:
        now = self._clock()
        with self._wake:
            if self._closing or len(self._reads) + len(self._writes) >= MAX_QUEUED:
                return False
            if isinstance(order, ReadOrder):
                self._reads.append((order, now + order.patience))
                self._unanswered.add(order.job)
            else:
                self._writes.append((order, now + WRITE_PATIENCE))
            self._wake.notify_all()
        return True

    def _expire(self) -> None:
        """Drop what has waited too long, also where every thread is held up by its I/O."""
        now = self._clock()
        with self._wake:
            late = [order.job for order, give_up_at in self._reads if give_up_at < now]
            late += [order.job for order, give_up_at in self._writes if give_up_at < now]
            if late:
                self._reads = deque(entry for entry in self._reads if entry[1] >= now)
                self._writes = deque(entry for entry in self._writes if entry[1] >= now)
        self._drop(late)

    def _drop(self, jobs: Iterable[int]) -> None:
        for job in jobs:
            self._answer(OrderResult(job, Outcome.DROPPED))

    def _serve(
        self,
        queue: Callable[[], deque[tuple[_O, float]]],
        do: Callable[[RankFolder, _O], OrderResult],
    ) -> None:
        """Do what is queued, one order after the other, until all is over."""
        while True:
            with self._wake:
                while not queue() and not self._closing:
                    self._wake.wait(HEAR)
                if self._closing:
                    return
                order, give_up_at = queue().popleft()
                folder = self._folder
            started = self._clock()
            if folder is None or started > give_up_at:
                self._drop([order.job])
                continue
            try:
                result = do(folder, order)
            except Exception as error:  # noqa: BLE001 - the order fails, the thread lives
                result = OrderResult(order.job, Outcome.FAILED, reason=type(error).__name__)
            self._answer(msgspec.structs.replace(result, seconds=self._clock() - started))

    # -- reading -----------------------------------------------------------------------

    def _read_loop(self) -> None:
        self._serve(lambda: self._reads, self._read)

    def _read(self, folder: RankFolder, order: ReadOrder) -> OrderResult:
        nbytes = 0
        sizes: list[int] = []
        for part in order.parts:
            size = self._size(part.group)
            if size == 0:  # no layer of this group on this rank
                sizes.append(0)
                continue
            view = None if size is None else self._slot(part.slot, padded(size))
            if size is None or view is None:
                return OrderResult(order.job, Outcome.FAILED, reason="slot")
            got = folder.read(order.key, part.group, view, size)
            if got.status is not ReadStatus.OK:
                reason = got.reason.value if got.reason is not None else ""
                return OrderResult(order.job, _READ[got.status], 0, tuple(sizes), reason=reason)
            sizes.append(file_bytes(size))
            nbytes += size
        return OrderResult(order.job, Outcome.DONE, nbytes, tuple(sizes))

    # -- writing -----------------------------------------------------------------------

    def _write_loop(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICE)
        self._serve(lambda: self._writes, self._write)

    def _write(self, folder: RankFolder, order: WriteOrder) -> OrderResult:
        sizes: list[int] = []
        made = 0
        for part in order.parts:
            size = self._size(part.group)
            if size == 0:
                sizes.append(0)
                continue
            view = None if size is None else self._slot(part.slot, padded(size))
            if size is None or view is None:
                return OrderResult(order.job, Outcome.FAILED, made, tuple(sizes), reason="slot")
            done = folder.write(order.key, part.group, view, size, order.facts, order.used_ns)
            if done.status is WriteStatus.FAILED:
                reason = done.reason.value if done.reason is not None else ""
                return OrderResult(order.job, Outcome.FAILED, made, tuple(sizes), reason=reason)
            sizes.append(file_bytes(size))
            if done.status is WriteStatus.WRITTEN:
                made += file_bytes(size)
        return OrderResult(order.job, Outcome.DONE, made, tuple(sizes))

    def _size(self, group: int) -> int | None:
        return self._part_bytes[group] if group < len(self._part_bytes) else None

    # -- answers -----------------------------------------------------------------------

    def _answer(self, result: OrderResult) -> None:
        self._send(RankReport(self._rank, (result,)))
        with self._wake:
            if result.job not in self._unanswered:
                return
            self._unanswered.discard(result.job)
            if self._unanswered:
                return
        self._reads_over()

    def _send(self, report: RankReport) -> None:
        with self._unsent_lock:
            if not self._unsent and self._sockets.send(report):
                return
            if report.results or len(self._unsent) < MAX_UNSENT:
                self._unsent.append(report)  # in order, and again: an answer must not be lost

    def _send_again(self) -> None:
        with self._unsent_lock:
            while self._unsent and self._sockets.send(self._unsent[0]):
                self._unsent.popleft()
