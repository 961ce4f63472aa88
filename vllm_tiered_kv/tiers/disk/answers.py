# SPDX-License-Identifier: Apache-2.0
"""What ranks say of their orders, and what follows from it. No I/O."""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.tiers.disk import failures
from vllm_tiered_kv.tiers.disk.active import ActiveOrder
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.flight import Flight
from vllm_tiered_kv.tiers.disk.orders import OrderResult, Outcome, ReadOrder, WriteOrder
from vllm_tiered_kv.tiers.disk.quota import Quota
from vllm_tiered_kv.tiers.disk.removal import Removal
from vllm_tiered_kv.tiers.disk.settings import TierSettings
from vllm_tiered_kv.tiers.disk.upkeep import RESCAN_SHARED, Upkeep

OF_ONE_CHUNK = frozenset(reason.value for reason in failures.OF_ONE_CHUNK)


class Answers:
    """Takes each rank's answer to each order once, and ends an order with the last of them.

    Args:
        settings: all that is known at start.
        catalogue: what lies in the folder.
        quota: how much room there is.
        flight: the orders.
        removal: the files that are being removed.
        upkeep: whether the tier is in order.
        judged: called when that may have changed, before the order ends.
        trouble: takes a kind of failure and what to say of it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        settings: TierSettings,
        catalogue: Catalogue,
        quota: Quota,
        flight: Flight,
        removal: Removal,
        upkeep: Upkeep,
        *,
        judged: Callable[[], None],
        trouble: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._quota = quota
        self._flight = flight
        self._removal = removal
        self._upkeep = upkeep
        self._judged = judged
        self._trouble = trouble
        self._clock = clock
        self._purged: set[int] = set()
        """Writes under way whose bytes may be wrong."""

    @property
    def is_purging(self) -> bool:
        """Whether anything is being written that may be wrong."""
        return bool(self._purged)

    def distrust(self) -> None:
        """What is being written may be wrong."""
        writes = {
            job: active.order.key
            for job, active in self._flight.active.items()
            if isinstance(active.order, WriteOrder) and job not in self._purged
        }
        self._purged.update(writes)
        self._catalogue.distrust(writes.values())

    def take(self, rank: int, result: OrderResult) -> None:
        """A rank's answer; anything but its first to an order that is under way is passed over."""
        active = self._flight.active.get(result.job)
        if active is None or not active.note(rank, result):
            return
        try:
            if isinstance(active.order, WriteOrder):
                self._written(active.order, active.reserved[rank], rank, result)
            elif result.outcome in (Outcome.MISSING, Outcome.DAMAGED):
                self._not_there(active.order, rank, result)
        finally:  # whatever goes wrong: an order that never ends holds its slots
            if len(active.ranks) == self._settings.ranks:
                self._finish(active)

    def _written(self, order: WriteOrder, reserved: int, rank: int, result: OrderResult) -> None:
        self._quota.settle(reserved)
        taken = 0
        for part, nbytes in zip(order.parts, result.sizes, strict=False):
            if nbytes:
                name = FileName(self._catalogue.namespace, rank, part.group, order.key)
                self._catalogue.wrote(name, nbytes, order.facts.index)
                taken += nbytes
        self._quota.wrote(result.nbytes)
        if result.outcome is Outcome.FAILED:
            self._catalogue.stray(order.key)
            self._doubt(reserved - taken)

    def _not_there(self, order: ReadOrder, rank: int, result: OrderResult) -> None:
        """The part after those that were read is not what it should be."""
        bad = len(result.sizes)
        if bad >= len(order.parts):
            return
        name = FileName(self._catalogue.namespace, rank, order.parts[bad].group, order.key)
        evicted = name in self._removal
        nbytes = self._catalogue.lose(name)
        # It was removed, unless that failed; or it has been written again since it was read.
        self._doubt(nbytes)
        if result.outcome is Outcome.DAMAGED:
            self._trouble("disk_damaged", f"a damaged file was removed: {result.reason}")
        elif nbytes and not evicted:  # somebody else removed it: what else is gone?
            self._trouble("disk_missing", "a file that should have been there was not")
            self._upkeep.scan_by(self._clock() + RESCAN_SHARED)

    def _doubt(self, nbytes: int) -> None:
        now = self._clock()
        self._quota.doubt(nbytes, now)
        if nbytes > 0:
            self._upkeep.scan_by(now + self._settings.io_deadline + RESCAN_SHARED)

    def _finish(self, active: ActiveOrder) -> None:
        order = active.order
        try:
            self._judge(active)
            if order.job in self._purged:
                self._purged.discard(order.job)
                self._catalogue.settle_distrusted(order.key)
            self._judged()
        finally:
            self._flight.end(active)

    def _judge(self, active: ActiveOrder) -> None:
        """What the order's end says of the device."""
        writing = isinstance(active.order, WriteOrder)
        health = self._upkeep.writes if writing else self._upkeep.reads
        if active.outcome is not Outcome.FAILED:
            if active.outcome is not Outcome.DROPPED:
                health.succeeded()
            return
        self._trouble(
            "disk_write" if writing else "disk_read",
            f"the disk tier's I/O failed: {active.reason}",
        )
        if active.reason in OF_ONE_CHUNK:
            return
        full = active.reason == FailureReason.NO_SPACE.value
        health.failed(self._clock(), at_once=full)
        if full:
            self._upkeep.measure_soon()
