# SPDX-License-Identifier: Apache-2.0
"""Keeps the folder: scans it, removes what the agent chose, notes what was used.

One thread, for all that may take long: on a hung mount it hangs, and only it. The agent
leaves it chores and is told what came of them.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.tiers.disk.chores import (
    BATCH,
    Chore,
    Mark,
    Measure,
    Measured,
    News,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Remove,
    Removed,
    Scan,
    ScanEnded,
    ScanPiece,
    Touch,
    Trouble,
    Unmark,
)
from vllm_tiered_kv.tiers.disk.direct import probe
from vllm_tiered_kv.tiers.disk.entries import FileName, FoundFile
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import (
    is_open_to_others,
    open_folder,
    open_path,
    open_root,
)
from vllm_tiered_kv.tiers.disk.identity_file import write_identity
from vllm_tiered_kv.tiers.disk.marks import clear_mark, inherit, set_mark
from vllm_tiered_kv.tiers.disk.names import (
    IDENTITY_FILE,
    chunk_file,
    rank_folder,
    shard_folder,
)
from vllm_tiered_kv.tiers.disk.scan import Unreadable, remove_vacant, scan_root
from vllm_tiered_kv.tiers.disk.survey import Leftovers, Survey

logger = get_logger(__name__)

MAX_CHORES = 4096
_LAST_CHORES = (Touch, Remove, Mark)
"""Those that are done also when the process ends."""
AHEAD_NS = 600 * 10**9
"""By so much may the clocks of hosts differ."""
UNUSED_NS = 24 * 3600 * 10**9
"""A namespace without files is removed when no engine has used it for so long."""
NOTED_LATE_NS = 60 * 10**9
"""After its use a file's time is set within so long."""
TICK_NS = 20 * 10**6
"""Files are given the time of the kernel's last tick, which is earlier by up to so much."""
BREATH = 0.001
"""Seconds between batches of a scan: its thread shares the interpreter with the scheduler's."""


