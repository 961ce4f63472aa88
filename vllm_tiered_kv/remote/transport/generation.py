# SPDX-License-Identifier: Apache-2.0
"""An agent that reads, as long as it lives; the next one is another generation.

A transfer that hangs ends with its agent alone. So an agent that has been stuck for long retires: a
new one takes the reads that come, the old one finishes what still moves, and is then destroyed.
"""

from __future__ import annotations

from vllm_tiered_kv.remote.transport.agent import Agent


class Generation:
    """An agent, its peers and its handles. Guarded by the lock of `Reading`."""

    def __init__(self, number: int, agent: Agent) -> None:
        self.number = number
        self.agent = agent
        self.connected: set[str] = set()
        self.wanted: set[str] = set()
        """Peers to connect."""
        self.leaving: set[str] = set()
        """Peers to disconnect, once none of their handles is left."""
        self.handles: dict[int, tuple[str, int]] = {}
        """Ticket to peer and handle."""
        self.is_retired = False
        """Nothing new is begun."""
        self.is_closed = False
        """Nobody may call the agent any more."""
        self.is_undead = False
        """It was to be destroyed, and something keeps it alive."""
        self._users = 0

    def enter(self) -> bool:
        """Before calls of the agent, on a thread; False if there may be none."""
        if self.is_closed:
            return False
        self._users += 1
        return True

    def leave(self) -> None:
        """After them."""
        self._users -= 1

    def close(self) -> bool:
        """Let no further thread in; True once the last one is out."""
        self.is_closed = True
        return self._users == 0

    def want(self, peer: str) -> None:
        """Connect a peer, unless it is or will be."""
        if peer not in self.connected:
            self.wanted.add(peer)

    def drop(self, peer: str) -> None:
        """A peer is gone, or to be forgotten: it must be connected again before it is read from."""
        self.wanted.discard(peer)
        if peer in self.connected:
            self.connected.discard(peer)
            self.leaving.add(peer)

    def next_leaving(self) -> str | None:
        """A peer that can be disconnected now."""
        held = {peer for peer, _ in self.handles.values()}
        return next((peer for peer in self.leaving if peer not in held), None)

    def next_wanted(self) -> str | None:
        """A peer that can be connected now."""
        return next((peer for peer in self.wanted if peer not in self.leaving), None)
