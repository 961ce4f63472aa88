# SPDX-License-Identifier: Apache-2.0
"""Stores under way whose chunks are to be written, and who says that they have ended.

A store that ends in an idle engine is followed by its write although nothing steps. Its bytes
are right if every rank had copied them before vLLM handed a block of it out again, which the
scheduler's thread notices. Whoever takes the store's claim first decides: the scheduler's thread
when a block is handed out or when it sees the store end, the agent's when every rank has reported.
"""

from __future__ import annotations

from vllm_tiered_kv.protocol import JobResult, JobStatus
from vllm_tiered_kv.tiers.disk.orders import WriteOrder


class Claims:
    """The writes that wait for their stores. Two threads; taking one is a single step.

    Args:
        ranks: of the engine.
        most: claims at once.
    """

    def __init__(self, ranks: int, most: int) -> None:
        self._ranks = ranks
        self._most = most
        self._orders: dict[int, WriteOrder] = {}
        self._copied: dict[int, set[int]] = {}
        """Stores -> ranks that have copied them; the agent's thread only."""

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, job: int) -> bool:
        """Whether nobody has taken it yet."""
        return job in self._orders

    def add(self, order: WriteOrder) -> bool:
        """Whether there was room for it. The scheduler's thread."""
        if len(self._orders) >= self._most:
            return False
        self._orders[order.job] = order
        return True

    def take(self, job: int) -> WriteOrder | None:
        """The write, if nobody has taken it yet. Any thread."""
        return self._orders.pop(job, None)

    def copied(self, rank: int, result: JobResult) -> WriteOrder | None:
        """A rank has copied a store's bytes into its slots; the write, if that was the last.

        The agent's thread, as :meth:`tidy`.
        """
        if result.job not in self._orders or result.status is not JobStatus.DONE:
            return None
        if not 0 <= rank < self._ranks:
            return None
        ranks = self._copied.setdefault(result.job, set())
        ranks.add(rank)
        if len(ranks) < self._ranks:
            return None
        del self._copied[result.job]
        return self.take(result.job)

    def tidy(self) -> None:
        """Forget what was said of stores that somebody else has taken."""
        for job in [job for job in self._copied if job not in self._orders]:
            del self._copied[job]
