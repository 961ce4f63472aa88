# SPDX-License-Identifier: Apache-2.0
"""Background reads that tell how fast other engines are when nobody is served by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv import metrics
from vllm_tiered_kv.gate.regret import Pace
from vllm_tiered_kv.scheduler.probe import LEAST_PAUSE, MOST_PAUSE, PROBE_CHUNKS

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.index import Node
    from vllm_tiered_kv.scheduler.peers import Claim, PeerTier, Trial


class PeerProbe:
    """One question and one read at a time, for chunks that a request was refused.

    The request is computed meanwhile, and its chunks are stored: what is read is not kept.

    Args:
        core: what the scheduler half's parts share.
        tier: the other engines.
        learn: takes in how many chunks were read, in how many seconds, behind how many others.
    """

    def __init__(
        self, core: Core, tier: PeerTier, learn: Callable[[int, float, int], None]
    ) -> None:
        self._core = core
        self._tier = tier
        self._learn = learn
        self._pace = Pace(LEAST_PAUSE, MOST_PAUSE)
        self._claim: Claim | None = None
        self._trial: Trial | None = None

    def used(self) -> None:
        """Peers are read from again: should that change, see soon."""
        self._pace.begin_again()

    def refused(self, keys: Sequence[bytes], first: int, content: bytes) -> None:
        """A prompt is not read from peers: see how fast that would be, now and then."""
        now = self._core.clock()
        if self._claim is not None or not self._pace.is_due(now):
            return
        self._claim = self._tier.ask(keys[first : first + PROBE_CHUNKS], content)
        if self._claim is not None:
            self._pace.tried(now)

    def is_reading(self, node: Node) -> bool:
        """No chunk of the index is."""
        return False

    def go_on(self) -> None:
        """Take in what came of it; once a step."""
        claim, trial = self._claim, self._trial
        if claim is None or claim.is_asking:
            return
        if trial is None:
            trial = self._trial = self._tier.try_out(claim, PROBE_CHUNKS)
            if trial is not None:
                self._core.tally.add(metrics.GATE_PROBES.key(metrics.PEER_CPU))
                return
        elif trial.seconds is None and not trial.is_over:
            return
        elif trial.seconds is not None:
            self._learn(trial.chunks, trial.seconds, trial.ahead)
        self._claim = self._trial = None
        self._tier.leave(claim)
