# SPDX-License-Identifier: Apache-2.0
"""Whether the tier is in order, and what the keeper is asked when. No I/O.

Three kinds of I/O are watched: reads, writes, and what the keeper does. When one is in trouble,
nothing is asked of it for a while; then the folder is prepared anew, which writes a little, and how
that went decides for all three.
"""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.tiers.disk.chores import Chore, Measure, Prepare, Prepared, Scan, ScanEnded
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.health import Condition, Health

MEASURE_EVERY = 5.0
"""Seconds, as are those below."""
RESCAN_ALONE = 600.0
RESCAN_SHARED = 30.0
RESCAN_SHARE = 20.0
"""A scan takes at most one part in so many of the time."""


class Upkeep:
    """What has been asked, and what came of it.

    Args:
        ask: leaves the keeper a chore.
        ranks: of the engine.
        shared: others write to the folder.
        io_deadline: seconds; temporary files younger than this may be those of writes under way.
    """

    def __init__(
        self, ask: Callable[[Chore], bool], ranks: int, *, shared: bool, io_deadline: float
    ) -> None:
        self._ask = ask
        self._ranks = ranks
        self._usual = RESCAN_SHARED if shared else RESCAN_ALONE
        self._io_deadline = io_deadline
        self.reads = Health()
        self.writes = Health()
        self.keeps = Health(failures=1)
        self.mode: IoMode | None = None
        """How files are read and written; None until the folder has been prepared once."""
        self.is_scanned = False
        """Whether it is known what lies in the folder."""
        self.is_scanning = False
        self.scan_began = 0.0
        self._scan_at = 0.0
        self._earliest_scan = 0.0
        self._measure_at = 0.0
        self._prepare: Prepare | None = None
        self._preparing = False

    @property
    def is_good(self) -> bool:
        return self.reads.is_good and self.writes.is_good and self.keeps.is_good

    def open(self, prepare: Prepare) -> None:
        """The namespace is known: find out what is there."""
        self._prepare = prepare
        self._preparing = self._ask(prepare)

    # -- what came of it ---------------------------------------------------------------

    def prepared(self, news: Prepared, now: float) -> None:
        self._preparing = False
        self.reads.succeeded()
        self.keeps.succeeded()
        if news.full:
            self.writes.failed(now, at_once=True)
        else:
            self.writes.succeeded()
        if self.mode is None:
            self.mode = news.mode
        # Whatever was wrong, other files may be there than before.
        self._scan_at = min(self._scan_at, max(now, self._earliest_scan))

    def scan_ended(self, news: ScanEnded, now: float) -> None:
        self.is_scanning, self.is_scanned = False, True
        self.keeps.succeeded()
        self._earliest_scan = now + RESCAN_SHARE * news.seconds
        self._scan_at = max(now + self._usual, self._earliest_scan)

    def failed(self, chore: Chore, now: float) -> None:
        """The keeper could not do something."""
        self.keeps.failed(now)
        if isinstance(chore, Prepare):
            self._preparing = False
            self.reads.failed(now, at_once=True)
            self.writes.failed(now, at_once=True)
        elif isinstance(chore, Scan):
            self.is_scanning = False
            self._scan_at = now

    def hang(self, now: float) -> None:
        """Whatever is tried would hang as well."""
        self.reads.failed(now, at_once=True)
        self.writes.failed(now, at_once=True)

    def scan_by(self, when: float) -> None:
        """Files may be there, or not be there, that nobody knows of."""
        self._scan_at = min(self._scan_at, max(when, self._earliest_scan))

    def measure_soon(self) -> None:
        self._measure_at = 0.0

    # -- time --------------------------------------------------------------------------

    def tick(self, now: float, *, hung: int) -> bool:
        """Ask what is due; whether all is in order.

        Args:
            now: seconds.
            hung: orders that hang: nothing new is tried while there are any.
        """
        if self._prepare is None:
            return False
        if self.mode is None or not self.is_good:
            healths = (self.keeps, self.reads, self.writes)
            due = [health.condition(now) is not Condition.PAUSED for health in healths]
            if all(due) and not hung and not self._preparing:
                self._preparing = self._ask(self._prepare)
            return False
        if now >= self._measure_at and self._ask(Measure()):
            self._measure_at = now + MEASURE_EVERY
        return True

    def scan_is_due(self, now: float) -> bool:
        return now >= self._scan_at and not self.is_scanning

    def begin_scan(self, now: float) -> bool:
        """Whether a scan was asked for."""
        if self._prepare is None:
            return False
        # Before the first one nothing of ours is being written.
        young = self._io_deadline if self.is_scanned else 0.0
        self.is_scanning = self._ask(Scan(self._prepare.namespace, self._ranks, young))
        self.scan_began = now - young
        return self.is_scanning
