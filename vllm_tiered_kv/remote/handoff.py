# SPDX-License-Identifier: Apache-2.0
"""One hand-over as a consumer sees it, from the question to the release."""

from __future__ import annotations

import enum

import msgspec

from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.remote.messages import Hold, RankMemory, Sums
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.ticket import Ticket


class PeerMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where the pages of all ranks of a producer are."""

    engine: str
    """Its incarnation."""
    generation: int
    ranks: tuple[RankMemory, ...]


class Granted(msgspec.Struct, frozen=True):
    """What may be read."""

    blocks: tuple[tuple[int, ...], ...]
    """The producer's, by KV cache group, see `messages.Granted`."""
    memory: PeerMemory
    place: Place = Place.PAGES
    """What the numbers in :attr:`blocks` are of."""
    sums: Sums = ()

    @property
    def block_tokens(self) -> tuple[int, ...]:
        """The tokens of each of :attr:`blocks`, by KV cache group; empty where that is not told."""
        layout = self.memory.ranks[0].layout
        if self.place is Place.PAGES:
            return tuple(group.block_tokens for group in layout.groups)
        slots = layout.slots
        return tuple(group.block_tokens for group in slots.groups) if slots is not None else ()

    @property
    def page_tokens(self) -> tuple[int, ...]:
        """The tokens of each of the producer's device blocks, by KV cache group."""
        return tuple(group.block_tokens for group in self.memory.ranks[0].layout.groups)


class State(enum.Enum):
    """How far a hand-over is."""

    ASKING = "asking"
    GRANTED = "granted"
    OVER = "over"  # refused, lost, or released


class Handoff:
    """Written by the agent's thread alone; the scheduler's reads it.

    Args:
        ticket: the producer's, its seal checked.
        holder: our name for it, used once.
    """

    __slots__ = ("granted", "hold", "reason", "renew_at", "state", "ticket", "valid_until")

    def __init__(self, ticket: Ticket, holder: str) -> None:
        self.ticket = ticket
        self.hold = Hold(ticket.lease, holder)
        self.state = State.ASKING
        self.granted: Granted | None = None
        """What may be read until :attr:`valid_until`; set before the state says so."""
        self.valid_until = 0.0
        """By our clock."""
        self.renew_at = 0.0
        self.reason = ""
        """Why it is over."""

    def end(self, reason: str) -> bool:
        """It is over; False if it was before."""
        if self.state is State.OVER:
            return False
        self.reason = reason
        self.state = State.OVER
        return True

    @property
    def address(self) -> Address:
        return Address(self.ticket.host, self.ticket.port)
