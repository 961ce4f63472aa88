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
    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.index import Node
    from vllm_tiered_kv.scheduler.peers import Claim, PeerTier


class PeerProbe:
    """One question and one read at a time, for chunks that a request was refused.

    Args:
        begin: notes that a fetch is about to be ordered.
        learn: takes in what a fetch took.
    """

    def __init__(
        self,
        core: Core,
        tier: PeerTier,
        begin: Callable[[Fetch], object],
        learn: Callable[[Fetch], None],
    ) -> None:
        self._core = core
        self._tier = tier
        self._begin = begin
        self._learn = learn
        self._pace = Pace(LEAST_PAUSE, MOST_PAUSE)
        self._keys: Sequence[bytes] = ()
        self._first = 0
        self._claim: Claim | None = None
        self._fetch: Fetch | None = None

    def used(self) -> None:
        """Peers are read from again: should that change, see soon."""
        self._pace.begin_again()

    def refused(self, keys: Sequence[bytes], first: int, content: bytes) -> None:
        """A prompt is not read from peers: see how fast that would be, now and then."""
        now = self._core.clock()
        if self._claim is not None or not self._pace.is_due(now):
            return
        self._keys, self._first = keys[: first + PROBE_CHUNKS], first
        self._claim = self._tier.ask(self._keys[first:], content)
        if self._claim is not None:
            self._pace.tried(now)

    def is_reading(self, node: Node) -> bool:
        """Whether a chunk is being read in the background only: nobody waits for it."""
        return self._fetch is not None and node in self._fetch.read

    def go_on(self) -> None:
        """Take in what came of it; once a step."""
        claim, lookups = self._claim, self._tier.lookups
        if claim is None or claim.is_asking:
            return
        if self._fetch is None:
            self._tier.take_in(claim)
            start = self._first * self._core.geometry.chunk_tokens
            self._fetch = lookups.fetch(self._keys, self._first, start, 0)
            if self._fetch is None:
                self._end(claim)
                return
            self._core.tally.add(metrics.GATE_PROBES.key(metrics.PEER_CPU))
            self._begin(self._fetch)
        fetch = self._fetch
        began = fetch.ordered_at
        late = began is not None and self._core.clock() - began > self._core.settings.load_deadline
        if lookups.goes_on(fetch) and not late:
            return
        self._fetch = None
        self._learn(fetch)
        lookups.release(fetch)
        self._end(claim)

    def _end(self, claim: Claim) -> None:
        self._claim = None
        self._tier.leave(claim)
