# SPDX-License-Identifier: Apache-2.0
"""One rank's checksums of what it hands over, made on a thread of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from vllm_tiered_kv.protocol import RankSums, SumJob
from vllm_tiered_kv.remote.memory import GroupLayout, Place, RankLayout
from vllm_tiered_kv.worker.remote.checksums import Checker, make_sums, own_units
from vllm_tiered_kv.worker.remote.plan import OutOfRange, check_places, place_entries


class Summing:
    """Makes checksums; every hand-over that was asked for is told of, without any if that failed.

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
        self._checker = checker
        self._fail = fail
        self._under_way = 0
        self._ended: deque[RankSums] = deque()

    @property
    def is_busy(self) -> bool:
        """Whether checksums are being made."""
        return self._under_way > len(self._ended)

    def start(self, job: SumJob) -> None:
        """Make the checksums of a hand-over; :meth:`take` has them when they are there."""
        self._under_way += 1
        if not self._checker.submit(lambda: self._make(job)):
            self._ended.append(RankSums(job.lease, ()))

    def take(self) -> list[RankSums]:
        """Those that have ended since the last call; each once."""
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._under_way -= len(ended)
        return ended

    def _make(self, job: SumJob) -> None:
        sums: list[bytes] = []
        try:
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
                check_places(places, group)
                sums.append(make_sums(own_units(group), places))
        except (KeyError, ValueError, OutOfRange) as error:
            sums = []
            self._fail("remote_verify", f"no checksums of a hand-over: {error!r}")
        finally:
            self._ended.append(RankSums(job.lease, tuple(sums)))
