# SPDX-License-Identifier: Apache-2.0
"""Questions for chunks between agents: real sockets and threads, no scheduler."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.unit.remote._wire import IDENTITY, OFFER
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.agent import RemoteAgent, RemoteSettings
from vllm_tiered_kv.remote.channel import ControlSockets
from vllm_tiered_kv.remote.handoff import State
from vllm_tiered_kv.remote.inquiry import Inquiry, InquiryState
from vllm_tiered_kv.remote.keys import FleetKey
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, RankLayout, SlotLayout, Strip
from vllm_tiered_kv.remote.messages import VERSION, Reason, Refused, encode
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.transport import Endpoint, Region

KEY = keys.generate()
HASHES = [bytes([i]) * 32 for i in range(5)]
BASE = 1 << 20


def layout(per_slot: int) -> RankLayout:
    strip = Strip("layer.0", BASE, 1024, 1024, True)
    pages = GroupLayout("contents", 16, 1, 64, Heads(0, 1, 1), (strip,))
    there = Strip("layer.0", BASE, 4096, 1024, True, 1024)
    slots = GroupLayout("contents", 16, 1, 64, Heads(0, 1, 1), (there,), per_slot)
    return RankLayout(0, (pages,), SlotLayout(BASE, 4096, (slots,)))


class Engine:
    """An agent that lends, and asks these."""

    def __init__(
        self,
        *peers: Address,
        key: FleetKey = KEY,
        port: int = 0,
        per_slot: int = 2,
        hands_over: bool = False,
    ) -> None:
        settings = RemoteSettings(
            1, 30.0, 64, key.sealing, sends=hands_over, receives=hands_over, lends=16, peers=peers
        )
        sockets = ControlSockets(key, Address("127.0.0.1", port))
        self.agent = RemoteAgent(settings, sockets)
        endpoint = Endpoint("ab" * 16, b"metadata", (Region(BASE, 1 << 18),))
        self.agent.remember(layout(per_slot), endpoint)
        self.agent.identify(IDENTITY)
        assert self.agent.address is not None
        self.address = self.agent.address

    def store(self, count: int) -> None:
        assert self.agent.shelf is not None
        for i, key in enumerate(HASHES[:count]):
            self.agent.shelf.offer(key, (i,), key)

    @property
    def lent(self) -> int:
        assert self.agent.shelf is not None
        return self.agent.shelf.lent_slots

    def ask(self) -> Inquiry:
        inquiry = self.agent.ask(HASHES, b"")
        until(lambda: inquiry.state is not InquiryState.ASKING)
        return inquiry

    def finds(self) -> Inquiry:
        """Ask until something is found."""
        asked: list[Inquiry] = []

        def found() -> bool:
            asked.append(self.ask())
            return asked[-1].state is InquiryState.FOUND

        until(found)
        return asked[-1]


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def one(*args: Address, **kwargs: object) -> Engine:
        made.append(Engine(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for engine in made:
        engine.agent.shutdown()


def test_what_a_peer_has_is_lent_and_given_back(make: Callable[..., Engine]) -> None:
    lender = make()
    lender.store(3)
    asker = make(lender.address)
    inquiry = asker.finds()
    assert inquiry.loan is not None
    assert inquiry.loan.slots == ((0, 1, 2),)
    assert lender.lent == 3
    asker.agent.give_back(inquiry)
    until(lambda: lender.lent == 0)
    assert not asker.agent.take_failures()
    assert not lender.agent.take_failures()


def test_a_name_stands_for_engines_and_an_engine_leaves_itself_out(
    make: Callable[..., Engine],
) -> None:
    lender = make()
    lender.store(2)
    asker = make(Address("localhost", lender.address.port), lender.address)
    assert asker.finds().loan is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = make(Address("127.0.0.1", port), port=port)
    alone.store(3)
    until(lambda: alone.agent._server.decoded > 0)
    assert alone.ask().state is InquiryState.OVER
    assert not alone.agent.take_failures()


def test_a_peer_that_restarts_is_found_again(make: Callable[..., Engine]) -> None:
    lender = make()
    lender.store(2)
    asker = make(lender.address)
    first = asker.finds()
    lender.agent.shutdown()
    again = make(port=lender.address.port)
    again.store(4)
    asker.agent.give_back(first)
    inquiry = asker.finds()
    assert inquiry.loan is not None
    assert inquiry.loan.chunks == 4
    assert inquiry.loan.memory.engine == again.agent.engine


def test_who_has_another_key_is_neither_asked_nor_answered(make: Callable[..., Engine]) -> None:
    lender = make()
    lender.store(3)
    stranger = make(lender.address, key=keys.generate())
    until(lambda: any(peer.failures for peer in list(stranger.agent._finder._peers.values())))
    assert stranger.ask().state is InquiryState.OVER
    assert lender.agent._server.decoded == 0


def test_other_chunks_are_refused(make: Callable[..., Engine]) -> None:
    lender = make(per_slot=4)
    lender.store(3)
    asker = make(lender.address)
    failures: list[str] = []

    def refused() -> bool:
        failures.extend(asker.agent.take_failures())
        return bool(failures)

    until(refused)
    assert failures == ["remote_pages"]
    assert asker.ask().state is InquiryState.OVER


def test_after_a_reset_nothing_is_asked_and_nothing_lent(make: Callable[..., Engine]) -> None:
    lender = make()
    lender.store(3)
    asker = make(lender.address)
    asker.agent.give_back(asker.finds())
    lender.agent.close("its caches were reset")
    until(lambda: asker.ask().state is InquiryState.OVER)
    asker.agent.close("its caches were reset")
    assert asker.ask().state is InquiryState.OVER


OTHER_VERSIONS = [
    bytes((VERSION + 1,)) + b"whatever",
    encode(Refused(0, Reason.VERSION, "this engine speaks another version")),
]


@pytest.mark.parametrize("answer", OTHER_VERSIONS, ids=["of it", "says so"])
def test_who_speaks_another_version_is_not_asked(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    lender = make()
    lender.store(3)
    monkeypatch.setattr(lender.agent._server, "answer", lambda *_: answer)
    asker = make(lender.address)
    failures: list[str] = []
    until(lambda: bool(failures.extend(asker.agent.take_failures()) or failures))
    assert failures == ["remote_version"]
    assert asker.ask().state is InquiryState.OVER


def test_what_cannot_be_read_is_counted_once(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    lender = make()
    monkeypatch.setattr(lender.agent._server, "answer", lambda *_: bytes((VERSION,)) + b"what?")
    asker = make(lender.address)
    failures: list[str] = []
    until(lambda: bool(failures.extend(asker.agent.take_failures()) or failures))
    assert failures == ["remote_message"]


def test_a_peer_that_is_asked_no_more_may_still_hand_over(make: Callable[..., Engine]) -> None:
    a = make(hands_over=True)
    b = make(a.address, hands_over=True)
    a.store(1)
    b.finds()
    until(lambda: a.agent.sends)
    offered = a.agent.promise(OFFER.tokens, b"p" * 32)
    assert offered is not None
    a.agent.settle(offered[0].lease, OFFER)
    handoff = b.agent.open(offered[1])
    until(lambda: handoff.state is State.GRANTED)
    b.agent._errands.insist(b.agent._finder.know, ())
    until(lambda: a.address not in b.agent._finder)
    b.ask()
    assert b.agent.take_gone() == []
    b.agent.release(handoff)
