# SPDX-License-Identifier: Apache-2.0
"""Hand-overs until they can be read: their bytes are copied to slots, then checksums are made.

Scheduler thread only; no clock but its caller's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_kv.protocol import SumJob
from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.scheduler.lending import Extent, Lender, Loan, Tables

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.index import Node

COPY_PATIENCE = 1.0
"""Seconds that copies may take once a request has ended; then it is read from the pages."""
SUM_PATIENCE = 4.0
"""Seconds that checksums may take; a consumer waits a little longer."""


class Stage(enum.Enum):
    """How far a hand-over is."""

    COPYING = "copying"
    SUMMING = "summing"
    READY = "ready"


class HandOver:
    """One prompt's KV, from the step that completes it to the end of its lease.

    Args:
        request_id: whose prompt it is.
        version: what the KV is of, besides the tokens; compared, and not looked into.
        tokens: of the prompt.
        blocks: on the device.
        loan: slots that it is read from; None: it is read from the blocks.
    """

    __slots__ = (
        "blocks",
        "is_awaited",
        "is_held",
        "kept",
        "lease",
        "loan",
        "request_id",
        "since",
        "stage",
        "sums",
        "tokens",
        "version",
    )

    def __init__(
        self, request_id: str, version: object, tokens: int, blocks: Extent, loan: Loan | None
    ) -> None:
        self.request_id = request_id
        self.version = version
        self.tokens = tokens
        self.blocks = blocks
        self.loan = loan
        self.lease: int | None = None
        """None until the request has ended."""
        self.stage = Stage.COPYING
        self.since = 0.0
        """When the stage began."""
        self.sums: dict[int, tuple[bytes, ...]] = {}
        """By rank."""
        self.is_held = False
        """Whether the blocks are held by a reference of ours."""
        self.kept: Tables = ()
        """The first blocks of each group, held by another one until then: those that leave the
        window before the request has ended."""
        self.is_awaited = False
        """Whether vLLM keeps the blocks until it is told otherwise."""

    @property
    def place(self) -> tuple[Place, Extent]:
        """Where it is read from: blocks or slots."""
        if self.loan is None:
            return Place.PAGES, self.blocks
        return Place.SLOTS, self.loan.slots


class Readying:
    """Waits for copies and checksums, and not for too long.

    Args:
        lender: whose slots they are.
        ranks: that make checksums.
        verify: whether they do.
        clock: seconds, monotonic.
        on_ready: told of each hand-over, once, when it can be read.
        fail: takes each kind of failure, and a sentence.
    """

    def __init__(
        self,
        lender: Lender,
        ranks: int,
        clock: Callable[[], float],
        on_ready: Callable[[HandOver], None],
        fail: Callable[[str, str], None],
        *,
        verify: bool,
    ) -> None:
        self._lender = lender
        self._ranks = ranks
        self._clock = clock
        self._on_ready = on_ready
        self._fail = fail
        self._verify = verify
        self._copying: dict[int, HandOver] = {}
        """By lease; the one that has waited longest first."""
        self._summing: dict[int, HandOver] = {}
        """Likewise."""
        self._awaited: dict[Node, list[HandOver]] = {}
        """Who waits for slots that are being written."""
        self.sums: list[SumJob] = []
        """For the next plan."""

    def __len__(self) -> int:
        """Hand-overs with a lease that can't be read yet."""
        return len(self._copying) + len(self._summing)

    def prepare(self, hand: HandOver) -> None:
        """Its slots are being written, and its request hasn't ended."""
        for node in hand.loan.awaits if hand.loan is not None else ():
            self._awaited.setdefault(node, []).append(hand)

    def start(self, hand: HandOver, lease: int) -> None:
        """Its request has ended, and it is offered under this lease."""
        hand.lease = lease
        self._enter(hand, lease, Stage.COPYING)
        self._go_on(hand)

    def end(self, hand: HandOver) -> None:
        """Nobody wants it any more: give the slots back. What is written to them still ends."""
        if hand.lease is not None:
            self._copying.pop(hand.lease, None)
            self._summing.pop(hand.lease, None)
        loan, hand.loan = hand.loan, None
        if loan is None:
            return
        for node in loan.awaits:
            waiting = [other for other in self._awaited.pop(node, ()) if other is not hand]
            if waiting:
                self._awaited[node] = waiting
        self._lender.give_back(loan)

    # -- what comes of it --------------------------------------------------------------

    def stored(self, node: Node, good: bool) -> None:
        """Slots have been written to, and can be read or not."""
        for hand in self._awaited.pop(node, ()):
            if hand.loan is None:
                continue
            hand.loan.awaits.discard(node)
            if good:
                self._go_on(hand)
            else:
                self._stay(hand)

    def summed(self, rank: int, lease: int, sums: tuple[bytes, ...]) -> None:
        """A rank has made its checksums."""
        hand = self._summing.get(lease)
        if hand is None:
            return
        hand.sums[rank] = sums
        if len(hand.sums) == self._ranks:
            self._ready(hand, lease)

    def end_waits(self) -> None:
        """Wait for nothing too long. To be called when what the ranks have said is known."""
        if not self._copying and not self._summing:
            return
        now = self._clock()
        for hand in _late(self._copying, now - COPY_PATIENCE):
            self._stay(hand)
        for hand in _late(self._summing, now - SUM_PATIENCE):
            self._fail("remote_verify", "checksums of a hand-over took too long: it has none")
            hand.sums.clear()
            if hand.lease is not None:
                self._ready(hand, hand.lease)

    # -- inside ------------------------------------------------------------------------

    def _enter(self, hand: HandOver, lease: int, stage: Stage) -> None:
        self._copying.pop(lease, None)
        self._summing.pop(lease, None)
        hand.stage = stage
        hand.since = self._clock()
        if stage is Stage.COPYING:
            self._copying[lease] = hand
        elif stage is Stage.SUMMING:
            self._summing[lease] = hand

    def _go_on(self, hand: HandOver) -> None:
        """Enter the next stage, if nothing keeps it in this one."""
        lease = hand.lease
        if lease is None or (hand.loan is not None and hand.loan.awaits):
            return
        if self._verify:
            place, extent = hand.place
            self.sums.append(SumJob(lease, hand.tokens, place, *extent))
            self._enter(hand, lease, Stage.SUMMING)
            return
        self._ready(hand, lease)

    def _ready(self, hand: HandOver, lease: int) -> None:
        self._enter(hand, lease, Stage.READY)
        self._on_ready(hand)

    def _stay(self, hand: HandOver) -> None:
        """It can't be read from slots: then from the blocks."""
        self._fail("remote_slots", "a hand-over's copy failed, or took too long: not early")
        self.end(hand)
        self._go_on(hand)


def _late(waiting: dict[int, HandOver], before: float) -> list[HandOver]:
    """Those that have waited since then or longer."""
    late = []
    for hand in waiting.values():
        if hand.since > before:
            break
        late.append(hand)
    return late
