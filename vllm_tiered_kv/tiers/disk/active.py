# SPDX-License-Identifier: Apache-2.0
"""An order under way: what each rank has said of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.tiers.disk.orders import WORSE, OrderResult, Outcome, ReadOrder, WriteOrder


class Ended(msgspec.Struct, frozen=True):
    """How an order ended on all ranks together."""

    job: int
    outcome: Outcome
    """The worst of any rank's."""
    nbytes: int = 0
    """Bytes read, or written to new files, by all ranks."""
    seconds: float = 0.0
    """Of the slowest rank."""
    at: float | None = None
    """When it ended, by the agent's clock."""


class ActiveOrder:
    """Counts one result a rank."""

    __slots__ = ("nbytes", "order", "outcome", "ranks", "reason", "reserved", "seconds", "since")

    def __init__(
        self, order: ReadOrder | WriteOrder, since: float, reserved: Sequence[int] = ()
    ) -> None:
        self.order = order
        self.since = since
        """When the ranks were told, by the agent's clock."""
        self.reserved = reserved
        """Bytes of the quota that are kept for it, by rank."""
        self.ranks: set[int] = set()
        self.outcome = Outcome.DONE
        self.reason = ""
        self.nbytes = 0
        self.seconds = 0.0

    def note(self, rank: int, result: OrderResult) -> bool:
        """Whether this is the rank's first answer."""
        if rank in self.ranks:
            return False
        self.ranks.add(rank)
        self.nbytes += result.nbytes
        self.seconds = max(self.seconds, result.seconds)
        if WORSE[result.outcome] > WORSE[self.outcome]:
            self.outcome = result.outcome
            self.reason = result.reason
        return True

    def ended(self) -> Ended:
        return Ended(self.order.job, self.outcome, self.nbytes, self.seconds)
