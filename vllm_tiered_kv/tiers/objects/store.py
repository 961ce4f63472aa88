# SPDX-License-Identifier: Apache-2.0
"""Keeps objects: one thread that decides, one that keeps the folder, a few that read and write.

The host's threads leave what they want in an inbox and never wait for a file; :meth:`delete` alone
waits for what comes of it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from vllm_tiered_kv.policies import make_policy
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import Chore, News, Prepared
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.keeper import Keeper
from vllm_tiered_kv.tiers.objects.answers import Listener
from vllm_tiered_kv.tiers.objects.names import ObjectId
from vllm_tiered_kv.tiers.objects.settings import ObjectOptions, tier_settings
from vllm_tiered_kv.tiers.objects.tasks import Delete, Ended, Kind, LookUp, Part, Wanted
from vllm_tiered_kv.tiers.objects.tier import ObjectTier
from vllm_tiered_kv.tiers.objects.workers import Result, Workers

MAX_INBOX = 1 << 16
"""Things the host may have asked for that nobody has come to."""
TICK = 0.1
"""Seconds between two looks at deadlines."""
TOKENS = 256
"""Of an object, as far as policies weigh them: all cost the same."""


class Host(Listener, Protocol):
    """What the store tells its host; all of it on the store's own thread."""

    def ended(self, ended: Ended) -> None:
        """A task is over."""

    def trouble(self, kind: str, message: str) -> None:
        """Something went wrong and is counted."""

    def bug(self) -> None:
        """An unexpected exception is being handled."""

    def degraded(self, *, is_degraded: bool) -> None:
        """The folder is left alone from now on, or not any more."""

    def scanned(self, objects: int, used: int) -> None:
        """It is known what lies in the folder."""


class Status(msgspec.Struct, frozen=True):
    """Figures, as of now."""

    is_alive: bool
    is_scanned: bool
    is_degraded: bool
    direct_io: bool
    used: int
    """Bytes the folder holds."""
    objects: int
    """Files of objects, whoever wrote them."""
    evicted: int
    counts: Mapping[str, int]
    failures: Mapping[str, int]
    figures: Mapping[str, int]


