# SPDX-License-Identifier: Apache-2.0
"""Questions for chunks: who is asked, whose answer wins, what is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.remote._wire import GRACE, IDENTITY, SECONDS, memory
from vllm_tiered_kv.remote import finding, serving
from vllm_tiered_kv.remote.finding import (
    FIND_SECONDS,
    LONGER_SECONDS,
    MAX_INQUIRIES,
    MEET_SECONDS,
    USELESS_SECONDS,
    Finder,
)
from vllm_tiered_kv.remote.inquiry import Inquiry, InquiryState
from vllm_tiered_kv.remote.leases import LeaseTable
from vllm_tiered_kv.remote.loans import ChunkLender
from vllm_tiered_kv.remote.messages import (
    MAX_ANSWER_BYTES,
    MAX_ASK_BYTES,
    MAX_GROUPS,
    MAX_KEYS,
    MAX_RANKS,
    SUM_BYTES,
    Ask,
    Find,
    Found,
    Hold,
    Identity,
    Meet,
    MessageError,
    Met,
    Return,
    decode_answer,
    decode_ask,
    encode,
)
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.serving import Server
from vllm_tiered_kv.remote.shelf import Shelf

ENGINE = "ee" * 16
A, B = Address("10.0.0.1", 7600), Address("10.0.0.2", 7600)
KEYS = [bytes([i]) * 32 for i in range(6)]


SUMS = bytes(SUM_BYTES)
"""Of one chunk: there are one rank and one group."""


class Peer:
    """An engine that lends.

    Args:
        net: that it is in.
        engine: its incarnation.
        keys: of its chunks.
        sums: checksums of each.
    """

    def __init__(
        self, net: Net, engine: str, keys: Sequence[bytes] = (), sums: bytes = b""
    ) -> None:
        self.sums = sums
        self.shelf: Shelf[object] = Shelf(100)
        leases = LeaseTable(SECONDS, GRACE, 8)
        lender = ChunkLender(self.shelf, leases, lambda: net.now)
        self.server = Server(
            engine, 1, LeaseTable(SECONDS, GRACE, 8), lambda: net.now, net.count, lender
        )
        self.server.identify(IDENTITY)
        self.server.remember(memory())
        self.add(keys)

    def add(self, keys: Sequence[bytes]) -> None:
        for i, key in enumerate(keys):
            self.shelf.offer(key, (40 + i,), key, self.sums)


class Net:
    """A finder, peers, and what is on its way between them."""

    def __init__(self, *, verify: bool = False) -> None:
        self.now = 1000.0
        self.failures: list[str] = []
        self.sentences: list[str] = []
        self.refusal: str | None = None
        self.peers: dict[Address, Peer | None] = {}
        self.asks: list[tuple[Address, bytes]] = []
        self.sent: list[tuple[Address, Ask]] = []
        self.answers: list[tuple[Address, bytes]] = []
        self.finder = Finder(
            ENGINE,
            self._send,
            lambda _: None,
            lambda _: self.refusal,
            lambda: self.now,
            self.count,
            verify=verify,
        )
        self.finder.identify(IDENTITY)

    def count(self, kind: str, sentence: str) -> None:
        self.failures.append(kind)
        self.sentences.append(sentence)

    def _send(self, address: Address, data: bytes) -> bool:
        self.asks.append((address, data))
        self.sent.append((address, decode_ask(data)))
        return True

    def know(self, *addresses: Address) -> None:
        self.finder.know(addresses)
        self.finder.tick()
        self.run()

    def run(self, *first: Address) -> None:
        """Deliver everything until nothing is on its way; to some before others."""
        while self.asks or self.answers:
            order = {address: i for i, address in enumerate(first)}
            self.asks.sort(key=lambda ask: order.get(ask[0], len(order)))
            asks, self.asks = self.asks, []
            for address, data in asks:
                peer = self.peers.get(address)
                answer = peer.server.answer(b"us", data) if peer is not None else None
                if answer is not None:
                    self.answers.append((address, answer))
            answers, self.answers = self.answers, []
            for address, data in answers:
                self.finder.heard(address, decode_answer(data))

    def ask(self, keys: Sequence[bytes] = KEYS, content: bytes = b"") -> Inquiry:
        inquiry = Inquiry([key + content for key in keys], content)
        self.finder.open(inquiry)
        return inquiry

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.finder.tick()

    def greetings(self) -> int:
        return sum(isinstance(ask, Meet) for _, ask in self.sent)


@pytest.fixture
def net() -> Net:
    net = Net()
    net.peers[A] = Peer(net, "aa" * 16, KEYS[:4])
    net.peers[B] = Peer(net, "bb" * 16, KEYS[:2])
    net.know(A, B)
    return net


def lent(net: Net, address: Address) -> int:
    peer = net.peers[address]
    assert peer is not None
    return peer.shelf.lent_slots


@pytest.mark.parametrize("first", [A, B])
def test_the_longest_answer_wins_and_the_other_is_given_back(net: Net, first: Address) -> None:
    inquiry = net.ask()
    net.run(first)
    assert inquiry.state is InquiryState.FOUND
    assert inquiry.loan is not None
    assert inquiry.loan.address == A
    assert inquiry.loan.slots == ((40, 41, 42, 43),)
    assert inquiry.loan.valid_until == 1000.0 + SECONDS
    assert (lent(net, A), lent(net, B)) == (4, 0)
    net.finder.give_back(inquiry)
    net.run()
    assert lent(net, A) == 0
    assert not net.failures


def test_nobody_waits_for_the_others_once_all_is_found(net: Net) -> None:
    net.peers[B] = None
    inquiry = net.ask(KEYS[:3])
    net.run()
    assert inquiry.state is InquiryState.FOUND


def test_others_have_a_moment_to_find_more(net: Net) -> None:
    net.peers[B] = None
    inquiry = net.ask()
    net.run()
    assert inquiry.state is InquiryState.ASKING
    assert net.finder.due == pytest.approx(net.now + LONGER_SECONDS)
    net.pass_time(LONGER_SECONDS)
    assert inquiry.state is InquiryState.FOUND


def test_what_nobody_has_is_over_at_once(net: Net) -> None:
    inquiry = net.ask([b"x" * 32])
    net.run()
    assert inquiry.state is InquiryState.OVER
    assert inquiry.loan is None


def test_keys_of_an_adapter_are_told_apart(net: Net) -> None:
    content = b"L" * 32
    assert net.ask(content=content).state is InquiryState.ASKING
    net.run()
    peer = net.peers[A]
    assert peer is not None
    peer.add([key + content for key in KEYS])
    inquiry = net.ask(content=content)
    net.run()
    assert inquiry.loan is not None
    assert inquiry.loan.chunks == len(KEYS)


def test_a_dead_peer_is_asked_nothing_until_it_answers_a_greeting(net: Net) -> None:
    was, net.peers[B] = net.peers[B], None
    inquiry = net.ask([b"x" * 32])
    net.run()
    assert inquiry.state is InquiryState.ASKING
    net.pass_time(FIND_SECONDS)
    assert inquiry.state is InquiryState.OVER
    inquiry = net.ask([b"y" * 32])
    net.run()
    assert inquiry.state is InquiryState.OVER, "a request waited for a dead peer again"
    net.peers[B] = was
    net.pass_time(60)
    net.run()
    net.ask()
    assert {address for address, ask in net.sent if isinstance(ask, Find)} == {A, B}
    assert {address for address, _ in net.asks} == {A, B}


def test_greetings_to_a_dead_peer_become_rare() -> None:
    net = Net()
    net.know(A)
    for _ in range(600):
        net.pass_time(1)
        net.run()
    assert net.greetings() < 30
    assert 0 < net.failures.count("remote_unanswered") <= net.greetings()
    assert "10.0.0.1:7600 does not answer" in net.sentences[0]


@pytest.mark.parametrize("late", ["lost", "within its time"])
def test_an_answer_that_comes_late_is_given_back(net: Net, late: str) -> None:
    inquiry = net.ask()
    asks, net.asks = net.asks, []
    if late == "lost":
        net.pass_time(FIND_SECONDS)
        assert inquiry.state is InquiryState.OVER
    net.finder.give_back(inquiry)
    net.asks = asks
    net.run()
    assert inquiry.loan is None
    assert (lent(net, A), lent(net, B)) == (0, 0)


def test_a_restarted_peer_is_met_again(net: Net) -> None:
    net.peers[A] = Peer(net, "cc" * 16, KEYS)
    inquiry = net.ask()
    net.run()
    net.pass_time(LONGER_SECONDS)
    assert inquiry.loan is not None
    assert inquiry.loan.address == B
    assert net.finder.gone == ["aa" * 16]
    net.run()
    inquiry = net.ask()
    net.run()
    assert inquiry.loan is not None
    assert inquiry.loan.memory.engine == "cc" * 16


def test_memory_that_has_changed_is_asked_for_again(net: Net) -> None:
    peer = net.peers[A]
    assert peer is not None
    peer.server.remember(memory(base=1 << 21))
    inquiry = net.ask()
    net.run()
    net.pass_time(LONGER_SECONDS)
    assert inquiry.loan is not None
    assert inquiry.loan.address == B
    assert lent(net, A) == 0
    net.run()
    inquiry = net.ask()
    net.run()
    assert inquiry.loan is not None
    assert inquiry.loan.memory.ranks == (memory(base=1 << 21),)


def test_a_peer_whose_slots_are_of_no_use_is_left_alone_for_long() -> None:
    net = Net()
    net.peers[A] = Peer(net, "aa" * 16, KEYS)
    net.refusal = "chunks have 2 blocks there and 1 here"
    net.know(A)
    assert net.failures == ["remote_pages"]
    assert net.ask().state is InquiryState.OVER
    net.pass_time(USELESS_SECONDS - 1)
    assert net.greetings() == 1
    net.pass_time(2)
    assert net.greetings() == 2


@pytest.mark.parametrize("field", ["semantic", "pages"])
def test_a_peer_with_another_model_is_left_alone_for_long(field: str) -> None:
    net = Net()
    peer = net.peers[A] = Peer(net, "aa" * 16, KEYS)
    peer.server.identify(Identity(**{"semantic": "a" * 32, "pages": "b" * 32, field: "c" * 32}))
    net.know(A)
    assert net.failures == [f"remote_{field}"]
    net.pass_time(USELESS_SECONDS - 1)
    assert net.greetings() == 1


def test_an_engine_does_not_ask_itself() -> None:
    net = Net()
    net.peers[A] = Peer(net, ENGINE, KEYS)
    net.know(A)
    assert net.ask().state is InquiryState.OVER
    assert not net.failures


def test_a_closed_peer_lends_nothing(net: Net) -> None:
    peer = net.peers[A]
    assert peer is not None
    peer.server.close("its caches were reset")
    inquiry = net.ask()
    net.run()
    net.pass_time(LONGER_SECONDS)
    assert inquiry.loan is not None
    assert inquiry.loan.address == B


def test_a_lease_that_is_not_given_back_ends_after_its_grace(net: Net) -> None:
    net.ask()
    net.run()
    peer = net.peers[A]
    assert peer is not None
    net.now += SECONDS + GRACE - 0.01
    peer.server.expire()
    assert lent(net, A) == 4
    net.now += 0.02
    peer.server.expire()
    assert lent(net, A) == 0


def test_questions_and_leases_are_bounded(net: Net) -> None:
    for _ in range(MAX_INQUIRIES):
        assert net.ask().state is InquiryState.ASKING
    assert net.ask().state is InquiryState.OVER
    net.run()
    assert lent(net, A) == 4
    assert "remote_limit" in net.failures


def test_the_longest_question_fits() -> None:
    hashes = tuple([b"h" * 32] * MAX_KEYS)
    find = Find(1 << 40, "aa" * 16, "h" * 64, b"c" * 64, hashes)
    assert len(encode(find)) < MAX_ASK_BYTES
    assert decode_ask(encode(find)) == find


def test_only_who_holds_a_lease_gives_it_back(net: Net) -> None:
    inquiry = net.ask()
    net.run()
    loan = inquiry.loan
    assert loan is not None
    peer = net.peers[A]
    assert peer is not None
    stranger = Return(loan.memory.engine, (Hold(loan.hold.lease, "stranger"),))
    assert peer.server.answer(b"x", encode(stranger)) is None
    assert lent(net, A) == 4


def test_who_compares_borrows_from_who_has_checksums() -> None:
    net = Net(verify=True)
    net.peers[A] = Peer(net, "aa" * 16, KEYS)
    net.peers[B] = Peer(net, "bb" * 16, KEYS[:2], SUMS)
    net.know(A, B)
    inquiry = net.ask()
    net.run(A)
    net.pass_time(LONGER_SECONDS)
    assert inquiry.loan is not None
    assert (inquiry.loan.address, inquiry.loan.sums) == (B, (SUMS, SUMS))
    assert lent(net, A) == 0
    assert net.failures == ["remote_verify"]
    assert "give it remote.verify as well" in net.sentences[0]
    net.ask()
    assert {address for address, _ in net.asks} == {B}
    net.run()
    net.pass_time(USELESS_SECONDS + 1)  # it may have been given it meanwhile
    net.run()
    net.ask()
    assert {address for address, _ in net.asks} == {A, B}


def test_who_does_not_compare_borrows_from_either() -> None:
    net = Net()
    net.peers[A] = Peer(net, "aa" * 16, KEYS, SUMS)
    net.know(A)
    inquiry = net.ask()
    net.run()
    assert inquiry.loan is not None
    assert (inquiry.loan.chunks, inquiry.loan.sums) == (len(KEYS), ())
    assert not net.failures


@pytest.mark.parametrize("sums", [b"short", SUMS + SUMS])
def test_other_checksums_are_not_borrowed_with(sums: bytes) -> None:
    net = Net(verify=True)
    net.peers[A] = Peer(net, "aa" * 16, KEYS, sums)
    net.know(A)
    inquiry = net.ask()
    net.run()
    assert inquiry.state is InquiryState.OVER
    assert lent(net, A) == 0
    assert net.failures == ["remote_message"]


def test_the_longest_answer_fits() -> None:
    width = SUM_BYTES * MAX_RANKS * MAX_GROUPS
    shelf: Shelf[object] = Shelf(MAX_KEYS * MAX_GROUPS)
    hashes = tuple(i.to_bytes(32, "big") for i in range(MAX_KEYS))
    for i, key in enumerate(hashes):
        slots = tuple((1 << 30) + MAX_GROUPS * i + group for group in range(MAX_GROUPS))
        shelf.offer(key, slots, key, bytes(width))
    lender = ChunkLender(shelf, LeaseTable(SECONDS, GRACE, 8), lambda: 0.0)
    found = lender.find(Find(1, "aa" * 16, "h", b"", hashes), 1)
    assert isinstance(found, Found)
    assert 0 < len(found.sums) == len(found.slots[0]) < MAX_KEYS
    assert shelf.lent_slots == MAX_GROUPS * len(found.sums)
    assert len(encode(found)) < MAX_ANSWER_BYTES
    assert decode_answer(encode(found)) == found


@given(
    st.lists(
        st.binary(max_size=200)
        | st.builds(
            lambda n, c, sums: encode(
                Found(finding._FIRST_NUMBER + n, n, 30.0, 1, (tuple(range(c)),), tuple(sums))
            ),
            st.integers(0, 9),
            st.integers(0, 9),
            st.lists(st.sampled_from([SUMS, b""]), max_size=9),
        )
        | st.builds(
            lambda n: encode(Met(finding._FIRST_NUMBER + n, "dd" * 16, 1, (memory(),))),
            st.integers(0, 9),
        ),
        max_size=12,
    ),
    st.booleans(),
)
def test_whatever_a_peer_says_nothing_breaks(said: list[bytes], verify: bool) -> None:
    net = Net(verify=verify)
    net.peers[A] = Peer(net, "aa" * 16, KEYS[:4])
    net.know(A)
    inquiry = net.ask()
    for data in said:
        with contextlib.suppress(MessageError):
            net.finder.heard(A, decode_answer(data))
    net.pass_time(FIND_SECONDS + MEET_SECONDS)
    assert inquiry.state is not InquiryState.ASKING
    if inquiry.loan is not None:
        assert inquiry.loan.chunks <= len(KEYS)
        assert inquiry.loan.sums == (SUMS,) * (inquiry.loan.chunks if verify else 0)
    net.run()
    net.pass_time(60)
    net.run()


@given(st.binary(max_size=300))
def test_whatever_an_engine_is_asked_nothing_breaks(data: bytes) -> None:
    net = Net()
    peer = Peer(net, "aa" * 16, KEYS)
    for message in (data, bytes((1,)) + data):
        peer.server.answer(b"x", message)
    assert peer.shelf.lent_slots == 0


def test_many_keys_count_as_many_messages() -> None:
    net = Net()
    peer = Peer(net, "aa" * 16, KEYS)
    find = encode(Find(1, "aa" * 16, "h", b"", tuple([b"x" * 32] * MAX_KEYS)))
    answers = [peer.server.answer(b"x", find) for _ in range(int(serving.BURST) // 10)]
    assert answers[0] is not None
    assert answers[-1] is None
