# SPDX-License-Identifier: Apache-2.0
"""The answering side of the protocol: questions in, answers out. No thread, no socket."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllm_tiered_kv.remote.leases import Denial, LeaseTable
from vllm_tiered_kv.remote.loans import ChunkLender
from vllm_tiered_kv.remote.messages import (
    VERSION,
    Answer,
    Ask,
    Find,
    Granted,
    Hello,
    Identity,
    Meet,
    MessageError,
    Met,
    OtherVersion,
    RankMemory,
    Reason,
    Refused,
    Release,
    Renew,
    Renewed,
    Return,
    Take,
    Welcome,
    decode_ask,
    encode,
)
from vllm_tiered_kv.remote.rate import RateLimit

RATE = 2000.0
"""Messages a second that one peer may send ..."""
BURST = 4000.0
"""... and at once."""
COST_BYTES = 1 << 12
"""So much of a message counts as one message more."""
MAX_ASKERS = 1024
"""Connections whose rate is remembered."""


class Offer(msgspec.Struct, frozen=True):
    """A hand-over that can be taken."""

    tokens: int
    blocks: tuple[tuple[int, ...], ...]
    """Device blocks by KV cache group."""


class Server:
    """Answers consumers.

    Args:
        engine: this engine's incarnation.
        ranks: how many ranks there are.
        leases: the table; this side's alone.
        clock: seconds, monotonic.
        count: takes each kind of failure.
        lender: answers questions for chunks; None where none are lent.
    """

    def __init__(
        self,
        engine: str,
        ranks: int,
        leases: LeaseTable,
        clock: Callable[[], float],
        count: Callable[[str, str], None],
        lender: ChunkLender | None = None,
    ) -> None:
        self._lender = lender
        self._engine = engine
        self._ranks = ranks
        self._leases = leases
        self._clock = clock
        self._count = count
        self._rate = RateLimit(RATE, BURST, MAX_ASKERS)
        self._offers: dict[int, Offer] = {}
        self._memory: dict[int, RankMemory] = {}
        self._generation = 0
        self._identity: Identity | None = None
        self._why = "its weights are still being digested"
        self._turned_away: list[int] = []
        self.decoded = 0
        """Messages that were looked at."""

    # -- what this engine has ----------------------------------------------------------

    def identify(self, identity: Identity) -> None:
        """What its KV means is known now."""
        self._identity = identity

    def remember(self, memory: RankMemory) -> None:
        """Where a rank's pages are, now or once more."""
        if self._memory.get(memory.rank) != memory:
            self._memory[memory.rank] = memory
            self._generation += 1

    @property
    def is_ready(self) -> bool:
        return self._identity is not None and len(self._memory) == self._ranks

    def offer(self, lease: int, offer: Offer) -> None:
        """Something can be taken from now on, until :meth:`take_freed` names its lease."""
        if self._leases.grant(lease, self._clock()):
            self._offers[lease] = offer
            return
        self._count("remote_leases", "too many hand-overs are waiting to be fetched")
        self._turned_away.append(lease)

    def close(self, why: str) -> None:
        """Grant nothing any more: what there is may not be what it was said to be."""
        self._identity = None
        self._why = why
        self.revoke()

    def revoke(self) -> None:
        """Grant nobody what is offered now."""
        self._leases.revoke(self._clock())
        if self._lender is not None:
            self._lender.revoke()

    def expire(self) -> None:
        """Give back chunks whose leases are over."""
        if self._lender is not None:
            self._lender.expire()

    def take_freed(self) -> list[int]:
        """Leases whose memory is free; each once."""
        self._leases.expire(self._clock())
        freed, self._turned_away = self._turned_away, []
        for lease in self._leases.take_freed():
            del self._offers[lease]
            freed.append(lease)
        return freed

    # -- what it is asked --------------------------------------------------------------

    def answer(self, peer: bytes, data: bytes) -> bytes | None:
        """What to say to a peer that said this; None: nothing.

        Args:
            peer: the connection's name.
            data: the message, from somebody who has the fleet's key.
        """
        if not self._rate.admits(peer, self._clock(), 1 + len(data) // COST_BYTES):
            self._count("remote_rate", "a peer asks more than it may")
            return None
        self.decoded += 1
        try:
            ask = decode_ask(data)
        except OtherVersion as error:
            self._count("remote_version", str(error))
            return encode(Refused(0, Reason.VERSION, f"this engine speaks version {VERSION}"))
        except MessageError as error:
            self._count("remote_message", f"a peer's message cannot be read: {error}")
            return None
        answer = self._answer(ask)
        return encode(answer) if answer is not None else None

    def _answer(self, ask: Ask) -> Answer | None:
        now = self._clock()
        if isinstance(ask, Release):
            if ask.engine == self._engine:
                for hold in ask.holds:
                    self._leases.release(hold.lease, hold.holder, now)
            return None
        if isinstance(ask, Return):
            if ask.engine == self._engine and self._lender is not None:
                self._lender.give_back(ask.holds)
            return None
        if isinstance(ask, Meet):
            return self._meet(ask)
        if ask.engine != self._engine:
            return Refused(
                ask.number, Reason.ENGINE, f"this is {self._engine}, not {ask.engine}: it restarted"
            )
        if isinstance(ask, Renew):
            held = [hold for hold in ask.holds if self._leases.renew(hold.lease, hold.holder, now)]
            return Renewed(ask.number, self._leases.seconds, tuple(held))
        if isinstance(ask, Find):
            return self._find(ask)
        refused = self._compare(ask.number, ask.identity)
        if refused is not None:
            return refused
        if isinstance(ask, Hello):
            return Welcome(ask.number, self._generation, self._ranks_memory())
        return self._take(ask, now)

    def _ranks_memory(self) -> tuple[RankMemory, ...]:
        return tuple(self._memory[rank] for rank in sorted(self._memory))

    def _meet(self, ask: Meet) -> Answer:
        if ask.asker == self._engine:
            return Refused(ask.number, Reason.SELF, "this is the engine that asks")
        if self._lender is None:
            return Refused(ask.number, Reason.LENDS_NOTHING, "this engine has no CPU tier to lend")
        refused = self._compare(ask.number, ask.identity)
        if refused is not None:
            return refused
        return Met(ask.number, self._engine, self._generation, self._ranks_memory())

    def _find(self, ask: Find) -> Answer:
        if self._lender is None or not self.is_ready:
            return Refused(ask.number, Reason.NOT_READY, f"this engine lends nothing: {self._why}")
        return self._lender.find(ask, self._generation)

    def _take(self, ask: Take, now: float) -> Answer:
        denial = self._leases.take(ask.hold.lease, ask.hold.holder, now)
        if denial is None:
            offer = self._offers[ask.hold.lease]
            return Granted(
                ask.number, self._leases.seconds, self._generation, offer.tokens, offer.blocks
            )
        if denial is Denial.TOO_MANY:
            return Refused(ask.number, Reason.LIMIT, "too many read this hand-over already")
        return Refused(
            ask.number,
            Reason.LEASE,
            f"lease {ask.hold.lease} is over: it is kept for {self._leases.seconds:g} seconds",
        )

    def _compare(self, number: int, theirs: Identity) -> Refused | None:
        """Whether KV of ours means and lies the same there."""
        ours = self._identity
        if ours is None:
            return Refused(number, Reason.NOT_READY, f"this engine hands nothing over: {self._why}")
        if theirs.semantic != ours.semantic:
            return Refused(
                number,
                Reason.SEMANTIC,
                "KV means something else in the two engines (model, weights, dtype, LoRA options, "
                f"hash or vLLM differ): {ours.semantic[:8]} here, {theirs.semantic[:8]} there",
            )
        if theirs.pages != ours.pages:
            return Refused(
                number,
                Reason.PAGES,
                "KV lies otherwise in the pages of the two engines (block size, parallelism, "
                "attention backend or instruction set differ): "
                f"{ours.pages[:8]} here, {theirs.pages[:8]} there",
            )
        if len(self._memory) < self._ranks:
            return Refused(number, Reason.NOT_READY, "not all ranks of this engine are there yet")
        return None