class ObjectStore:
    """Objects in a folder, once started. No method raises or waits for a file unless it says so.

    Args:
        options: where and how.
        home: the namespace that says what the folder is.
        max_queued: bytes of objects that may wait to be written.
        host: is told what happens.
        files: what makes the file calls.
    """

    def __init__(
        self,
        options: ObjectOptions,
        home: str,
        max_queued: int,
        host: Host,
        files: Files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options
        self._host = host
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._failures: Counter[str] = Counter()
        self._direct = False
        self._degraded = False
        self._announced = False
        self._closing = False
        self._catalogue = Catalogue(1, make_policy(options.eviction), TOKENS)
        self._workers = Workers(
            Path(options.path), files, options.readers, options.writers, self._worked
        )
        self._keeper = Keeper(Path(options.path), files, lambda news: self._put(self._news, news))
        self._tier = ObjectTier(
            tier_settings(options),
            home,
            self._catalogue,
            self,
            host,
            readers=options.readers,
            writers=options.writers,
            max_queued=max_queued,
            clock=clock,
            now_ns=time.time_ns,
        )
        self._thread = threading.Thread(target=self._run, name="tiered-kv-objects", daemon=True)

    def start(self) -> None:
        """Begin; from now on the host is told things."""
        self._put(self._tier.open)
        self._thread.start()

    # -- for the host; any thread ------------------------------------------------------

    def store(
        self,
        task: int,
        wanted: Sequence[Wanted | None],
        identities: Mapping[str, Mapping[str, object]],
    ) -> bool:
        """Store objects, a prefix head first; their memory is ours until the task ends.

        Returns:
            False if it cannot be asked for now, and nothing will be told of the task.
        """
        return self._say(self._tier.store, task, wanted, identities)

    def load(self, task: int, wanted: Sequence[Wanted | None]) -> bool:
        """Load objects; their memory is ours until the task ends. Returns as :meth:`store`."""
        return self._say(self._tier.load, task, wanted)

    def look_up(self, wanted: LookUp) -> bool:
        """Find objects and lock what is there. Returns as :meth:`store`."""
        return self._say(self._tier.look_up, wanted)

    def unlock(self, names: Sequence[ObjectId]) -> None:
        self._put(self._tier.unlock, names)  # always: a lock must not outlive its holder

    def delete(self, names: Sequence[ObjectId], timeout: float) -> bool:
        """Remove objects, but for those that are locked; waits. Whether that was done in time."""
        wanted = Delete(names)
        return self._say(self._tier.delete, wanted) and wanted.over.wait(timeout)

    def page(
        self, after: tuple[object, ...], count: int, is_wanted: Callable[[str], bool]
    ) -> Sequence[tuple[FileName, int]] | None:
        """Files of objects and their sizes, in the order of their names; waits for a moment.

        Args:
            after: a file's name, or nothing: what follows it in that order.
            count: at most so many.
            is_wanted: whether files of a namespace are wanted.

        Returns:
            None if it cannot be told now.
        """
        found: list[tuple[FileName, int]] = []
        over = threading.Event()

        def collect() -> None:
            names = (n for n in self._catalogue.names() if n > after and is_wanted(n.namespace))
            first = heapq.nsmallest(count, names)
            found.extend((name, self._catalogue.size(name)) for name in first)
            over.set()

        return found if self._say(collect) and over.wait(self.options.io_deadline) else None

    @property
    def used(self) -> int:
        """Bytes the folder holds."""
        return self._tier.used

    def status(self) -> Status:
        return Status(
            is_alive=self._thread.is_alive(),
            is_scanned=self._tier.is_scanned,
            is_degraded=self._tier.is_degraded,
            direct_io=self._direct,
            used=self._tier.used,
            objects=self._tier.objects,
            evicted=self._tier.evicted,
            counts=dict(self._tier.counts),
            failures=dict(self._failures),
            figures=self._tier.figures,
        )

    def close(self, timeout: float) -> bool:
        """End every task and every thread; waits. Whether no thread is left.

        On return no thread touches the host's memory any more, whatever hangs.
        """
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        deadline = time.monotonic() + timeout
        if self._thread.ident is not None:
            self._thread.join(timeout)
        ended = not self._thread.is_alive()
        ended = self._workers.close(max(0.0, deadline - time.monotonic())) and ended
        return self._keeper.close(max(0.1, deadline - time.monotonic())) and ended

    # -- what the tier has done (see `tier.Out`) ---------------------------------------

    def ask(self, chore: Chore) -> bool:
        return self._keeper.ask(chore)

    def do(self, part: Part) -> None:
        self._workers.do(part)

    def prepared(self, news: Prepared) -> None:
        self._direct = news.mode is IoMode.DIRECT
        self._workers.prepared(news.mode)

    def tell(self, ended: Ended) -> None:
        self._host.ended(ended)

    def trouble(self, kind: str, message: str) -> None:
        self._failures[kind] += 1
        self._host.trouble(kind, message)

    # -- the thread --------------------------------------------------------------------

    def _run(self) -> None:
        next_tick = 0.0
        while not self._closing:
            with self._wake:
                while not self._inbox and not self._closing and time.monotonic() < next_tick:
                    self._wake.wait(max(0.0, next_tick - time.monotonic()))
            self._take_all()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK
                self._do(self._tick)
        self._take_all()
        # A copy of an object takes milliseconds; nothing else is waited for.
        while not self._closed_tier():
            time.sleep(0.001)
        self._do(self._tier.flush)

    def _closed_tier(self) -> bool:
        try:
            return self._tier.close()
        except Exception:  # noqa: BLE001 - whatever it is, it would be so again
            self._host.bug()
            return True

    def _take_all(self) -> None:
        while True:
            try:
                call = self._inbox.popleft()
            except IndexError:
                return
            self._do(call)

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:  # noqa: BLE001 - the store must not end, or lose what comes next
            self._failures["internal"] += 1
            self._host.bug()

    def _tick(self) -> None:
        since = self._keeper.busy_since
        self._tier.tick(0.0 if since is None else time.monotonic() - since)
        if self._tier.is_degraded != self._degraded:
            self._degraded = self._tier.is_degraded
            self._host.degraded(is_degraded=self._degraded)

    def _news(self, news: News) -> None:
        self._tier.news(news)
        if self._tier.is_scanned and not self._announced:
            self._announced = True
            self._host.scanned(self._tier.objects, self._tier.used)

    def _worked(self, part: Part, result: Result) -> None:
        """On a part's thread."""
        if part.task.kind is Kind.LOAD:
            self._put(self._tier.read, part, result)
        else:
            self._put(self._tier.wrote, part, result)

    def _say(self, call: Callable[..., None], *args: object) -> bool:
        if len(self._inbox) >= MAX_INBOX or self._closing:
            return False
        self._put(call, *args)
        return True

    def _put(self, call: Callable[..., None], *args: object) -> None:
        with self._wake:
            self._inbox.append(lambda: call(*args))
            self._wake.notify()
