# SPDX-License-Identifier: Apache-2.0
"""The consumer's side of the protocol: asks for leases, renews and releases them. No thread, no
socket.

Every question has a deadline. A producer that lets one pass is asked nothing for a while, each time
for longer, so that a dead one delays a few requests and not all.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from vllm_tiered_kv.remote import handoff as handoffs
from vllm_tiered_kv.remote.facts import UNTOLD, IdentityFacts
from vllm_tiered_kv.remote.handoff import Handoff, PeerMemory, State
from vllm_tiered_kv.remote.messages import (
    MAX_HOLDS,
    Answer,
    Ask,
    Coming,
    Granted,
    Hello,
    Hold,
    Identity,
    Refused,
    Release,
    Renew,
    Renewed,
    Take,
    Welcome,
    encode,
)
from vllm_tiered_kv.remote.options import MAX_PEERS, Address
from vllm_tiered_kv.remote.unwilling import kind_of, no_answer, sentence_of, silence

ASK_SECONDS = 2.0
"""For an answer ..."""
COMING_SECONDS = 6.0
"""... and for the one that is said to come."""
RENEWALS = 4
"""So often a lease is renewed within its time."""
IDLE_SECONDS = 120.0
"""A producer of whom nothing is wanted for so long is forgotten."""
MAX_LATE = 4096
"""Questions given up whose answers are still recognised."""


class _Question:
    __slots__ = ("deadline", "engine", "handoff", "held", "number", "sent")

    def __init__(self, number: int, engine: str, sent: float, deadline: float) -> None:
        self.number = number
        self.engine = engine
        self.sent = sent
        self.deadline = deadline
        self.handoff: Handoff | None = None
        """Of a Take."""
        self.held: dict[Hold, Handoff] | None = None
        """Of a Renew."""

    @property
    def is_hello(self) -> bool:
        return self.handoff is None and self.held is None


class _Peer:
    def __init__(self, address: Address, now: float) -> None:
        self.address = address
        self.memory: PeerMemory | None = None
        self.questions: dict[int, _Question] = {}
        self.held: dict[Hold, Handoff] = {}
        """Granted, or granted and waiting for news of the memory."""
        self.failures = 0
        self.quiet_until = 0.0
        self.wanted_at = now
        self.awaits: dict[Hold, tuple[Handoff, Granted]] = {}
        """Granted in memory that we do not know yet."""

    def is_greeting(self, engine: str) -> bool:
        return any(q.is_hello and q.engine == engine for q in self.questions.values())


class Client:
    """Asks producers.

    Args:
        send: puts a message on its way to an address; False if it cannot.
        close: ends the connection to an address.
        refusal: says why a producer's memory cannot be read; None if it can.
        clock: seconds, monotonic.
        count: takes each kind of failure, and a sentence.
    """

    def __init__(
        self,
        send: Callable[[Address, bytes], bool],
        close: Callable[[Address], None],
        refusal: Callable[[PeerMemory], str | None],
        clock: Callable[[], float],
        count: Callable[[str, str], None],
    ) -> None:
        self._send = send
        self._close = close
        self._refusal = refusal
        self._clock = clock
        self._count = count
        self._identity: Identity | None = None
        self._facts = UNTOLD
        self._why = "this engine's weights are still being digested"
        self._peers: dict[Address, _Peer] = {}
        self._late: OrderedDict[tuple[Address, int], tuple[str, Hold]] = OrderedDict()
        self._number = 0
        self.gone: list[str] = []
        """Engines that are not read from any more; the caller takes them."""

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, address: Address) -> bool:
        """Whether this producer is talked to."""
        return address in self._peers

    def identify(self, identity: Identity, facts: IdentityFacts = UNTOLD) -> None:
        """What our KV means is known now."""
        self._identity = identity
        self._facts = facts

    def stop(self, why: str) -> None:
        """Ask for nothing any more. Who holds something releases it when no read goes on."""
        self._identity = None
        self._why = why

    def recheck(self) -> None:
        """More is known of our memory: of what was granted meanwhile some may not be readable."""
        for peer in self._peers.values():
            memory = peer.memory
            reason = self._refusal(memory) if memory is not None else None
            if memory is None or reason is None:
                continue
            peer.memory = None
            self.gone.append(memory.engine)
            for handoff in peer.held.values():  # given back when the scheduler lets go of it
                if handoff.ticket.engine == memory.engine:
                    self._end(handoff, "remote_pages", f"{peer.address}: {reason}")

    def knows(self, engine: str) -> bool:
        """Whether this engine may be read from."""
        return any(self._knows(peer, engine) for peer in self._peers.values())

    # -- what is wanted ----------------------------------------------------------------

    def open(self, handoff: Handoff) -> None:
        """Ask for what was handed over; the hand-over's state tells what comes of it."""
        now = self._clock()
        engine = handoff.ticket.engine
        if self._identity is None:
            self._end(handoff, "remote_not_ready", self._why)
            return
        peer = self._peer(handoff.address, now)
        if peer is None:
            self._end(handoff, "remote_limit", f"more than {MAX_PEERS} engines hand KV over to us")
            return
        peer.wanted_at = now
        if now < peer.quiet_until:
            self._end(handoff, "remote_quiet", f"{peer.address} has not answered lately")
            return
        if not self._knows(peer, engine):
            self._greet(peer, engine, now)
        question = self._question(peer, engine, now, ASK_SECONDS)
        question.handoff = handoff
        take = Take(question.number, engine, self._identity, handoff.hold)
        if not self._send(peer.address, encode(take)):
            self._failed(peer, question, now)

    def release(self, handoff: Handoff) -> None:
        """It is not wanted any more, and no read of it goes on."""
        if handoff.state is State.OVER and not handoff.granted:
            return
        was_asking = handoff.state is State.ASKING
        handoff.state = State.OVER
        handoff.granted = None
        peer = self._peers.get(handoff.address)
        if peer is None:
            return
        peer.awaits.pop(handoff.hold, None)
        if peer.held.pop(handoff.hold, None) is not None:
            self._say(peer, Release(handoff.ticket.engine, (handoff.hold,)))
        elif was_asking:
            # Its answer may be on its way.
            for question in list(peer.questions.values()):
                if question.handoff is handoff:
                    self._forget(peer, question)

    def lapse(self, handoff: Handoff) -> None:
        """It is not wanted any more, but a read of it may go on: it is held for no longer than its
        time, unless :meth:`release` says before that none does."""
        handoff.end("given up")
        handoff.renew_at = math.inf

    # -- what is answered --------------------------------------------------------------

    def heard(self, address: Address, answer: Answer) -> None:
        """A producer says something."""
        peer = self._peers.get(address)
        if peer is None:
            return
        now = self._clock()
        if isinstance(answer, Coming):
            coming = peer.questions.get(answer.number)
            if coming is not None and coming.handoff is not None:
                coming.deadline = coming.sent + COMING_SECONDS
            return
        question = peer.questions.pop(answer.number, None)
        if question is None:
            self._heard_late(peer, answer.number, granted=isinstance(answer, Granted))
            return
        peer.failures, peer.quiet_until = 0, 0.0
        if isinstance(answer, Refused):
            self._refused(peer, question, answer)
        elif isinstance(answer, Welcome) and question.is_hello:
            self._welcome(peer, PeerMemory(question.engine, answer.generation, answer.ranks))
        elif isinstance(answer, Granted) and question.handoff is not None:
            self._grant(peer, question, answer, now)
        elif isinstance(answer, Renewed) and question.held is not None:
            self._renewed(peer, question, answer)
        else:
            self._count("remote_message", f"{address} answers what was not asked")
            self._failed(peer, question, now)

    def is_of_another_version(self, address: Address, sentence: str) -> None:
        """A producer and we do not understand each other."""
        if (peer := self._peers.get(address)) is not None:
            self._refuse_all(peer, "remote_version", f"{address}: {sentence}")

    def tick(self) -> None:
        """Give up what is late, renew what is waited with, forget who is not wanted."""
        now = self._clock()
        for peer in list(self._peers.values()):
            for question in [q for q in peer.questions.values() if q.deadline <= now]:
                self._failed(peer, question, now)
            for handoff in [h for h in peer.held.values() if h.valid_until <= now]:
                self._lose(peer, handoff)
            self._renew(peer, now)
            if peer.questions or peer.held:
                peer.wanted_at = now
            elif now - peer.wanted_at > IDLE_SECONDS:
                self._drop(peer)

    # -- inside ------------------------------------------------------------------------

    def _peer(self, address: Address, now: float) -> _Peer | None:
        peer = self._peers.get(address)
        if peer is not None:
            return peer
        if len(self._peers) >= MAX_PEERS:
            unused = [p for p in self._peers.values() if not p.questions and not p.held]
            if not unused:
                return None
            self._drop(min(unused, key=lambda p: p.wanted_at))
        peer = self._peers[address] = _Peer(address, now)
        return peer

    def _drop(self, peer: _Peer) -> None:
        if peer.memory is not None:
            self.gone.append(peer.memory.engine)
        del self._peers[peer.address]
        self._close(peer.address)

    def _knows(self, peer: _Peer, engine: str) -> bool:
        return peer.memory is not None and peer.memory.engine == engine

    def _question(self, peer: _Peer, engine: str, now: float, seconds: float) -> _Question:
        self._number += 1
        question = _Question(self._number, engine, now, now + seconds)
        peer.questions[self._number] = question
        return question

    def _greet(self, peer: _Peer, engine: str, now: float) -> None:
        if peer.is_greeting(engine) or self._identity is None:
            return
        question = self._question(peer, engine, now, ASK_SECONDS)
        if not self._say(peer, Hello(question.number, engine, self._identity)):
            self._failed(peer, question, now)

    def _say(self, peer: _Peer, message: Ask) -> bool:
        return self._send(peer.address, encode(message))

    def _welcome(self, peer: _Peer, memory: PeerMemory) -> None:
        if (reason := self._refusal(memory)) is not None:
            self._end_awaiting(peer, memory.engine, "remote_pages", f"{peer.address}: {reason}")
            return
        if peer.memory is not None and peer.memory.engine != memory.engine:
            self.gone.append(peer.memory.engine)
        peer.memory = memory
        for handoff, answer in list(peer.awaits.values()):
            if handoff.ticket.engine == memory.engine:
                del peer.awaits[handoff.hold]
                self._allow(handoff, answer, memory)

    def _grant(self, peer: _Peer, question: _Question, answer: Granted, now: float) -> None:
        handoff = question.handoff
        if handoff is None:
            return
        if answer.tokens != handoff.ticket.tokens:
            self._say(peer, Release(question.engine, (handoff.hold,)))
            self._end(handoff, "remote_message", f"{peer.address} grants other than it handed over")
            return
        handoff.valid_until = question.sent + answer.seconds
        handoff.renew_at = question.sent + answer.seconds / RENEWALS
        peer.held[handoff.hold] = handoff
        memory = peer.memory
        if memory is None or not self._knows(peer, question.engine):
            memory = None
        if memory is not None and memory.generation == answer.generation:
            self._allow(handoff, answer, memory)
            return
        peer.awaits[handoff.hold] = (handoff, answer)
        self._greet(peer, question.engine, now)

    def _allow(self, handoff: Handoff, answer: Granted, memory: PeerMemory) -> None:
        handoff.granted = handoffs.Granted(answer.blocks, memory, answer.place, answer.sums)
        handoff.state = State.GRANTED

    def _renewed(self, peer: _Peer, question: _Question, answer: Renewed) -> None:
        named = set(answer.holds)
        for hold, handoff in (question.held or {}).items():
            if peer.held.get(hold) is not handoff:
                continue
            if hold in named:
                handoff.valid_until = question.sent + answer.seconds
                if handoff.state is not State.OVER:
                    handoff.renew_at = question.sent + answer.seconds / RENEWALS
            else:
                self._lose(peer, handoff)

    def _renew(self, peer: _Peer, now: float) -> None:
        due = {hold: h for hold, h in peer.held.items() if h.renew_at <= now}
        for engine in {h.ticket.engine for h in due.values()}:
            ours = [hold for hold, h in due.items() if h.ticket.engine == engine]
            for i in range(0, len(ours), MAX_HOLDS):
                holds = tuple(ours[i : i + MAX_HOLDS])
                question = self._question(peer, engine, now, ASK_SECONDS)
                question.held = {hold: due[hold] for hold in holds}
                for handoff in question.held.values():
                    handoff.renew_at = now + ASK_SECONDS  # again, should this one be lost
                if not self._say(peer, Renew(question.number, engine, holds)):
                    self._failed(peer, question, now)

    def _refused(self, peer: _Peer, question: _Question, answer: Refused) -> None:
        kind = kind_of(answer)
        sentence = f"{peer.address}: {sentence_of(answer, self._facts)}"
        if question.handoff is not None:
            self._end(question.handoff, kind, sentence)
        for handoff in list((question.held or {}).values()):
            self._lose(peer, handoff)
        if question.is_hello:
            self._end_awaiting(peer, question.engine, kind, sentence)

    def _failed(self, peer: _Peer, question: _Question, now: float) -> None:
        """A question was not answered in time, or could not be asked."""
        if now >= peer.quiet_until:  # else other questions of the same time failed as well
            peer.failures += 1
            peer.quiet_until = now + silence(peer.failures)
        sentence = f"the prefill engine at {no_answer(peer.address)}"
        if question.handoff is not None:
            self._end(question.handoff, "remote_unanswered", sentence)
        if question.is_hello:
            self._end_awaiting(peer, question.engine, "remote_unanswered", sentence)
        self._forget(peer, question)

    def _end_awaiting(self, peer: _Peer, engine: str, kind: str, sentence: str) -> None:
        """Nothing will be known of the memory that these were granted in."""
        for handoff, _ in list(peer.awaits.values()):
            if handoff.ticket.engine == engine:
                self._say(peer, Release(engine, (handoff.hold,)))
                peer.held.pop(handoff.hold, None)
                del peer.awaits[handoff.hold]
                self._end(handoff, kind, sentence)

    def _forget(self, peer: _Peer, question: _Question) -> None:
        """Wait for its answer no more; a grant that comes late is given back."""
        peer.questions.pop(question.number, None)
        if question.handoff is None:
            return
        late = self._late
        late[peer.address, question.number] = (question.engine, question.handoff.hold)
        while len(late) > MAX_LATE:
            late.popitem(last=False)

    def _heard_late(self, peer: _Peer, number: int, *, granted: bool) -> None:
        known = self._late.pop((peer.address, number), None)
        if known is not None and granted:
            engine, hold = known
            self._say(peer, Release(engine, (hold,)))

    def _lose(self, peer: _Peer, handoff: Handoff) -> None:
        peer.held.pop(handoff.hold, None)
        peer.awaits.pop(handoff.hold, None)
        handoff.valid_until = 0.0  # whatever our clock says: the producer's memory may be reused
        self._end(handoff, "remote_lease", f"{peer.address}: the lease is over")

    def _refuse_all(self, peer: _Peer, kind: str, sentence: str) -> None:
        for question in list(peer.questions.values()):
            del peer.questions[question.number]
            if question.handoff is not None:
                self._end(question.handoff, kind, sentence)
        for handoff in list(peer.held.values()):
            self._lose(peer, handoff)

    def _end(self, handoff: Handoff, kind: str, sentence: str) -> None:
        if handoff.end(sentence):
            self._count(kind, sentence)
