# SPDX-License-Identifier: Apache-2.0
"""One rank's checksums of what other engines read of it, made on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from vllm_tiered_kv.protocol import RankSums, SlotSumJob, SumJob
from vllm_tiered_kv.remote.memory import GroupLayout, Place, RankLayout
from vllm_tiered_kv.worker.remote.checksums import Checker, Units, make_sums, own_slot, own_units
from vllm_tiered_kv.worker.remote.plan import (
    OutOfRange,
    Places,
    check_places,
    place_entries,
    whole_slots,
)


class Summing:
    """Makes checksums; whatever was asked for is told of, without any if that failed.

    Args:
        layout: how pages and slots lie on this rank.
        checker: the thread.
        fail: takes each kind of failure, and a sentence.
        pages_in_host_memory: whether pages can be read here.
    """

    def __init__(
        self,
        layout: RankLayout,
        checker: Checker,
        fail: Callable[[str, str], None],
        *,
        pages_in_host_memory: bool,
    ) -> None:
        self._groups: dict[Place, tuple[GroupLayout, ...]] = {}
        if pages_in_host_memory:
            self._groups[Place.PAGES] = layout.groups
        if layout.slots is not None:
            self._groups[Place.SLOTS] = layout.slots.groups
        self._slots = layout.slots
        self._checker = checker
        self._fail = fail
        self._under_way = 0
        self._ended: deque[RankSums] = deque()
        self._slots_ended: deque[RankSums] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether checksums of a hand-over are being made: somebody waits for them."""
        return self._under_way > len(self._ended)

    def start(self, job: SumJob) -> None:
        """Make the checksums of a hand-over; :meth:`take` has them when they are there."""
        self._under_way += 1
        self._submit(job.lease, self._ended, lambda: self._of_handover(job))

    def start_slots(self, job: SlotSumJob) -> None:
        """Make the checksums of chunks; :meth:`take_slots` has them when they are there."""
        self._submit(job.job, self._slots_ended, lambda: self._of_slots(job))

    def take(self) -> list[RankSums]:
        """Those of hand-overs that have ended since the last call; each once."""
        ended = _drain(self._ended)
        self._under_way -= len(ended)
        return ended

    def take_slots(self) -> list[RankSums]:
        """Those of chunks; likewise."""
        return _drain(self._slots_ended)

    def _submit(
        self, number: int, ended: deque[RankSums], make: Callable[[], Sequence[bytes]]
    ) -> None:
        def work() -> None:
            sums: Sequence[bytes] = ()
            try:
                sums = make()
            except (KeyError, ValueError, OutOfRange) as error:
                self._fail("remote_verify", f"no checksums of what peers may read: {error!r}")
            finally:
                ended.append(RankSums(number, tuple(sums)))

        if not self._checker.submit(work):
            ended.append(RankSums(number, ()))

    def _of_handover(self, job: SumJob) -> list[bytes]:
        sums = []
        groups = self._groups[job.place]
        for group, table, first in zip(groups, job.tables, job.firsts, strict=True):
            blocks = -(-(job.tokens - first) // (group.entry_tokens * group.entries))
            places = place_entries(
                np.array(table, dtype=np.int64),
                group.entries,
                0,
                blocks * group.entries,
                group.per_slot,
            )
            sums.append(_sums(own_units(group), places, group))
        return sums

    def _of_slots(self, job: SlotSumJob) -> list[bytes]:
        slots = self._slots
        if slots is None:
            raise OutOfRange("there are no slots here")
        return [
            _sums(own_slot(slots, group), whole_slots(np.array(table, dtype=np.int64)), group)
            for group, table in zip(slots.groups, job.slots, strict=True)
        ]


def _sums(units: Units, places: Places, group: GroupLayout) -> bytes:
    """The checksums, if the group has all of these places.

    Raises:
        OutOfRange: it has not.
    """
    check_places(places, group)
    return make_sums(units, places)


def _drain(queue: deque[RankSums]) -> list[RankSums]:
    return [queue.popleft() for _ in range(len(queue))]
