# SPDX-License-Identifier: Apache-2.0
"""The answering side of the protocol: questions in, answers out. No thread, no socket."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllm_tiered_kv.remote.facts import UNTOLD, IdentityFacts
from vllm_tiered_kv.remote.leases import MAX_HOLDERS, Denial, LeaseTable
from vllm_tiered_kv.remote.loans import ChunkLender
from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.remote.messages import (
    MAX_SENTENCE,
    VERSION,
    Answer,
    Ask,
    Coming,
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
    Sums,
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
    """By KV cache group; slots, if that is the place."""
    place: Place = Place.PAGES
    sums: Sums = ()
    """Checksums; none: none are made."""


class _Taker(msgspec.Struct, frozen=True):
    """Somebody who wants what is not there yet."""

    peer: bytes
    number: int
    """Of the question."""
    holder: str


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
        self._offers: dict[int, Offer | None] = {}
        """None: promised, and not there yet."""
        self._takers: dict[int, list[_Taker]] = {}
        """Who waits for these."""
        self._late: list[tuple[bytes, bytes]] = []
        """Answers that had to wait."""
        self._memory: dict[int, RankMemory] = {}
        self._generation = 0
        self._identity: Identity | None = None
        self._facts = UNTOLD
        self._why = "its weights are still being digested"
        self._turned_away: list[int] = []
        self.decoded = 0
        """Messages that were looked at."""

    # -- what this engine has ----------------------------------------------------------

    def identify(self, identity: Identity, facts: IdentityFacts = UNTOLD) -> None:
        """What its KV means is known now."""
        self._identity = identity
        self._facts = facts

    def remember(self, memory: RankMemory) -> None:
        """Where a rank's pages are, now or once more."""
        if self._memory.get(memory.rank) != memory:
            self._memory[memory.rank] = memory
            self._generation += 1

    @property
    def is_ready(self) -> bool:
        return self._identity is not None and len(self._memory) == self._ranks

    def promise(self, lease: int) -> None:
        """Something can be taken from now on, until :meth:`take_freed` names its lease.

        Who takes it before :meth:`settle` has said what it is waits for that.
        """
        if self._leases.grant(lease, self._clock()):
            self._offers[lease] = None
            return
        self._count("remote_leases", "too many hand-overs are waiting to be fetched")
        self._turned_away.append(lease)

    def settle(self, lease: int, offer: Offer) -> None:
        """What was promised is there; nothing happens if its lease is over."""
        if lease not in self._offers:
            return
        self._offers[lease] = offer
        for taker in self._takers.pop(lease, ()):
            self._late.append((taker.peer, encode(self._granted(taker.number, offer))))

    def withdraw(self, lease: int) -> None:
        """What was promised is not there: nobody is granted it."""
        now = self._clock()
        self._turn_away(lease, now)
        self._leases.revoke(now, (lease,))

    def take_late(self) -> list[tuple[bytes, bytes]]:
        """Answers that had to wait, and to whom; each once."""
        late, self._late = self._late, []
        return late

    def close(self, why: str) -> None:
        """Grant nothing any more: what there is may not be what it was said to be."""
        self._identity = None
        self._why = why
        self.revoke()

    def revoke(self) -> None:
        """Grant nobody what is offered now."""
        now = self._clock()
        for lease in list(self._takers):
            self._turn_away(lease, now)
        self._leases.revoke(now)
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
            self._turn_away(lease, self._clock())
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
        answer = self._answer(peer, ask)
        return encode(answer) if answer is not None else None

    def _answer(self, peer: bytes, ask: Ask) -> Answer | None:
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
        return self._take(peer, ask, now)

    def _ranks_memory(self) -> tuple[RankMemory, ...]:
        return tuple(self._memory[rank] for rank in sorted(self._memory))

    def _meet(self, ask: Meet) -> Answer:
        if ask.asker == self._engine:
            return Refused(ask.number, Reason.SELF, "this is the engine that asks")
        if self._lender is None:
            return Refused(ask.number, Reason.LENDS_NOTHING, "this engine lends nothing")
        refused = self._compare(ask.number, ask.identity)
        if refused is not None:
            return refused
        return Met(ask.number, self._engine, self._generation, self._ranks_memory())

    def _find(self, ask: Find) -> Answer:
        if self._lender is None or not self.is_ready:
            return Refused(ask.number, Reason.NOT_READY, f"this engine lends nothing: {self._why}")
        return self._lender.find(ask, self._generation)

    def _take(self, peer: bytes, ask: Take, now: float) -> Answer:
        lease = ask.hold.lease
        denial = self._leases.take(lease, ask.hold.holder, now)
        if denial is None:
            offer = self._offers[lease]
            if offer is not None:
                return self._granted(ask.number, offer)
            takers = self._takers.setdefault(lease, [])
            if len(takers) < MAX_HOLDERS:
                takers.append(_Taker(peer, ask.number, ask.hold.holder))
            return Coming(ask.number)
        if denial is Denial.TOO_MANY:
            return Refused(ask.number, Reason.LIMIT, "too many read this hand-over already")
        return self._over(ask.number, lease)

    def _granted(self, number: int, offer: Offer) -> Granted:
        return Granted(
            number,
            self._leases.seconds,
            self._generation,
            offer.tokens,
            offer.blocks,
            offer.place,
            offer.sums,
        )

    def _over(self, number: int, lease: int) -> Refused:
        old = f"older than {self._leases.seconds:g} seconds"
        why = f"what was handed over has been fetched before, is {old}, or was withdrawn"
        return Refused(number, Reason.LEASE, f"lease {lease} is over: {why}")

    def _turn_away(self, lease: int, now: float) -> None:
        """Nobody gets what they have been waiting for."""
        for taker in self._takers.pop(lease, ()):
            self._late.append((taker.peer, encode(self._over(taker.number, lease))))
            self._leases.release(lease, taker.holder, now)

    def _compare(self, number: int, theirs: Identity) -> Refused | None:
        """Whether KV of ours means and lies the same there."""
        ours = self._identity
        if ours is None:
            sentence = f"this engine hands nothing over: {self._why}"
            return Refused(number, Reason.NOT_READY, sentence[:MAX_SENTENCE])
        if theirs.semantic != ours.semantic:
            return Refused(
                number,
                Reason.SEMANTIC,
                "KV means something else in the two engines (model, weights, dtype, LoRA options, "
                f"hash or vLLM differ): {theirs.semantic[:8]} here, {ours.semantic[:8]} there",
                self._facts.semantic,
            )
        if theirs.pages != ours.pages:
            return Refused(
                number,
                Reason.PAGES,
                "KV lies otherwise in the pages of the two engines (block size, parallelism, "
                "attention backend or instruction set differ): "
                f"{theirs.pages[:8]} here, {ours.pages[:8]} there",
                self._facts.pages,
            )
        if len(self._memory) < self._ranks:
            return Refused(number, Reason.NOT_READY, "not all ranks of this engine are there yet")
        return None