class Keeper:
    """Does chores one after the other, but for a scan: others come in between its pieces.

    Args:
        root: the folder.
        files: what makes the file calls.
        tell: takes the news; called on the keeper's thread, must not wait long.
    """

    def __init__(
        self,
        root: Path,
        files: Files,
        tell: Callable[[News], None],
    ) -> None:
        self._root = root
        self._files = files
        self._tell = tell
        self._scanned_ns = time.time_ns()
        self._since_ns = self._scanned_ns - TICK_NS
        self._marks: set[int] = set()
        self._identity: Mapping[str, object] | None = None
        self._inherited = False
        self._leftovers = Leftovers()
        self._looked_at_owners = False
        self._wake = threading.Condition()
        self._chores: deque[Chore] = deque()
        self._closing = False
        self._close_by = math.inf
        self.busy_since: float | None = None
        """By the monotonic clock: since when it has been at one chore's one step."""
        self._thread = threading.Thread(target=self._run, name="tiered-kv-keeper", daemon=True)
        self._thread.start()

    def ask(self, chore: Chore) -> bool:
        """Leave a chore; False if there are too many."""
        with self._wake:
            if self._closing or len(self._chores) >= MAX_CHORES:
                return False
            self._chores.append(chore)
            self._wake.notify()
        return True

    def close(self, timeout: float) -> bool:
        """Let the thread end when uses are written down and what was to be removed is.

        Returns:
            Whether it has, within so many seconds.
        """
        with self._wake:
            self._closing = True
            self._close_by = time.monotonic() + timeout / 2
            self._chores = deque(c for c in self._chores if isinstance(c, _LAST_CHORES))
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._chores and not self._closing:
                    self._wake.wait(5.0)
                if not self._chores:
                    return
                chore = self._chores.popleft()
            self._try(chore)
            self.busy_since = None

    def _try(self, chore: Chore) -> None:
        self._step()
        # Where the clock is set back, files get times from before our start.
        self._since_ns = min(self._since_ns, time.time_ns() - TICK_NS)
        try:
            self._do(chore)
        except Exception as error:  # noqa: BLE001 - the thread goes on with the next
            self._tell(Trouble(chore, f"{type(error).__name__}: {error}"))

    def _do(self, chore: Chore) -> None:
        match chore:
            case Prepare():
                self._prepare(chore)
            case Scan():
                self._scan(chore)
            case Remove():
                self._remove(chore.files)
            case Mark():
                self._mark(chore)
            case Unmark():
                while self._marks:
                    clear_mark(self._files, self._root, chore.namespace, self._marks.pop())
            case Touch():
                self._touch(chore.files)
            case Probe():
                self._probe(chore)
            case Measure():
                self._measure()

    def _step(self) -> None:
        self.busy_since = time.monotonic()

    def _prepare(self, chore: Prepare) -> None:
        self._identity = chore.identity
        reason = write_identity(self._files, self._root, chore.namespace, chore.identity)
        full = reason is FailureReason.NO_SPACE  # what can be removed may be all that fills it
        if reason is not None and not full:
            self._tell(Trouble(chore, reason.value))
            return
        if not self._inherited:
            reason = inherit(self._files, self._root, chore.namespace, self._go_on)
            if reason is not None:
                self._tell(Trouble(chore, reason.value))
                return
            self._inherited = True
        if not self._looked_at_owners:
            self._looked_at_owners = True
            self._warn_of_others(chore.namespace)
        mode = probe(self._files, self._root, chore.namespace, rank=0)
        self._measure()  # first: what is wanted from then on goes by it
        self._tell(Prepared(mode, full))

    def _warn_of_others(self, namespace: str) -> None:
        """Who can write there decides what prompts are answered with: checksums are no seals."""
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            root = open_root(self._files, self._root)
            opened.callback(self._files.close, root)
            own = open_folder(self._files, namespace, root)
            opened.callback(self._files.close, own)
            for folder, path in ((root, self._root), (own, self._root / namespace)):
                if is_open_to_others(self._files.fstat(folder), os.geteuid()):
                    logger.warning(
                        "tiered-kv: other users may write to %s: whoever can may put there what "
                        "prompts are answered from",
                        path,
                    )
                    return

    def _go_on(self) -> bool:
        self._step()
        return not self._closing

    def _mark(self, chore: Mark) -> None:
        reason = set_mark(self._files, self._root, chore.namespace, self._since_ns)
        if reason is not None:
            self._tell(Trouble(chore, reason.value))
        else:
            self._marks.add(self._since_ns)

    def _measure(self) -> None:
        root = open_root(self._files, self._root)
        try:
            status = self._files.statvfs(root)
        finally:
            self._files.close(root)
        if status.f_blocks:  # some file systems do not say
            self._tell(Measured(status.f_bavail * status.f_frsize))

    def _scan(self, chore: Scan) -> None:
        started, now_ns = time.monotonic(), time.time_ns()
        since_ns = min(self._scanned_ns, now_ns) - NOTED_LATE_NS
        self._stamp(chore.namespace, now_ns)
        self._leftovers.begin(now_ns, started)
        survey, piece = Survey(chore, now_ns), []
        items = scan_root(self._files, self._root, self._leftovers.has)
        for met, item in enumerate(items, start=1):
            self._step()
            if self._closing:
                return
            if isinstance(item, Unreadable) and not item.path:
                self._tell(Trouble(chore, item.reason.value))
                return
            if (file := survey.meet(item)) is not None:
                piece.append(self._dated(file, now_ns))
            if met % BATCH == 0:
                if piece:
                    self._tell(ScanPiece(piece, since_ns))
                    piece = []
                self._do_others()
                time.sleep(BREATH)
        for namespace in survey.vacant:
            self._step()
            if self._closing:
                return
            self._do_others()
            remove_vacant(self._files, self._root, namespace, now_ns - UNUSED_NS)
        self._scanned_ns = now_ns
        self._tell(ScanPiece(piece, since_ns))
        self._tell(ScanEnded(survey.other, time.monotonic() - started, survey.missed))

    def _stamp(self, namespace: str, now_ns: int) -> None:
        """Let other engines know that this namespace is in use, whatever is in it."""
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            folder = open_path(self._files, self._root, [namespace], opened)
            try:
                self._files.utime(IDENTITY_FILE, now_ns, dir_fd=folder)
            except FileNotFoundError:  # somebody has removed it, maybe with the folder
                if self._identity is not None:
                    write_identity(self._files, self._root, namespace, self._identity)

    def _dated(self, file: FoundFile, now_ns: int) -> FoundFile:
        """A clock that was set back leaves files that would be the newest for years: no more."""
        if file.used_ns <= now_ns + AHEAD_NS:
            return file
        self._touch([(file.name, now_ns)])
        return file._replace(used_ns=now_ns)

    def _do_others(self) -> None:
        """What was asked since the scan began: it may take minutes, and room is made meanwhile."""
        with self._wake:
            due = [chore for chore in self._chores if not isinstance(chore, Scan)]
            self._chores = deque(chore for chore in self._chores if isinstance(chore, Scan))
        for chore in due:
            if not self._closing or isinstance(chore, _LAST_CHORES):
                self._try(chore)

    def _remove(self, names: Sequence[FileName]) -> None:
        gone, stuck = [], []
        for name in names:
            if time.monotonic() > self._close_by:
                return
            self._step()
            try:
                with self._shard(name) as (folder, file):
                    self._files.unlink(file, dir_fd=folder)
            except FileNotFoundError:
                gone.append(name)  # somebody else has removed it
            except OSError:
                stuck.append(name)
            else:
                gone.append(name)
        self._tell(Removed(gone, stuck))

    def _touch(self, files: Sequence[tuple[FileName, int]]) -> None:
        for name, used_ns in files:
            if time.monotonic() > self._close_by:
                return
            self._step()
            with contextlib.suppress(OSError), self._shard(name) as (folder, file):
                self._files.utime(file, used_ns, dir_fd=folder)

    def _probe(self, chore: Probe) -> None:
        there = []
        for name in chore.files:
            self._step()
            with contextlib.suppress(OSError), self._shard(name) as (folder, file):
                status = self._files.stat(file, dir_fd=folder)
                if stat.S_ISREG(status.st_mode):
                    there.append(FoundFile(name, status.st_size, status.st_mtime_ns))
        self._tell(Probed(chore.job, there))

    @contextlib.contextmanager
    def _shard(self, name: FileName) -> Iterator[tuple[int, str]]:
        """The open folder that a file is in, and its name there; no link is followed.

        Raises:
            OSError: there is no such folder, or it cannot be opened.
        """
        file = chunk_file(name.key, name.group)
        if file is None:
            raise FileNotFoundError(name.key)
        with contextlib.ExitStack() as opened:
            folder = open_root(self._files, self._root)
            opened.callback(self._files.close, folder)
            for part in (name.namespace, rank_folder(name.rank), shard_folder(name.key)):
                folder = open_folder(self._files, part, folder)
                opened.callback(self._files.close, folder)
            yield folder, file
