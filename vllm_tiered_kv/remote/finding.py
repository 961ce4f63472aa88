# SPDX-License-Identifier: Apache-2.0
"""The asking side of the protocol for chunks: all peers at once, the longest answer wins.

No thread, no socket.

Peers are met beforehand, so that a question takes one message each way. One that does not answer a
question has to answer a greeting before it is asked again, and is greeted less and less often: a
dead peer delays a few requests and not all. One whose memory is of no use to us is left alone.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

from vllm_tiered_kv.remote.facts import UNTOLD, IdentityFacts
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.inquiry import Inquiry, InquiryState, Loan
from vllm_tiered_kv.remote.messages import (
    MAX_KEYS,
    SUM_BYTES,
    Answer,
    Ask,
    Find,
    Found,
    Hold,
    Identity,
    Meet,
    Met,
    Reason,
    Refused,
    Return,
    encode,
)
from vllm_tiered_kv.remote.options import MAX_PEERS, Address
from vllm_tiered_kv.remote.unwilling import (
    MAX_QUIET_SECONDS,
    kind_of,
    no_answer,
    sentence_of,
    silence,
)

MEET_SECONDS = 2.0
"""For an answer to a first question."""
FIND_SECONDS = 0.25
"""For an answer to a question that a request waits for."""
LONGER_SECONDS = 0.01
"""So long after the first that has something others may have more."""
USELESS_SECONDS = 600.0
"""A peer that can lend us nothing is left alone for so long."""
MAX_INQUIRIES = 64
"""Under way at once."""
MAX_LATE = 4096
"""Questions given up whose answers are still recognised."""
MAX_HASH_BYTES = 32
_FIRST_NUMBER = 1 << 32
"""Other questions to the same peers have lower numbers."""
_USELESS = {
    Reason.VERSION,
    Reason.SEMANTIC,
    Reason.PAGES,
    Reason.SELF,
    Reason.LENDS_NOTHING,
}


class _Question:
    """One message to one peer that was not answered yet."""

    __slots__ = ("deadline", "entry", "holder", "peer", "sent")

    def __init__(
        self, peer: _Peer, sent: float, deadline: float, entry: _Open | None, holder: str
    ) -> None:
        self.peer = peer
        self.sent = sent
        self.deadline = deadline
        self.entry = entry
        """None: it asks who the peer is."""
        self.holder = holder


class _Peer:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.memory: PeerMemory | None = None
        self.is_greeted = False
        """It was asked who it is."""
        self.is_doubted = False
        """It has not answered a question; its memory may still be read."""
        self.failures = 0
        self.quiet_until = 0.0


class _Open:
    """An inquiry under way."""

    __slots__ = ("best", "due", "inquiry", "numbers", "wanted")

    def __init__(self, inquiry: Inquiry, wanted: int, due: float) -> None:
        self.inquiry = inquiry
        self.wanted = wanted
        """Chunks asked for."""
        self.due = due
        """When it is decided, whoever has not answered."""
        self.numbers: set[int] = set()
        self.best: Loan | None = None


class Finder:
    """Asks peers for chunks.

    Args:
        engine: this engine's incarnation.
        send: puts a message on its way to an address; False if it cannot.
        close: ends the connection to an address.
        refusal: says why a peer's slots cannot be read into ours; None if they can.
        clock: seconds, monotonic.
        count: takes each kind of failure, and a sentence.
        verify: borrow nothing without checksums.
    """

    def __init__(
        self,
        engine: str,
        send: Callable[[Address, bytes], bool],
        close: Callable[[Address], None],
        refusal: Callable[[PeerMemory], str | None],
        clock: Callable[[], float],
        count: Callable[[str, str], None],
        *,
        verify: bool = False,
    ) -> None:
        self._engine = engine
        self._verify = verify
        self._send = send
        self._close = close
        self._refusal = refusal
        self._clock = clock
        self._count = count
        self._identity: Identity | None = None
        self._facts = UNTOLD
        self._peers: dict[Address, _Peer] = {}
        self._questions: dict[int, _Question] = {}
        self._late: OrderedDict[int, _Question] = OrderedDict()
        """Not waited for any more; what they lend is given back."""
        self._open: dict[Inquiry, _Open] = {}
        self._numbers = itertools.count(_FIRST_NUMBER)
        self.gone: list[str] = []
        """Engines that are not read from any more; the caller takes them."""

    def __contains__(self, address: Address) -> bool:
        """Whether this peer is asked."""
        return address in self._peers

    def knows(self, engine: str) -> bool:
        """Whether this engine may be read from."""
        memories = (peer.memory for peer in self._peers.values())
        return any(memory is not None and memory.engine == engine for memory in memories)

    # -- who is asked ------------------------------------------------------------------

    def identify(self, identity: Identity, facts: IdentityFacts = UNTOLD) -> None:
        """What our KV means is known now, and in words."""
        self._identity, self._facts = identity, facts

    def stop(self) -> None:
        """Ask nobody any more."""
        self._identity = None
        for entry in list(self._open.values()):
            self._decide(entry)

    def know(self, addresses: Sequence[Address]) -> None:
        """These are the peers from now on."""
        wanted = dict.fromkeys(addresses[:MAX_PEERS])
        for address in [address for address in self._peers if address not in wanted]:
            peer = self._peers.pop(address)
            for number in [n for n, q in self._questions.items() if q.peer is peer]:
                self._unanswered(number, self._questions[number])
            self._lose(peer)
            self._close(address)
        for address in wanted:
            self._peers.setdefault(address, _Peer(address))

    # -- what is wanted ----------------------------------------------------------------

    def open(self, inquiry: Inquiry) -> None:
        """Ask all peers; the inquiry's state tells what comes of it."""
        now = self._clock()
        content = inquiry.content
        hashes = tuple(key[: len(key) - len(content)] for key in inquiry.keys[:MAX_KEYS])
        asked = [peer for peer in self._peers.values() if self._can_ask(peer, now)]
        good = hashes and all(key.endswith(content) for key in inquiry.keys[:MAX_KEYS])
        if not asked or not good or len(hashes[0]) > MAX_HASH_BYTES:
            inquiry.state = InquiryState.OVER
            return
        if len(self._open) >= MAX_INQUIRIES:
            self._count("remote_limit", f"more than {MAX_INQUIRIES} questions to peers at once")
            inquiry.state = InquiryState.OVER
            return
        entry = self._open[inquiry] = _Open(inquiry, len(hashes), now + FIND_SECONDS)
        numbers = {next(self._numbers): peer for peer in asked}
        entry.numbers.update(numbers)
        for number, peer in numbers.items():
            if peer.memory is not None:
                holder = f"{self._engine}.{number}"
                find = Find(number, peer.memory.engine, holder, content, hashes)
                self._ask(peer, number, find, now + FIND_SECONDS, entry, holder)

    def give_back(self, inquiry: Inquiry) -> None:
        """Nothing of it is wanted any more, and no read of it goes on."""
        entry = self._open.get(inquiry)
        if entry is not None:
            self._decide(entry)
        loan, inquiry.loan = inquiry.loan, None
        inquiry.state = InquiryState.OVER
        if loan is not None:
            self._return(loan)

    # -- what is answered --------------------------------------------------------------

    def heard(self, address: Address, answer: Answer) -> bool:
        """A peer says something; False if that is not ours to hear."""
        number = answer.number
        question = self._questions.get(number) or self._late.get(number)
        if question is None or question.peer.address != address:
            return False
        if self._late.pop(number, None) is not None:
            self._heard_late(question, answer)
        else:
            del self._questions[number]
            self._answered(number, question, answer)
        return True

    def is_of_another_version(self, address: Address, sentence: str) -> None:
        """A peer and we do not understand each other."""
        if address in self._peers:
            self._useless(self._peers[address], "remote_version", sentence)

    def tick(self) -> None:
        """Give up what is late, and meet who is not known."""
        now = self._clock()
        for number, question in list(self._questions.items()):
            if question.deadline <= now:
                self._unanswered(number, question)
        for entry in [entry for entry in self._open.values() if entry.due <= now]:
            self._decide(entry)
        for peer in self._peers.values():
            unknown = peer.memory is None or peer.is_doubted
            if unknown and not peer.is_greeted and now >= peer.quiet_until:
                self._meet(peer, now)

    @property
    def due(self) -> float | None:
        """When :meth:`tick` is to be called at the latest; None: at leisure."""
        return min((entry.due for entry in self._open.values()), default=None)

    # -- inside ------------------------------------------------------------------------

    def _can_ask(self, peer: _Peer, now: float) -> bool:
        known = peer.memory is not None and not peer.is_doubted
        return known and now >= peer.quiet_until and self._identity is not None

    def _meet(self, peer: _Peer, now: float) -> None:
        if self._identity is None:
            return
        peer.is_greeted = True
        number = next(self._numbers)
        self._ask(peer, number, Meet(number, self._engine, self._identity), now + MEET_SECONDS)

    def _ask(
        self,
        peer: _Peer,
        number: int,
        ask: Ask,
        deadline: float,
        entry: _Open | None = None,
        holder: str = "",
    ) -> None:
        question = _Question(peer, self._clock(), deadline, entry, holder)
        self._questions[number] = question
        if not self._send(peer.address, encode(ask)):
            self._unanswered(number, question)

    def _answered(self, number: int, question: _Question, answer: Answer) -> None:
        peer, entry = question.peer, question.entry
        peer.failures, peer.quiet_until = 0, 0.0
        if entry is None:
            peer.is_greeted = False
        else:
            entry.numbers.discard(number)
        if isinstance(answer, Refused):
            self._refused(peer, answer)
        elif isinstance(answer, Met) and entry is None:
            self._met(peer, PeerMemory(answer.engine, answer.generation, answer.ranks))
        elif isinstance(answer, Found) and entry is not None:
            self._found(question, entry, answer)
        else:
            self._count("remote_message", f"{peer.address} answers what was not asked")
            self._failed(peer)
        if entry is not None:
            self._decide_if_clear(entry)

    def _met(self, peer: _Peer, memory: PeerMemory) -> None:
        if (reason := self._refusal(memory)) is not None:
            self._useless(peer, "remote_pages", f"nothing is read from its slots: {reason}")
            return
        if peer.memory is not None and peer.memory.engine != memory.engine:
            self._lose(peer)
        peer.memory = memory
        peer.is_doubted = False

    def _found(self, question: _Question, entry: _Open, answer: Found) -> None:
        loan = self._loan(question, answer)
        if loan is None:
            return
        if self._open.get(entry.inquiry) is not entry:
            self._return(loan)
            return
        if loan.memory.generation != answer.generation:  # its ranks' memory is another one by now
            self._return(loan)
            question.peer.memory = None
            return
        best = entry.best
        if best is not None and best.chunks >= loan.chunks:
            self._return(loan)
            return
        if best is not None:
            self._return(best)
        else:
            entry.due = min(entry.due, self._clock() + LONGER_SECONDS)
        entry.best = loan

    def _loan(self, question: _Question, answer: Found) -> Loan | None:
        """What an answer lends, if it can be that."""
        memory = question.peer.memory
        if not answer.slots or not answer.slots[0]:
            return None
        if memory is None:
            return None  # it is forgotten; the lease ends by itself
        entry = question.entry
        hold = Hold(answer.lease, question.holder)
        until = question.sent + answer.seconds
        sums = answer.sums if self._verify else ()
        loan = Loan(question.peer.address, memory, hold, answer.slots, until, sums)
        most = entry.wanted if entry is not None else 0
        if loan.chunks > most or len({len(slots) for slots in answer.slots}) != 1:
            self._count("remote_message", f"{loan.address} lends other than it was asked for")
        elif self._verify and not sums:
            sentence = "its chunks have no checksums: give it remote.verify as well"
            self._useless(question.peer, "remote_verify", sentence)
        elif self._verify and not _are_whole(loan):
            self._count("remote_message", f"{loan.address} lends chunks with other checksums")
        else:
            return loan
        self._return(loan)
        return None

    def _decide_if_clear(self, entry: _Open) -> None:
        """Once all have answered, or one has all."""
        if not entry.numbers or (entry.best is not None and entry.best.chunks >= entry.wanted):
            self._decide(entry)

    def _decide(self, entry: _Open) -> None:
        if self._open.pop(entry.inquiry, None) is None:
            return
        for number in entry.numbers:
            question = self._questions.get(number)
            if question is not None and self._clock() < question.deadline:
                del self._questions[number]
                self._forget(number, question)
        inquiry = entry.inquiry
        inquiry.loan = entry.best
        inquiry.state = InquiryState.FOUND if entry.best is not None else InquiryState.OVER

    def _heard_late(self, question: _Question, answer: Answer) -> None:
        question.peer.failures, question.peer.quiet_until = 0, 0.0
        loan = self._loan(question, answer) if isinstance(answer, Found) else None
        if loan is not None:
            self._return(loan)

    def _return(self, loan: Loan) -> None:
        self._send(loan.address, encode(Return(loan.memory.engine, (loan.hold,))))

    def _unanswered(self, number: int, question: _Question) -> None:
        del self._questions[number]
        entry, peer = question.entry, question.peer
        self._failed(peer)
        if entry is None:
            peer.is_greeted = False
            if self._identity is not None and peer.address in self._peers:
                self._count(
                    "remote_unanswered", f"peer {no_answer(peer.address)}; it is tried again"
                )
            return
        peer.is_doubted = True
        self._forget(number, question)
        entry.numbers.discard(number)
        self._decide_if_clear(entry)

    def _forget(self, number: int, question: _Question) -> None:
        """Wait for its answer no more; what it lends is given back."""
        self._late[number] = question
        while len(self._late) > MAX_LATE:
            self._late.popitem(last=False)

    def _refused(self, peer: _Peer, answer: Refused) -> None:
        kind = kind_of(answer)
        if answer.reason in _USELESS:
            self._useless(peer, kind, sentence_of(answer, self._facts))
        elif answer.reason is Reason.ENGINE:
            self._lose(peer)  # it restarted: who is it now?
        elif answer.reason is Reason.NOT_READY:
            peer.quiet_until = self._clock() + MAX_QUIET_SECONDS / 10
        else:
            self._count(kind, f"{peer.address}: {answer.sentence}")

    def _useless(self, peer: _Peer, kind: str, sentence: str) -> None:
        self._lose(peer)
        peer.quiet_until = self._clock() + USELESS_SECONDS
        if kind != "remote_self":
            self._count(kind, f"peer {peer.address} is not asked for chunks: {sentence}")

    def _failed(self, peer: _Peer) -> None:
        peer.failures += 1
        peer.quiet_until = max(peer.quiet_until, self._clock() + silence(peer.failures))

    def _lose(self, peer: _Peer) -> None:
        memory, peer.memory = peer.memory, None
        if memory is not None:
            self.gone.append(memory.engine)


def _are_whole(loan: Loan) -> bool:
    """Whether there is a checksum of each slot on each rank."""
    nbytes = SUM_BYTES * len(loan.memory.ranks) * len(loan.slots)
    return [len(sums) for sums in loan.sums] == [nbytes] * loan.chunks
