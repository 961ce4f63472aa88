# SPDX-License-Identifier: Apache-2.0
"""Runs the disk tier beside the scheduler's thread, whether the engine steps or not.

The scheduler half says what it wants and takes what came of it; both cost it a queue's append.
File calls are made by the ranks and by the keeper, so that nothing here waits for a device.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from vllm_tiered_kv.config import format_size
from vllm_tiered_kv.errands import Errands
from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.channel import AgentSockets
from vllm_tiered_kv.tiers.disk.chores import News
from vllm_tiered_kv.tiers.disk.claims import Claims
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.keeper import Keeper
from vllm_tiered_kv.tiers.disk.orders import RankReport, ReadOrder, WriteOrder
from vllm_tiered_kv.tiers.disk.settings import TierSettings
from vllm_tiered_kv.tiers.disk.tier import DiskTier

logger = get_logger(__name__)

MAX_FAILURES = 4096
"""Failures not yet taken; older ones are not counted."""
TICK = 0.2
"""Seconds between two looks at deadlines."""
CLOSE_TIMEOUT = 5.0
WAIT = 0.02
"""Seconds the keeper waits where there is too much to do."""


class DiskAgent:
    """The scheduler half's side of the disk tier.

    But for the constructor and :meth:`shutdown`, every method is for the scheduler's thread:
    none waits, none makes a file call, none raises.

    Args:
        settings: what the tier is built from.
        catalogue: empty; the agent's from now on.
        sockets: the agent's end of the channel.
        files: what makes the keeper's file calls.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: TierSettings,
        catalogue: Catalogue,
        sockets: AgentSockets,
        files: Files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._sockets = sockets
        self._clock = clock
        self._errands = Errands(sockets.wake)
        self._ended: deque[Ended] = deque()
        self._failures: deque[str] = deque(maxlen=MAX_FAILURES)
        self._claims = Claims(settings.ranks, settings.max_queued)
        self._trouble_log = OncePerKind(logger)
        self._closing = False
        self._stopping = False
        self._purges_asked = self._purges_done = 0
        self._degraded = False
        self._malformed = 0
        self._missed = 0
        self._catalogue = catalogue
        self._keeper = Keeper(Path(settings.root), files, self._hear)
        self._tier = DiskTier(
            settings,
            catalogue,
            send=sockets.send,
            ask=self._keeper.ask,
            tell=self._note_end,
            trouble=self._trouble,
            clock=clock,
        )
        self._thread = threading.Thread(target=self._run, name="tiered-kv-disk", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> tuple[str, str, bytes]:
        """For the ranks: where reports go, where orders come from, the secret."""
        return self._sockets.reports_address, self._sockets.orders_address, self._sockets.secret

    # -- what there is -----------------------------------------------------------------

    def groups(self, key: bytes) -> int:
        """Bit ``g``: group ``g``'s part of the chunk can be read."""
        return self._tier.groups(key) if self._offers else 0

    def masks(self, keys: Sequence[bytes]) -> Iterator[int]:
        """:meth:`groups` of many chunks, each looked up when it is asked for."""
        return self._tier.masks(keys) if self._offers else itertools.repeat(0, len(keys))

    def take_gone(self) -> tuple[list[bytes], bool]:
        """Chunks of which less can be read than before, and whether there are others.

        From the first call on they are noted.
        """
        if self._catalogue.gone is None:
            self._catalogue.gone = deque()
        gone = self._catalogue.gone
        keys = [gone.popleft() for _ in range(len(gone))]
        missed, self._missed = self._missed, self._catalogue.missed
        return keys, missed != self._missed

    @property
    def is_readable(self) -> bool:
        return self._offers and self._tier.is_readable

    @property
    def _offers(self) -> bool:
        """False from the moment something may be wrong; the agent's thread comes to it later."""
        return not self._closing and self._purges_asked == self._purges_done

    @property
    def is_connecting(self) -> bool:
        """Whether the tier can be read as soon as the ranks have had a first step."""
        return self._tier.is_connecting

    @property
    def is_writable(self) -> bool:
        """Whether something may be asked to be written, now or once the tier is open."""
        return not self._closing and self._tier.is_writable

    @property
    def is_closed(self) -> bool:
        """Whether nothing will be written or offered any more."""
        return self._closing

    @property
    def is_degraded(self) -> bool:
        return self._tier.is_degraded

    @property
    def used(self) -> int:
        """Bytes the folder holds."""
        return self._tier.used

    @property
    def evicted(self) -> int:
        return self._tier.evicted

    # -- what is wanted ----------------------------------------------------------------

    def open(self, namespace: str, identity: Mapping[str, object]) -> None:
        """The namespace is known; any thread, once."""
        self._errands.tell(self._tier.open, namespace, identity)

    def expect(self, order: WriteOrder) -> bool:
        """A store is under way, and what it brings into its slots is to be written.

        Returns:
            False if it will not be. Else :meth:`settle` is told how the store ended, and the
            slots belong to the write until :meth:`take` gives its end.
        """
        return not self._closing and self._claims.add(order)

    def settle(self, job: int, *, good: bool) -> bool:
        """The scheduler half knows how a store has ended, or will not trust it.

        Returns:
            Whether nothing will come of the write that was expected: :meth:`take` will not name it.
        """
        order = self._claims.take(job)
        if order is None:
            return False  # the agent has taken it
        return not (good and self.write(order))

    def write(self, order: WriteOrder) -> bool:
        """Write what is in these slots; False if it cannot be asked for now."""
        return self._errands.tell(self._tier.want_write, order)

    def read(self, orders: Sequence[ReadOrder]) -> bool:
        """Read into these slots; False if it cannot be asked for now."""
        return self._errands.tell(self._tier.want_reads, orders)

    def cancel(self, jobs: Sequence[int]) -> None:
        """Nobody waits for these reads any more; they still end."""
        self._errands.tell(self._tier.cancel, jobs)

    def used_now(self, keys: Sequence[bytes], again: Sequence[bytes] = ()) -> None:
        """A prefix is used, given tail first.

        Args:
            keys: its chunks that are used once more.
            again: those before them, whose use has been told.
        """
        self._errands.tell(self._tier.used_now, keys, time.time_ns(), again)

    def renew(self, keys: Sequence[bytes]) -> None:
        """A prefix, tail first, is as new as its newest part; that is no use of it."""
        self._errands.tell(self._tier.renew, keys)

    def look_for(self, job: int, keys: Sequence[bytes]) -> bool:
        """See whether another engine has written these chunks, or the first of them.

        Returns:
            False if it cannot be asked for now. Else :meth:`take` names the job when it is known.
        """
        return self._errands.tell(self._tier.look_for, job, keys)

    def purge(self) -> None:
        """What was written in this process's life may be wrong: remove it."""
        self._purges_asked += 1
        self._errands.insist(self._purge)

    def close(self) -> None:
        """Offer and keep nothing from now on."""
        self._closing = True
        self._errands.insist(self._tier.close)

    def take(self) -> list[Ended]:
        """Orders that have ended since the last call."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def take_failures(self) -> list[str]:
        """Kinds of failures since the last call, one entry each."""
        kinds = []
        while self._failures:
            kinds.append(self._failures.popleft())
        return kinds

    def shutdown(self) -> None:
        """End the threads, within ten seconds or so; what has not been written is not."""
        self._closing = self._stopping = True
        self._errands.close()
        self._thread.join(CLOSE_TIMEOUT)
        if not self._keeper.close(CLOSE_TIMEOUT):
            self._trouble("disk_hung", "the folder does not answer; its thread is left to the exit")

    # -- the agent's thread ------------------------------------------------------------

    def _purge(self) -> None:
        self._tier.purge()
        self._purges_done += 1

    def _run(self) -> None:
        next_tick = self._clock() + TICK
        hellos, announced = 0, False
        while not self._stopping:
            try:
                for report in self._sleep(next_tick):
                    self._do(self._heard, report)
                for call in self._errands.take():
                    self._do(call)
                if self._sockets.hellos != hellos:
                    hellos = self._sockets.hellos
                    self._tier.connected(
                        {rank: hello.part_bytes for rank, hello in self._sockets.said.items()}
                    )
                if self._tier.is_scanned and not announced:
                    announced = True
                    self._announce()
                if self._clock() >= next_tick:
                    next_tick = self._clock() + TICK
                    self._tick()
            except Exception:  # noqa: BLE001 - see _do
                self._note_bug()
        self._do(self._tier.flush)
        self._do(self._tier.leave)
        self._sockets.close()

    def _sleep(self, until: float) -> list[RankReport]:
        with self._errands.sleep() as idle:
            return self._sockets.wait(max(0.0, until - self._clock()) if idle else 0.0)

    def _do(self, call: Callable[..., None], *args: object) -> None:
        try:
            call(*args)
        except Exception:  # noqa: BLE001 - the tier must not end, or lose what comes next
            self._note_bug()

    def _note_bug(self) -> None:
        self._failures.append("internal")
        self._trouble_log.error("internal", "unexpected error in the disk agent")

    def _heard(self, report: RankReport) -> None:
        for result in report.stores:
            order = self._claims.copied(report.rank, result)
            if order is not None:
                self._tier.want_write(order)
        self._tier.report(report)

    def _announce(self) -> None:
        logger.info(
            "tiered-kv: the disk tier is ready: %d chunks of this model in %s; all in it: %s of "
            "%s; files are read and written %s",
            self._tier.chunks,
            self.settings.root,
            format_size(self._tier.used),
            format_size(self.settings.capacity),
            "directly" if self._tier.is_direct else "through the page cache",
        )

    def _tick(self) -> None:
        since = self._keeper.busy_since
        self._tier.tick(0.0 if since is None else time.monotonic() - since)
        self._claims.tidy()
        if self._tier.is_degraded != self._degraded:
            self._degraded = self._tier.is_degraded
            if self._degraded:
                logger.warning("tiered-kv: the disk tier is degraded; serving goes on without it")
            else:
                logger.info("tiered-kv: the disk tier works again")
        if self._sockets.malformed != self._malformed:
            self._malformed = self._sockets.malformed
            self._trouble("report", "a message to the disk agent was not a report")

    def _note_end(self, ended: Ended) -> None:
        self._ended.append(msgspec.structs.replace(ended, at=self._clock()))

    def _hear(self, news: News) -> None:
        """On the keeper's thread, which can wait: no news may be lost."""
        while not self._errands.tell(self._tier.news, news) and not self._stopping:
            time.sleep(WAIT)

    def _trouble(self, kind: str, message: str) -> None:
        self._failures.append(kind)
        self._trouble_log.warn(kind, message)
