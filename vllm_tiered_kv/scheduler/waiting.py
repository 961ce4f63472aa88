# SPDX-License-Identifier: Apache-2.0
"""How long a request waits for what is read for it, and what is learned of that. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_tiered_kv import metrics
from vllm_tiered_kv.gate.gate import LEAST_PATIENCE
from vllm_tiered_kv.scheduler.guard import never_fatal

if TYPE_CHECKING:
    from vllm_tiered_kv.gate import Gate
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.ruling import Ruling
    from vllm_tiered_kv.scheduler.slow import SlowTier

LATE = 1.5
"""What has taken so many times what was predicted is late even if computing takes longer."""
PIECE_SECONDS, MAX_PIECES = 0.02, 16
"""A read is ordered by one piece more for each so many seconds of a step; and the most of them."""


class Waiting:
    """Of reads from slow sources; scheduler thread only.

    Args:
        core: what the scheduler half's parts share.
        gate: what is learned.
        nbytes: bytes of a hit of so many chunks.
        turn: seconds from one look of the engine to the next.
    """

    def __init__(
        self,
        core: Core,
        gate: Gate,
        nbytes: Callable[[int], int],
        turn: Callable[[], float],
    ) -> None:
        self._core = core
        self._gate = gate
        self._bytes = nbytes
        self._turn = turn

    def pieces(self) -> int:
        """Pieces of a read that are ordered at a time: a look-up comes once a step."""
        return 1 + min(MAX_PIECES - 1, int(self._turn() / PIECE_SECONDS))

    def begin(self, tier: SlowTier, fetch: Fetch) -> float:
        """A fetch is about to be ordered; returns when."""
        fetch.ahead = tier.queued()
        fetch.ordered_at = now = self._core.clock()
        return now

    def patience(self, tier: SlowTier, ruling: Ruling) -> float:
        """Seconds in which what is read for a request is not late."""
        replaced, predicted = ruling.decision.replaced, ruling.predicted_read
        most = self._core.settings.load_deadline
        worth = most if replaced is None else min(most, max(LEAST_PATIENCE, replaced))
        if not tier.model.is_known:
            return worth
        return min(self._gate.patience(predicted), max(worth, LATE * predicted))

    def goes_on(self, tier: SlowTier, state: RequestState, fetch: Fetch) -> bool:
        """Whether what is read for a request is still worth waiting for."""
        ruling = state.ruling
        if ruling is None or ruling.give_up_at is None:
            return True
        now = self._core.clock()
        if now < ruling.give_up_at:
            return True
        # It is late. What has come by now says how long the rest will take.
        elapsed = now - (fetch.ordered_at or ruling.began)
        total = len(fetch.keys) - ruling.known
        here = sum(not node.is_arriving for node in fetch.nodes) - ruling.known
        left = elapsed * (total - here) / here if here > 0 else float("inf")
        replaced = ruling.decision.replaced
        if replaced is not None and left < replaced * (total - here) / total:
            ruling.give_up_at = now + self._gate.patience(left / 2)
            return True
        self.given_up(tier, state, fetch)
        return False

    @never_fatal
    def given_up(self, tier: SlowTier, state: RequestState, fetch: Fetch) -> None:
        """What is read for a request is not waited for any more."""
        self._core.tally.add(metrics.GATE_GIVEN_UP.key(tier.name))
        if state.ruling is not None:
            state.ruling.give_up_at = None
        ordered, began = len(fetch.jobs), fetch.ordered_at
        if began is None or fetch.arrived + fetch.failed >= ordered:
            return  # it waited for what is read for others, or was not ordered yet
        nbytes, ahead = self._bytes(ordered), self._bytes(fetch.ahead)
        seconds = (self._core.clock() - began) * ordered / max(1, fetch.arrived)
        if seconds > tier.model.seconds(nbytes, ahead):
            tier.model.observe(nbytes, seconds, ahead)

    @never_fatal
    def ended(self, tier: SlowTier, state: RequestState, fetch: Fetch) -> None:
        """All that was to be read for a request has been."""
        now = self._core.clock()
        ruling = state.ruling
        self.learn(tier, fetch)
        if ruling is not None and ruling.give_up_at is not None:
            ruling.give_up_at = None
            if fetch.ended_at is not None:
                tier.model.noticed(now - fetch.ended_at, ruling.turn)

    def learn(self, tier: SlowTier, fetch: Fetch) -> None:
        """What a fetch took, if it was nobody else's as well."""
        began, ended = fetch.ordered_at, fetch.ended_at
        if began is None or ended is None or fetch.failed or not fetch.arrived:
            return
        now = self._core.clock()
        ended = ended if began <= ended <= now else now  # it may be by another host's clock
        tier.model.observe(self._bytes(fetch.arrived), ended - began, self._bytes(fetch.ahead))

    def learn_trial(self, chunks: int, seconds: float, ahead: int) -> None:
        """What it took to read from peers what nobody wanted."""
        if seconds > 0:
            self._gate.peers.observe(self._bytes(chunks), seconds, self._bytes(ahead))
