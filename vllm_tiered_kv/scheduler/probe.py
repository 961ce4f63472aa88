# SPDX-License-Identifier: Apache-2.0
"""Background reads that tell how fast a disk is that nobody uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv import metrics
from vllm_tiered_kv.gate.regret import Pace

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.index import Node

PROBE_CHUNKS = 8
"""Chunks read at a time: as many as keep all readers busy twice."""
MAX_PROBED = 1024
"""Chunks of a prompt that are looked at for an end of a hit, where few places are one."""
LEAST_PAUSE = 2.0
MOST_PAUSE = 60.0
"""Seconds between two probes, at first and at last."""


class DiskProbe:
    """One read at a time, of chunks that a request was refused; nobody waits for it.

    Args:
        begin: notes that a fetch is about to be ordered.
        learn: takes in what a fetch took.
    """

    def __init__(
        self, core: Core, begin: Callable[[Fetch], object], learn: Callable[[Fetch], None]
    ) -> None:
        self._core = core
        self._begin = begin
        self._learn = learn
        self._pace = Pace(LEAST_PAUSE, MOST_PAUSE)
        self._fetch: Fetch | None = None

    def used(self) -> None:
        """The disk is used again: should that change, see soon."""
        self._pace.begin_again()

    def refused(self, keys: Sequence[bytes], first: int, content: bytes = b"") -> None:
        """A prompt is not read from disk: see how fast that would be, now and then.

        Args:
            first: the first chunk that is not in the CPU tier.
        """
        core, now = self._core, self._core.clock()
        disk = core.disk
        if disk is None or self._fetch is not None or not self._pace.is_due(now):
            return
        reads, start = disk.lookups, first * core.geometry.chunk_tokens
        fetch = reads.fetch(keys[: first + PROBE_CHUNKS], first, start, 0)
        if fetch is None and core.geometry.full_groups:
            # No hit can end so early: what all ends need is read of these chunks, and is no hit.
            fetch = reads.fetch(keys[: first + MAX_PROBED], first, start, 0)
            if fetch is not None:
                reads.cut(fetch, PROBE_CHUNKS, first, start)
                fetch.needed = [core.geometry.full_groups] * PROBE_CHUNKS
        if fetch is None:
            return
        self._pace.tried(now)
        core.tally.add(metrics.GATE_PROBES.key("disk"))
        self._fetch = fetch
        self._begin(fetch)
        self.go_on()

    def is_reading(self, node: Node) -> bool:
        """Whether a chunk is being read in the background only: nobody waits for it."""
        return self._fetch is not None and node in self._fetch.read

    def go_on(self) -> None:
        """Take in a probe's end; once a step."""
        fetch, disk = self._fetch, self._core.disk
        if fetch is None or disk is None:
            return
        began = fetch.ordered_at
        late = began is not None and self._core.clock() - began > self._core.settings.load_deadline
        if disk.lookups.goes_on(fetch) and not late:
            return
        self._fetch = None
        self._learn(fetch)
        disk.lookups.release(fetch)
