# SPDX-License-Identifier: Apache-2.0
"""The disk tier by hand: what its threads do elsewhere happens when somebody says so.

The real agent, keeper and executors, without their threads and sockets: the tier's own decisions,
real files and real slots. Each file is read or written in the moment that is asked for.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from vllm_tiered_kv.errands import Errands
from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.protocol import JobResult
from vllm_tiered_kv.tiers.disk import open as disk_open
from vllm_tiered_kv.tiers.disk.agent import DiskAgent
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import Chore
from vllm_tiered_kv.tiers.disk.claims import Claims
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.executor import DiskExecutor
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.keeper import Keeper
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
from vllm_tiered_kv.tiers.disk.settings import TierSettings
from vllm_tiered_kv.tiers.disk.store import RankFolder
from vllm_tiered_kv.tiers.disk.survey import Leftovers
from vllm_tiered_kv.tiers.disk.tier import DiskTier

PATIENCE = 60.0


class ManualKeeper(Keeper):
    """Does a chore when it is told to."""

    def __init__(self, root: Path, tell: Callable[[Any], None]) -> None:
        self._root, self._files, self._tell = root, Files(), tell
        self._leftovers = Leftovers()
        self._looked_at_owners = False
        self._since_ns = self._scanned_ns = time.time_ns()
        self._marks: set[int] = set()
        self._identity = None
        self._inherited = False
        self._closing = False
        self._close_by = math.inf
        self.busy_since = None
        self.chores: deque[Chore] = deque()

    def ask(self, chore: Chore) -> bool:
        self.chores.append(chore)
        return True

    def do(self) -> None:
        if self.chores:
            self._do(self.chores.popleft())

    def _do_others(self) -> None:
        """Whoever tells it to do a scan tells it when to do the others."""

    def close(self, timeout: float) -> bool:
        self.chores.clear()
        return True


class ManualExecutor(DiskExecutor):
    """Carries an order out when it is told to, or lets it fail."""

    def __init__(
        self, rank: int, report: Callable[[RankReport], None], slot: Any, sizes: tuple[int, ...]
    ) -> None:
        self._rank, self._slot, self._part_bytes = rank, slot, sizes
        self._files = Files()
        self._folder: RankFolder | None = None
        self._report = report
        self.orders: list[ReadOrder | WriteOrder] = []
        self.cancelled: set[int] = set()
        self.broken: Outcome | None = None
        """How orders end where nothing else is said; None: they are carried out."""

    def stored(self, result: JobResult) -> None:
        self._report(RankReport(self._rank, stores=(result,)))

    def close(self, timeout: float) -> bool:
        self.orders.clear()
        if self._folder is not None:
            self._folder.close()
        return True

    def take(self, order: Order) -> None:
        match order:
            case OpenFolder():
                mode = IoMode.DIRECT if order.direct else IoMode.BUFFERED
                self._folder = RankFolder(
                    Path(order.root), order.namespace, self._rank, files=self._files, mode=mode
                )
            case CancelReads():
                self.cancelled.update(order.jobs)
            case ReadOrder() | WriteOrder():
                self.orders.append(order)

    def do(self, at: int, instead: Outcome | None = None) -> None:
        """Carry out an order, or end it otherwise."""
        if not self.orders:
            return
        order = self.orders.pop(at % len(self.orders))
        assert self._folder is not None
        instead = instead or self.broken
        reading = isinstance(order, ReadOrder)
        dropped = instead is Outcome.DROPPED or (reading and order.job in self.cancelled)
        if dropped:
            result = OrderResult(order.job, Outcome.DROPPED)
        elif instead is None:
            act = self._read if reading else self._write
            result = act(self._folder, order)
        else:
            if reading:  # it got somewhere
                for part in order.parts:
                    view = self._slot(part.slot, 64)
                    view[:] = b"\xa5" * 64
            result = OrderResult(order.job, instead, reason="other")
        self._report(RankReport(self._rank, (result,)))


class _Sockets:
    """Stands for both ends of the channel: orders arrive at once, and in order."""

    reports_address, orders_address, secret = "", "by hand", b""

    def __init__(self, executors: Mapping[int, ManualExecutor]) -> None:
        self._executors = executors

    def wake(self) -> None:
        pass

    def send(self, rank: int, orders: Sequence[Order]) -> bool:
        if rank not in self._executors:
            return False
        for order in orders:
            self._executors[rank].take(order)
        return True


class ManualAgent(DiskAgent):
    """An agent whose thread does one thing at a time, when it is told to."""

    def __init__(
        self, settings: TierSettings, catalogue: Catalogue, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.executors: dict[int, ManualExecutor] = {}
        self.reports: list[RankReport] = []
        """What ranks have sent and the agent has not read."""
        self.named = threading.Event()
        self._sockets: Any = _Sockets(self.executors)
        self._clock = clock
        self._errands = Errands(self._sockets.wake)
        self._ended = deque()
        self._failures = deque()
        self._claims = Claims(settings.ranks, settings.max_queued)
        self._trouble_log = OncePerKind(get_logger(__name__))
        self._closing = self._stopping = self._degraded = False
        self._purges_asked = self._purges_done = 0
        self._connected = 0
        self._malformed = self._missed = 0
        self._catalogue = catalogue
        self._keeper: Any = ManualKeeper(Path(settings.root), self._hear)
        self._tier = DiskTier(
            settings,
            catalogue,
            send=self._sockets.send,
            ask=self._keeper.ask,
            tell=self._note_end,
            trouble=self._trouble,
            clock=clock,
        )

    def open(self, namespace: str, identity: Mapping[str, object]) -> None:
        super().open(namespace, identity)
        self.named.set()

    def shutdown(self) -> None:
        self._closing = True

    def hear(self, at: int) -> None:
        """A rank's report arrives."""
        if self.reports:
            report = self.reports.pop(at % len(self.reports))
            self._heard(report)

    def think(self) -> None:
        """It comes to what it was told."""
        for call in self._errands.take():
            call()
        if len(self.executors) != self._connected:
            self._connected = len(self.executors)
            self._tier.connected({rank: e._part_bytes for rank, e in self.executors.items()})

    def keep(self) -> None:
        """The keeper does a chore."""
        self._keeper.do()

    def look_round(self) -> None:
        """Time has passed."""
        self._tier.tick(0.0)
        self._claims.tidy()

    def finish(self) -> None:
        """All that was asked for is done and known."""
        while True:
            self.think()
            busy = bool(self.reports or self._keeper.chores)
            while self.reports:
                self.hear(0)
            while self._keeper.chores:
                self.keep()
            for executor in self.executors.values():
                while executor.orders:
                    busy = True
                    executor.do(0)
            if not busy:
                return


@contextlib.contextmanager
def by_hand(clock: Callable[[], float]) -> Iterator[None]:
    """Engines made meanwhile get agents that are run by hand."""

    def make(settings: TierSettings, catalogue: Catalogue, *_: Any) -> ManualAgent:
        return ManualAgent(settings, catalogue, clock)

    with (
        mock.patch.object(disk_open, "DiskAgent", make),
        mock.patch.object(disk_open, "AgentSockets", return_value=None),
    ):
        yield
