# SPDX-License-Identifier: Apache-2.0
"""An agent that reads, as long as it lives; the next one is another generation.

A transfer that hangs ends with its agent alone. So an agent that has been stuck for long retires: a
new one takes the reads that come, the old one finishes what still moves, and is then destroyed.
"""

from __future__ import annotations

from collections import OrderedDict

from vllm_tiered_kv.remote.transport.agent import Agent

MAX_PARKED = 64
"""Peers that stay connected though nobody reads from them. NIXL 1.5 closes no socket when a peer is
disconnected, on neither side: who comes back must not be connected anew each time."""


class Generation:
    """An agent, its peers and its handles. Guarded by the lock of `Reading`."""

    def __init__(self, number: int, agent: Agent) -> None:
        self.number = number
        self.agent = agent
        self.connected: set[str] = set()
        self.wanted: set[str] = set()
        """Peers to connect."""
        self.parked: OrderedDict[str, None] = OrderedDict()
        """Peers that are connected and not read from, the one that was longest so first."""
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
        if peer in self.parked:
            del self.parked[peer]
            self.connected.add(peer)
        elif peer not in self.connected:
            self.wanted.add(peer)

    def park(self, peer: str) -> None:
        """A peer is to be forgotten, and may come back."""
        self.wanted.discard(peer)
        if peer not in self.connected:
            return
        self.connected.discard(peer)
        self.parked[peer] = None
        while len(self.parked) > MAX_PARKED:
            self.leaving.add(self.parked.popitem(last=False)[0])

    def drop(self, peer: str) -> None:
        """A peer is gone: it must be connected again before it is read from."""
        self.wanted.discard(peer)
        if peer in self.connected or peer in self.parked:
            self.connected.discard(peer)
            self.parked.pop(peer, None)
            self.leaving.add(peer)

    def next_leaving(self) -> str | None:
        """A peer that can be disconnected now."""
        held = {peer for peer, _ in self.handles.values()}
        return next((peer for peer in self.leaving if peer not in held), None)

    def next_wanted(self) -> str | None:
        """A peer that can be connected now."""
        return next((peer for peer in self.wanted if peer not in self.leaving), None)
