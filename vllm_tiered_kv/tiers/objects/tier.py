# SPDX-License-Identifier: Apache-2.0
"""What is written, read and removed when. No thread and no file.

It is told what happens and says what is to be done, through the functions it is given. All of it
runs on one thread, but for what is said to be for any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import (
    BATCH,
    Chore,
    Measured,
    News,
    Prepare,
    Prepared,
    Probed,
    Remove,
    Removed,
    ScanEnded,
    ScanPiece,
    Touch,
    Trouble,
)
from vllm_tiered_kv.tiers.disk.entries import FileName, FoundFile
from vllm_tiered_kv.tiers.disk.failures import OF_ONE_CHUNK, FailureReason
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.quota import Quota
from vllm_tiered_kv.tiers.disk.removal import Removal
from vllm_tiered_kv.tiers.disk.results import Read, ReadStatus, WriteStatus, Written
from vllm_tiered_kv.tiers.disk.settings import TierSettings
from vllm_tiered_kv.tiers.disk.upkeep import RESCAN_SHARED, Upkeep
from vllm_tiered_kv.tiers.disk.uses import STEP_NS, Uses
from vllm_tiered_kv.tiers.objects.answers import Answers, Listener
from vllm_tiered_kv.tiers.objects.folders import Folders
from vllm_tiered_kv.tiers.objects.holds import Holds
from vllm_tiered_kv.tiers.objects.lookups import LookUps
from vllm_tiered_kv.tiers.objects.names import ObjectId
from vllm_tiered_kv.tiers.objects.queue import PartQueue
from vllm_tiered_kv.tiers.objects.tasks import Delete, Ended, Kind, LookUp, Part, Task, Wanted

WRITE_PATIENCE = 60.0
"""Seconds a write waits before it begins: the host keeps its memory for it."""
MAX_PARTS = 16384
"""Parts of one kind that may wait."""
LARGEST_SHARE = 4
"""An object that would take more than one part in so many of the capacity is not kept."""
TOUCH_EVERY = 5.0
"""Seconds."""


class Out(Protocol):
    """What the tier has done by others."""

    def ask(self, chore: Chore) -> bool:
        """Leave the keeper a chore; False if it has too many."""

    def do(self, part: Part) -> None:
        """Have a thread read or write a file."""

    def prepared(self, news: Prepared) -> None: ...

    def tell(self, ended: Ended) -> None:
        """A task is over."""

    def trouble(self, kind: str, message: str) -> None: ...


class ObjectTier:
    """The state.

    Args:
        settings: the limits.
        home: the namespace that says what the folder is.
        catalogue: empty, and without a namespace of its own.
        out: does what is to be done.
        listener: hears of objects.
        readers: threads that read.
        writers: threads that write.
        max_queued: bytes of objects that may wait to be written.
        clock: seconds, monotonic.
        now_ns: nanoseconds since the epoch.
    """

    def __init__(
        self,
        settings: TierSettings,
        home: str,
        catalogue: Catalogue,
        out: Out,
        listener: Listener,
        *,
        readers: int,
        writers: int,
        max_queued: int,
        clock: Callable[[], float],
        now_ns: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._home = home
        self._catalogue = catalogue
        self._out = out
        self._answers = Answers(catalogue, listener, out.tell)
        self._clock = clock
        self._now_ns = now_ns
        self._quota = Quota(settings, catalogue)
        self._upkeep = Upkeep(
            out.ask, settings.ranks, shared=settings.shared, io_deadline=settings.io_deadline
        )
        self._removal = Removal(catalogue, self._quota, out.ask)
        self._reads = PartQueue(MAX_PARTS, settings.capacity, 2 * readers)
        self._writes = PartQueue(MAX_PARTS, max_queued, 2 * writers)
        self._holds = Holds()
        self._folders = Folders()
        self._lookups = LookUps(catalogue, self._removal.__contains__)
        self._uses: Uses[FileName] = Uses()
        self._deletes: list[Delete] = []
        self._writing: set[FileName] = set()
        self._closed = False
        self._touch_at = 0.0

    # -- what others may ask; any thread -----------------------------------------------

    @property
    def counts(self) -> Mapping[str, int]:
        """What has happened so far, by kind."""
        return self._answers.counts

    @property
    def used(self) -> int:
        """Bytes that lie in the folder or are on their way."""
        return self._quota.used

    @property
    def objects(self) -> int:
        return self._catalogue.files

    @property
    def evicted(self) -> int:
        return self._removal.evicted

    @property
    def is_scanned(self) -> bool:
        return self._upkeep.is_scanned

    @property
    def is_degraded(self) -> bool:
        """Whether the folder is in trouble and left alone, or all is over."""
        return self._closed or not self._upkeep.is_good

    @property
    def figures(self) -> dict[str, int]:
        """How much waits and is under way."""
        return {
            "queued_stores": len(self._writes),
            "queued_store_bytes": self._writes.queued_bytes,
            "queued_loads": len(self._reads),
            "active": len(self._writes.active) + len(self._reads.active),
            "hung": self._hung,
            "locked": self._holds.locks,
        }

    # -- from the host -----------------------------------------------------------------

    def open(self) -> None:
        """Find out what is there."""
        self._upkeep.open(Prepare(self._home, {"kind": self._home}))

    def store(
        self,
        task: int,
        wanted: Sequence[Wanted | None],
        identities: Mapping[str, Mapping[str, object]],
    ) -> None:
        """Write objects, the first before the others: those that find no room are dropped.

        Args:
            task: names it when it is over.
            wanted: a prefix, head first; None for what cannot be kept.
            identities: what the namespaces are, in plain words.
        """
        now, now_ns = self._clock(), self._now_ns()
        whole = Task(task, Kind.STORE, len(wanted))
        for i, one in enumerate(wanted):
            if one is None:
                whole.note(i, done=False, nbytes=0)
                continue
            used_ns = now_ns - STEP_NS * i
            identity = identities.get(one.file.namespace)
            part = Part(whole, i, one, now + WRITE_PATIENCE, identity, used_ns)
            fits = part.nbytes > 0 and file_bytes(part.nbytes) <= self._largest
            good = fits and self._upkeep.writes.is_good and not self._closed
            if not good or not self._writes.put(part):
                self._answers.drop(part)
        self._answers.over(whole)
        self._pump()

    def load(self, task: int, wanted: Sequence[Wanted | None]) -> None:
        """Read objects; whatever is not whole is not loaded."""
        now, whole = self._clock(), Task(task, Kind.LOAD, len(wanted))
        for i, one in enumerate(wanted):
            if one is None or not (self._searches or self._catalogue.has(one.file)):
                whole.note(i, done=False, nbytes=0)
                continue
            part = Part(whole, i, one, now + self._settings.io_deadline)
            good = self._upkeep.reads.is_good and not self._closed and part.nbytes > 0
            if not good or not self._reads.put(part):
                self._answers.drop(part)
        self._answers.over(whole)
        self._pump()

    def look_up(self, wanted: LookUp) -> None:
        """Find and lock."""
        now = self._clock()
        if self._closed or not self._upkeep.reads.is_good:
            self._answers.none_found(wanted)
            return
        good = self._searches and self._upkeep.keeps.is_good
        probe = self._lookups.probe(wanted, now) if good else None
        if probe is None or not self._out.ask(probe):
            self._lookups.take(wanted.task)
            self._found(wanted)

    def unlock(self, names: Iterable[ObjectId]) -> None:
        for name in names:
            self._holds.unlock(name)

    def delete(self, wanted: Delete) -> None:
        """Remove what is neither locked nor being written."""
        free = [name for name in wanted.objects if not self._holds.is_locked(name)]
        files = [file for name in free for file in self._lookups.places(name)]
        there = [file for file in files if self._searches or self._catalogue.has(file)]
        self._answers.removed([file for file in files if not self._catalogue.has(file)])
        if not self._closed:
            self._removal.remove([file for file in there if file not in self._writing])
        wanted.left.update(file for file in there if file in self._removal)
        if wanted.left:
            self._deletes.append(wanted)
        else:
            wanted.over.set()

    def close(self) -> bool:
        """End all tasks; False while memory of the host is being copied: to be called again."""
        self._closed = True
        for queue in (self._reads, self._writes):
            for part in queue.drop_all():
                self._answers.drop(part)
        for wanted in self._lookups.take_all():
            self._answers.none_found(wanted)
        for delete in self._deletes:
            delete.over.set()
        self._deletes = []
        active = self._reads.active | self._writes.active
        return not [part for part in active if not self._answers.abandon(part)]

    # -- from the threads --------------------------------------------------------------

    def wrote(self, part: Part, result: Written | None) -> None:
        """A thread is done with a part; None if the host's memory was not to be had."""
        self._writes.end(part)
        self._writing.discard(part.file)
        self._holds.release(part.file)
        self._quota.settle(part.reserved)
        if result is None:
            self._answers.drop(part)
        elif result.status is WriteStatus.FAILED:
            self._failed(part, "disk_write", result.reason)
            self._doubt(part.reserved)
        else:
            self._upkeep.writes.succeeded()
            is_new = result.status is WriteStatus.WRITTEN
            self._catalogue.wrote(part.file, result.nbytes, 0)
            self._lookups.learn(part.file.namespace)
            if is_new:
                self._quota.wrote(result.nbytes)
            self._answers.counts["stored" if is_new else "existed"] += 1
            part.task.keep(part)
            self._answers.give(part, done=True, nbytes=part.nbytes if is_new else 0)
        self._pump()

    def read(self, part: Part, result: Read | None) -> None:
        """A thread is done with a part; None if nobody waits for it any more."""
        self._reads.end(part)
        if result is None:
            self._answers.drop(part)
        elif result.status is ReadStatus.OK:
            self._upkeep.reads.succeeded()
            self._answers.counts["loaded"] += 1
            if self._searches and part.file not in self._removal:
                self._catalogue.found_late([FoundFile(part.file, result.nbytes, 0)])
            part.task.keep(part)
            self._answers.give(part, done=True, nbytes=part.nbytes)
        elif result.status is ReadStatus.FAILED:
            self._failed(part, "disk_read", result.reason)
        else:
            self._upkeep.reads.succeeded()
            self._not_there(part, result)
        self._pump()

    def _not_there(self, part: Part, result: Read) -> None:
        leaving = part.file in self._removal
        nbytes = self._catalogue.forget(part.file)
        self._answers.removed((part.file,))
        if result.status is ReadStatus.DAMAGED:
            self._doubt(nbytes)  # it was removed, unless that failed
            self._answers.counts["damaged"] += 1
            reason = result.reason.value if result.reason is not None else ""
            self._out.trouble("disk_damaged", f"a damaged file was removed: {reason}")
        elif nbytes and not leaving:
            self._answers.counts["missing"] += 1
            self._out.trouble("disk_missing", "a file that should have been there was not")
            self._doubt(nbytes)  # it may have been written anew meanwhile
        self._answers.give(part, done=False)

    def _failed(self, part: Part, kind: str, reason: object) -> None:
        full = reason is FailureReason.NO_SPACE
        writing = part.task.kind is Kind.STORE
        health = self._upkeep.writes if writing else self._upkeep.reads
        if reason not in OF_ONE_CHUNK:
            health.failed(self._clock(), at_once=full)
        if full:
            self._upkeep.measure_soon()
        why = reason.value if isinstance(reason, FailureReason) else "other"
        self._out.trouble(kind, f"a file could not be {'written' if writing else 'read'}: {why}")
        self._answers.give(part, done=False)

    # -- from the keeper ---------------------------------------------------------------

    def news(self, news: News) -> None:
        now = self._clock()
        match news:
            case Prepared():
                self._upkeep.prepared(news, now)
                self._out.prepared(news)
                if news.full:
                    self._out.trouble("disk_folder", "the folder's file system is full")
                if not self._upkeep.is_scanned and not self._upkeep.is_scanning:
                    self._begin_scan(now)
            case ScanPiece():
                self._catalogue.found(news.files, news.since_ns)
                self._met(news.files)
            case ScanEnded():
                self._catalogue.scan_ends(missed=news.missed)
                self._quota.scanned(news.other_bytes, self._upkeep.scan_began)
                self._upkeep.scan_ended(news, now)
                self._answers.scanned()
                if news.missed:
                    self._out.trouble("disk_folder", "parts of the folder can't be read")
            case Removed():
                self._removal.removed(news)
                self._answers.removed(news.gone)
                self._deleted((*news.gone, *news.stuck))
                if news.stuck:
                    message = f"{len(news.stuck)} files cannot be removed"
                    self._out.trouble("disk_remove", message)
                    self._upkeep.keeps.failed(now)
            case Probed():
                self._catalogue.found_late(news.there)
                self._met(news.there)
                if (wanted := self._lookups.take(news.job)) is not None:
                    self._found(wanted)
            case Measured():
                self._quota.measured(news.free_bytes)
                self._upkeep.keeps.succeeded()
            case Trouble():
                self._upkeep.failed(news.chore, now)
                self._out.trouble("disk_folder", f"the folder: {news.reason}")
                if isinstance(news.chore, Remove):
                    self._removal.failed(news.chore)
                    self._deleted(news.chore.files)
        self._make_room()
        self._pump()

    def _met(self, files: Iterable[FoundFile]) -> None:
        """These are there, and so are the folders they are in."""
        for file in files:
            self._folders.new_bytes(file.name)
            self._lookups.learn(file.name.namespace)

    def _deleted(self, files: Iterable[FileName]) -> None:
        """The keeper is done with these."""
        if not self._deletes:
            return
        for delete in self._deletes:
            delete.left.difference_update(files)
            if not delete.left:
                delete.over.set()
        self._deletes = [delete for delete in self._deletes if delete.left]

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
        for queue in (self._reads, self._writes):
            for part in queue.expired(now):
                self._answers.drop(part)
            for _ in queue.overdue(now, deadline):
                self._out.trouble("disk_hung", f"an I/O call has not returned in {deadline:g} s")
            for part in queue.hung:
                self._answers.abandon(part)
        if self._hung:
            self._upkeep.hang(now)
        keeper_hangs = keeper_busy_for > deadline
        if keeper_hangs and self._upkeep.keeps.is_good:
            self._upkeep.keeps.failed(now)
            self._out.trouble("disk_hung", f"the folder has not answered in {deadline:g} s")
        for wanted in self._lookups.expired(now):
            self._found(wanted)
        self._answers.counts["locks_expired"] += self._holds.expire(now)
        if not keeper_hangs:
            self._do_chores(now)
        self._make_room()
        self._pump()

    def _do_chores(self, now: float) -> None:
        if not self._upkeep.tick(now, hung=self._hung):
            return
        if self._upkeep.scan_is_due(now):
            self._begin_scan(now)
        if now >= self._touch_at:
            self._touch_at = now + TOUCH_EVERY
            self.flush()

    def flush(self) -> None:
        """Have uses written down."""
        while self._uses:
            if not self._out.ask(Touch(self._uses.take(BATCH))):
                return

    # -- inside ------------------------------------------------------------------------

    @property
    def _searches(self) -> bool:
        """Whether files may be there that the catalogue does not have."""
        return self._settings.shared or not self._upkeep.is_scanned

    @property
    def _hung(self) -> int:
        return len(self._reads.hung) + len(self._writes.hung)

    @property
    def _largest(self) -> int:
        return self._settings.capacity // LARGEST_SHARE

    def _found(self, wanted: LookUp) -> None:
        """A look-up is over."""
        now = self._clock()
        files = self._lookups.find(wanted)
        for name, file in zip(wanted.objects, files, strict=True):
            if name is not None and file is not None:
                self._holds.lock(name, file, now)
        used = [file for file in reversed(files) if file is not None]
        self._catalogue.touch(used)
        self._uses.note(used, self._now_ns())
        self._answers.found(wanted, [file is not None for file in files])

    def _pump(self) -> None:
        """Begin what may begin."""
        if not self._upkeep.reads.is_good:
            for part in self._reads.drop_all():
                self._answers.drop(part)
        if not self._upkeep.writes.is_good:
            for part in self._writes.drop_all():
                self._answers.drop(part)
        if self._upkeep.mode is None or self._closed:
            return
        now = self._clock()
        while self._reads.may_begin:
            part = self._reads.take()
            self._reads.begin(part, now)
            self._out.do(part)
        while self._upkeep.is_scanned and self._writes.may_begin:
            if not self._begin_write(now):
                break
        self._make_room()

    def _begin_write(self, now: float) -> bool:
        """Begin or drop the next write; False if it has to wait for room."""
        part = self._writes.next
        if part is None:
            return False
        if part.file in self._removal or part.file in self._writing:
            # Its file might be removed after it was written, and nobody would know.
            self._answers.drop(self._writes.take())
            return True
        nbytes = file_bytes(part.nbytes)
        if not self._quota.has_room(nbytes):
            return False
        part.reserved = nbytes
        self._writes.begin(self._writes.take(), now)
        self._quota.reserve(nbytes)
        self._writing.add(part.file)
        self._holds.hold(part.file)
        self._lookups.learn(part.file.namespace)
        self._quota.doubt(self._folders.new_bytes(part.file), now)  # until a scan has met them
        self._out.do(part)
        return True

    def _make_room(self) -> None:
        """Have objects evicted where the folder or the file system is too full."""
        if not self._upkeep.is_scanned or self._closed:
            return
        part = self._writes.next
        coming = 0 if part is None else file_bytes(part.nbytes)
        if self._upkeep.keeps.is_good:
            self._removal.make_room(coming, self._holds.chunks)
        waits = self._removal.is_under_way or self._writes.active
        if coming and not waits and not self._quota.has_room(coming):
            for waiting in self._writes.drop_all():  # no room can be made
                self._answers.drop(waiting)

    def _doubt(self, nbytes: int) -> None:
        now = self._clock()
        self._quota.doubt(nbytes, now)
        if nbytes > 0:
            self._upkeep.scan_by(now + self._settings.io_deadline + RESCAN_SHARED)
