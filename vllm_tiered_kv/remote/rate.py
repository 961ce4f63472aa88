# SPDX-License-Identifier: Apache-2.0
"""How much each peer may say."""

from __future__ import annotations

from collections import OrderedDict


class RateLimit:
    """A token bucket a peer; of the peers that are remembered the one silent longest is forgotten.

    Args:
        per_second: messages.
        burst: messages at once.
        peers: that are remembered.
    """

    def __init__(self, per_second: float, burst: float, peers: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._limit = peers
        self._peers: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def admits(self, peer: bytes, now: float, cost: int = 1) -> bool:
        """Whether the peer may say one thing more, which counts as ``cost`` messages."""
        left, then = self._peers.pop(peer, (self._burst, now))
        left = min(self._burst, left + (now - then) * self._per_second)
        admitted = left >= cost
        self._peers[peer] = (left - cost if admitted else left, now)
        while len(self._peers) > self._limit:
            self._peers.popitem(last=False)
        return admitted

    def __len__(self) -> int:
        return len(self._peers)
