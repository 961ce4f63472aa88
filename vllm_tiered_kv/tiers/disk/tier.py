# SPDX-License-Identifier: Apache-2.0
"""What the disk tier decides: what is written, read and removed when. No thread, socket or file.

It is told what happens and says what is to be done, through the functions it is given. All of it
runs on the agent's thread, but for what is said to be for any thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from vllm_tiered_kv.bits import bit_mask, bits_of
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.answers import Answers
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import (
    BATCH,
    Chore,
    Mark,
    Measured,
    News,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Remove,
    Removed,
    ScanEnded,
    ScanPiece,
    Touch,
    Trouble,
    Unmark,
)
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.flight import Flight
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.orders import (
    MAX_ORDERS,
    CancelReads,
    OpenFolder,
    Order,
    OrderResult,
    Outcome,
    RankReport,
    ReadOrder,
    WriteOrder,
)
from vllm_tiered_kv.tiers.disk.quota import Quota
from vllm_tiered_kv.tiers.disk.ranks import Ranks
from vllm_tiered_kv.tiers.disk.removal import Removal
from vllm_tiered_kv.tiers.disk.settings import TierSettings
from vllm_tiered_kv.tiers.disk.upkeep import Upkeep
from vllm_tiered_kv.tiers.disk.uses import Uses

TOUCH_EVERY = 5.0
"""Seconds."""
MAX_PROBED = 512
"""Files asked about at once."""


class DiskTier:
    """The tier's state.

    Args:
        settings: all that is known at start.
        catalogue: what lies in the folder.
        send: sends orders to a rank; False if it cannot be reached.
        ask: leaves the keeper a chore; False if it has too many.
        tell: takes the end of each order that was wanted, once.
        trouble: takes a kind of failure and what to say of it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: TierSettings,
        catalogue: Catalogue,
        *,
        send: Callable[[int, Sequence[Order]], bool],
        ask: Callable[[Chore], bool],
        tell: Callable[[Ended], None],
        trouble: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._ask = ask
        self._tell = tell
        self._trouble = trouble
        self._clock = clock
        self._quota = Quota(settings, catalogue)
        self._flight = Flight(settings.max_queued, tell)
        self._upkeep = Upkeep(
            ask, settings.ranks, shared=settings.shared, io_deadline=settings.io_deadline
        )
        self._removal = Removal(catalogue, self._quota, ask)
        self._answers = Answers(
            settings,
            catalogue,
            self._quota,
            self._flight,
            self._removal,
            self._upkeep,
            judged=self._settle_readable,
            trouble=trouble,
            clock=clock,
        )
        self._uses: Uses[bytes] = Uses()
        self._namespace = ""
        self._ranks = Ranks(settings.ranks, send)
        self._closed = False
        self._readable = False
        self._to_mark = False
        self._marked = False
        self._touch_at = 0.0

    # -- what others may ask -----------------------------------------------------------

    def groups(self, key: bytes) -> int:
        """Bit ``g``: group ``g``'s part of a chunk can be read now. Any thread."""
        return self._catalogue.groups(key) if self._readable else 0

    def masks(self, keys: Sequence[bytes]) -> Iterator[int]:
        """:meth:`groups` of many chunks. Any thread."""
        return self._catalogue.masks(keys) if self._readable else itertools.repeat(0, len(keys))

    @property
    def is_readable(self) -> bool:
        """Whether anything can be read at all. Any thread."""
        return self._readable

    @property
    def is_connecting(self) -> bool:
        """Whether only the ranks are missing, who learn of it with the first step. Any thread."""
        return self.is_scanned and not self._ranks.are_open and not self.is_degraded

    @property
    def is_scanned(self) -> bool:
        """Whether what lies in the folder is known."""
        return self._upkeep.is_scanned

    @property
    def is_direct(self) -> bool:
        """Whether files bypass the page cache."""
        return self._upkeep.mode is IoMode.DIRECT

    @property
    def chunks(self) -> int:
        """Chunks of our own namespace."""
        return len(self._catalogue)

    @property
    def is_writable(self) -> bool:
        """Whether a write has a chance. Any thread."""
        return not self._closed and not self._ranks.are_late and self._upkeep.writes.is_good

    @property
    def is_degraded(self) -> bool:
        """Whether the tier is not what it should be: in trouble, or closed. Any thread."""
        return self._closed or self._ranks.are_late or not self._upkeep.is_good

    @property
    def used(self) -> int:
        """Bytes that lie in the folder or are on their way. Any thread."""
        return self._quota.used

    @property
    def evicted(self) -> int:
        """Chunks of any namespace evicted so far. Any thread."""
        return self._removal.evicted

    @property
    def is_idle(self) -> bool:
        return self._flight.is_idle

    # -- from the scheduler half -------------------------------------------------------

    def open(self, namespace: str, identity: Mapping[str, object]) -> None:
        """The namespace is known: find out what is there."""
        self._namespace = namespace
        self._catalogue.open(namespace)
        self._upkeep.open(Prepare(namespace, identity))

    def want_write(self, order: WriteOrder) -> None:
        now = self._clock()
        self._ranks.expected(now)
        # A file that is to be purged must be gone before one is written in its place.
        if not self.is_writable or self._catalogue.is_distrusted(order.key):
            self._flight.drop(order.job)
            return
        self._flight.queue_write(order, now)
        self._pump()

    def want_reads(self, orders: Iterable[ReadOrder]) -> None:
        now = self._clock()
        for order in orders:
            there = self.groups(order.key)
            if all(there >> part.group & 1 for part in order.parts):
                self._flight.queue_read(order, now)
            else:
                self._flight.drop(order.job)
        self._pump()

    def cancel(self, jobs: Collection[int]) -> None:
        """Nobody waits for these reads any more."""
        begun = self._flight.cancel(frozenset(jobs))
        for i in range(0, len(begun), MAX_ORDERS):
            self._broadcast([CancelReads(tuple(begun[i : i + MAX_ORDERS]))])

    def used_now(self, keys: Sequence[bytes], now_ns: int, again: Sequence[bytes] = ()) -> None:
        """A prefix is used, given tail first: ``keys`` once more, ``again`` was told before."""
        self._catalogue.used_now(keys)
        self._catalogue.renew(again)
        there = self._catalogue.groups
        self._uses.note([key for key in (*keys, *again) if there(key)], now_ns)

    def renew(self, keys: Sequence[bytes]) -> None:
        """A prefix, tail first, is as new as its newest part."""
        self._catalogue.renew(keys)

    def look_for(self, job: int, keys: Sequence[bytes]) -> None:
        """See whether another engine has written these chunks since the last scan."""
        settings = self._settings
        groups, ranks = range(len(settings.file_bytes)), range(settings.ranks)
        most = max(1, MAX_PROBED // (len(groups) * len(ranks)))
        files = [
            FileName(self._namespace, rank, group, key)
            for key in keys[:most]
            for group in groups
            for rank in ranks
        ]
        good = self._readable and self._upkeep.keeps.is_good
        if not good or not self._ask(Probe(job, files)):
            self._flight.drop(job)

    def close(self) -> None:
        """Offer and keep nothing more; what is under way comes to its end."""
        self._closed = True
        self._settle_readable()
        self._flight.drop_writes()
        self._flight.drop_reads()

    def purge(self) -> None:
        """What was written in this process's life may be wrong: remove it."""
        self._flight.drop_writes()
        self._answers.distrust()
        self._to_mark = self._catalogue.has_distrusted
        self._mark()
        self._removal.remove_distrusted()

    # -- from the ranks ----------------------------------------------------------------

    def connected(self, part_bytes: Mapping[int, Sequence[int]]) -> None:
        """Ranks have said hello, maybe some of them again.

        Args:
            part_bytes: by rank and KV cache group the bytes of a chunk's part; 0 where the rank
                has no layer of the group.
        """
        ranks, groups = range(self._settings.ranks), len(self._settings.file_bytes)
        here = [part_bytes[r] for r in ranks if len(part_bytes.get(r, ())) == groups]
        self._ranks.connected(len(here), self._clock())
        if len(here) == len(ranks):
            self._quota.sized([tuple(file_bytes(n) if n else 0 for n in sizes) for sizes in here])
            self._catalogue.ranks_have([bit_mask(g for g, n in enumerate(s) if n) for s in here])
        self._maybe_open()
        self._pump()

    def report(self, report: RankReport) -> None:
        if not 0 <= report.rank < self._settings.ranks:
            return
        for result in report.results:
            self._answers.take(report.rank, result)
        self._pump()

    # -- from the keeper ---------------------------------------------------------------

    def news(self, news: News) -> None:
        now = self._clock()
        match news:
            case Prepared():
                self._upkeep.prepared(news, now)
                if news.full:
                    self._trouble("disk_folder", "the disk tier's file system is full")
                if not self._upkeep.is_scanned and not self._upkeep.is_scanning:
                    self._begin_scan(now)
            case ScanPiece():
                self._catalogue.found(news.files, news.since_ns)
            case ScanEnded():
                self._catalogue.scan_ends(missed=news.missed)
                self._quota.scanned(news.other_bytes, self._upkeep.scan_began)
                self._upkeep.scan_ended(news, now)
                if news.missed:
                    self._trouble("disk_folder", "parts of the disk tier's folder can't be read")
            case Removed():
                self._removal.removed(news)
                if news.stuck:
                    self._trouble("disk_remove", f"{len(news.stuck)} files cannot be removed")
                if news.stuck and not news.gone:  # one alone must not stop the tier
                    self._upkeep.keeps.failed(now)
            case Probed():
                self._catalogue.found_late(news.there)
                self._tell(Ended(news.job, Outcome.DONE))
            case Measured():
                self._quota.measured(news.free_bytes)
                self._upkeep.keeps.succeeded()
            case Trouble():
                self._keeper_failed(news, now)
        self._settle_readable()
        self._make_room()
        self._maybe_open()
        self._pump()

    def _mark(self) -> None:
        """Whoever comes after us must know what we could not remove; before the first removal."""
        if self._to_mark and self._ask(Mark(self._namespace)):
            self._to_mark, self._marked = False, True

    def _unmark(self) -> None:
        over = not (self._catalogue.has_distrusted or self._answers.is_purging)
        if self._marked and over and self._ask(Unmark(self._namespace)):
            self._marked = False

    def _keeper_failed(self, news: Trouble, now: float) -> None:
        self._upkeep.failed(news.chore, now)
        self._trouble("disk_folder", f"the disk tier's folder: {news.reason}")
        match news.chore:
            case Remove():
                self._removal.failed(news.chore)
            case Mark():
                self._to_mark, self._marked = True, False
            case Probe():
                self._tell(Ended(news.chore.job, Outcome.FAILED))

    def _begin_scan(self, now: float) -> None:
        if self._upkeep.begin_scan(now):
            self._catalogue.scan_begins()

    # -- time --------------------------------------------------------------------------

    def tick(self, keeper_busy_for: float) -> None:
        """To be called now and then.

        Args:
            keeper_busy_for: seconds the keeper has been at one step.
        """
        now, deadline = self._clock(), self._settings.io_deadline
        upkeep, flight = self._upkeep, self._flight
        for _ in flight.overdue(now, deadline):
            self._trouble("disk_hung", f"an I/O call has not returned in {deadline:g} s")
        if flight.hung:
            upkeep.hang(now)
        keeper_hangs = keeper_busy_for > deadline
        if keeper_hangs and upkeep.keeps.is_good:
            upkeep.keeps.failed(now)
            self._trouble("disk_hung", f"the folder has not answered in {deadline:g} s")
        flight.expire(now)
        if self._ranks.become_late(now):
            self._trouble(
                "disk_ranks",
                f"only {self._ranks.here} of {self._settings.ranks} ranks have come to the disk "
                "tier, which has to wait for all: those on other hosts cannot",
            )
            flight.drop_writes()
        if not keeper_hangs:
            self._do_chores(now)
        self._settle_readable()
        self._make_room()
        self._maybe_open()
        self._pump()

    def _do_chores(self, now: float) -> None:
        is_good = self._upkeep.tick(now, hung=len(self._flight.hung))
        if self._upkeep.keeps.is_good:
            self._mark()
            self._removal.remove_distrusted()
            self._unmark()
        if not is_good:
            return
        if self._upkeep.scan_is_due(now):
            self._begin_scan(now)
        if now >= self._touch_at:
            self._touch_at = now + TOUCH_EVERY
            self.flush()

    def flush(self) -> None:
        """Have uses written down."""
        while self._uses:
            files = [
                (FileName(self._namespace, self._catalogue.a_rank_with(group), group, key), used_ns)
                for key, used_ns in self._uses.take(BATCH)
                for group in bits_of(self._catalogue.groups(key))
            ]
            if files and not self._ask(Touch(files)):
                return

    def leave(self) -> None:
        """The process ends: what may be wrong must not be found by the next one."""
        self._removal.remove_all_distrusted()

    # -- inside ------------------------------------------------------------------------

    def _maybe_open(self) -> None:
        mode = self._upkeep.mode
        if self._upkeep.is_scanned and mode is not None:
            direct = mode is IoMode.DIRECT
            self._ranks.open(OpenFolder(self._settings.root, self._namespace, direct))
        self._settle_readable()

    def _settle_readable(self) -> None:
        self._readable = self._ranks.are_open and not self._closed and self._upkeep.reads.is_good

    def _pump(self) -> None:
        """Send what may be sent."""
        if not self._upkeep.writes.is_good:
            self._flight.drop_writes()
        if not self._upkeep.reads.is_good:
            self._flight.drop_reads()
        if not self._ranks.are_open:
            return
        now = self._clock()
        self._broadcast(list(self._flight.begin_reads(now)))
        writes: list[Order] = []
        while (write := self._flight.next_write) is not None and self._flight.may_begin_write:
            if self._removal.concerns(self._files_of(write)):
                # Its file might be removed after it was written, and nobody would know.
                self._flight.drop(self._flight.take_write().job)
                continue
            if not self._quota.has_room(self._quota.need(write)):
                break
            self._flight.begin_write(self._flight.take_write(), self._quota.shares(write), now)
            self._quota.reserve(self._quota.need(write))
            writes.append(write)
        self._broadcast(writes)
        self._make_room()

    def _files_of(self, order: WriteOrder) -> Iterator[FileName]:
        for part in order.parts:
            for rank in range(self._settings.ranks):
                yield FileName(self._namespace, rank, part.group, order.key)

    def _broadcast(self, orders: Sequence[Order]) -> None:
        """Send to every rank; who cannot be reached has dropped them."""
        for rank, job in self._ranks.tell(orders):
            self._answers.take(rank, OrderResult(job, Outcome.DROPPED))

    def _make_room(self) -> None:
        """Have chunks evicted where the folder or the file system is too full."""
        if not self._upkeep.is_scanned:
            return
        coming = self._quota.need(self._flight.next_write)
        if self._upkeep.keeps.is_good:
            self._removal.make_room(coming, self._flight.writing)
        # What is being written may take less than was reserved for it.
        waits = self._removal.is_under_way or self._flight.writing
        if coming and not waits and not self._quota.has_room(coming):
            self._flight.drop_writes()  # they hold their slots
            if self._upkeep.keeps.is_good:
                self._trouble(
                    "disk_room",
                    "nothing is written to disk: there is no room, and no chunk that could make "
                    "any; other files fill the folder or its file system (capacity, min_free)",
                )
