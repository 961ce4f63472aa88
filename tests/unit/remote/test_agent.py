# SPDX-License-Identifier: Apache-2.0
"""The agent: real sockets and threads, with the scheduler's part played by the tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tests.unit.remote._wire import IDENTITY, OFFER, memory
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.agent import GRACE, RemoteAgent, RemoteSettings
from vllm_tiered_kv.remote.channel import ControlSockets
from vllm_tiered_kv.remote.handoff import Handoff, PeerMemory, State
from vllm_tiered_kv.remote.keys import FleetKey
from vllm_tiered_kv.remote.memory import Heads, RankLayout
from vllm_tiered_kv.remote.messages import MAX_ASK_BYTES, VERSION
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.ticket import TicketError
from vllm_tiered_kv.worker.remote.plan import plan_routes

LEASE = 30.0
PROOF = b"p" * 32
KEY = keys.generate()


class Clock:
    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Engine:
    """An agent and its clock."""

    def __init__(self, key: FleetKey = KEY, *, sends: bool = False, port: int = 0) -> None:
        self.clock = Clock()
        settings = RemoteSettings(1, LEASE, 4, key.sealing, sends=sends, receives=not sends)
        address = Address("127.0.0.1", port) if sends else None
        self.agent = RemoteAgent(settings, ControlSockets(key, address), self.clock)
        self.agent.identify(IDENTITY)
        mine = memory()
        self.agent.remember(mine.layout, mine.endpoint if sends else None)
        if sends:
            until(lambda: self.agent.sends)

    def offer(self) -> str:
        offered = self.agent.promise(OFFER.tokens, PROOF)
        assert offered is not None
        self.agent.settle(offered[0].lease, OFFER)
        return offered[1]

    def pass_time(self, seconds: float) -> None:
        """After the agent has come to all that was said to it."""
        come_to: list[int] = []
        self.agent._errands.insist(come_to.append, 1)
        until(lambda: bool(come_to))
        self.clock.ahead += seconds

    def failures(self) -> list[str]:
        return self.agent.take_failures()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ended(handoff: Handoff) -> bool:
    return handoff.state is not State.ASKING


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def one(*args: object, **kwargs: object) -> Engine:
        made.append(Engine(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for engine in made:
        engine.agent.shutdown()


@pytest.fixture
def producer(make: Callable[..., Engine]) -> Engine:
    return make(sends=True)


@pytest.fixture
def consumer(make: Callable[..., Engine]) -> Engine:
    return make()


def test_a_hand_over(producer: Engine, consumer: Engine) -> None:
    handoff = consumer.agent.open(producer.offer())
    until(lambda: ended(handoff))
    assert handoff.state is State.GRANTED
    assert handoff.granted is not None
    assert handoff.granted.blocks == OFFER.blocks
    assert handoff.granted.memory.engine == producer.agent.engine
    assert handoff.ticket.proof == PROOF
    consumer.agent.release(handoff)
    freed: list[int] = []
    until(lambda: bool(freed.extend(producer.agent.take_freed()) or freed))
    assert freed == [handoff.ticket.lease]
    assert producer.agent.leases == 0
    assert producer.failures() == consumer.failures() == []


def test_an_offer_is_known_before_anybody_can_ask_for_it(
    producer: Engine, consumer: Engine
) -> None:
    for _ in range(50):
        handoff = consumer.agent.open(producer.offer())
        until(lambda h=handoff: ended(h))  # type: ignore[misc]
        assert handoff.state is State.GRANTED
        consumer.agent.release(handoff)
        until(lambda: bool(producer.agent.take_freed()))


def test_leases_end_by_themselves(producer: Engine, consumer: Engine) -> None:
    handoff = consumer.agent.open(producer.offer())
    producer.offer()
    until(lambda: ended(handoff))
    consumer.agent.shutdown()
    producer.pass_time(LEASE + GRACE)
    freed: list[int] = []
    until(lambda: len(freed.extend(producer.agent.take_freed()) or freed) == 2)


def test_no_more_is_offered_than_was_said(producer: Engine) -> None:
    for _ in range(4):
        producer.offer()
    assert producer.agent.promise(OFFER.tokens, PROOF) is None
    producer.pass_time(LEASE)
    until(lambda: bool(producer.agent.take_freed()))
    assert producer.agent.promise(OFFER.tokens, PROOF) is not None


def test_a_ticket_of_another_fleet(make: Callable[..., Engine], producer: Engine) -> None:
    stranger = make(keys.generate())
    with pytest.raises(TicketError):
        stranger.agent.open(producer.offer())


def test_nobody_there(producer: Engine, consumer: Engine) -> None:
    ticket = producer.offer()
    producer.agent.shutdown()
    handoff = consumer.agent.open(ticket)
    until(lambda: ended(handoff))
    assert handoff.state is State.OVER
    assert consumer.failures() == ["remote_unanswered"]


def test_a_producer_restarts_at_its_address(
    make: Callable[..., Engine], producer: Engine, consumer: Engine
) -> None:
    first = consumer.agent.open(producer.offer())
    until(lambda: ended(first))
    old = producer.offer()
    assert producer.agent.address is not None
    producer.agent.shutdown()
    again = make(sends=True, port=producer.agent.address.port)
    stale = consumer.agent.open(old)
    until(lambda: ended(stale))
    assert stale.state is State.OVER
    consumer.pass_time(60)  # the address is asked again
    fresh = consumer.agent.open(again.offer())
    until(lambda: ended(fresh))
    assert fresh.state is State.GRANTED
    assert producer.agent.engine in consumer.agent.take_gone()


def test_after_the_end_nothing_is_offered_or_accepted(producer: Engine, consumer: Engine) -> None:
    ticket = producer.offer()
    producer.agent.close("a reset")
    assert not producer.agent.sends
    assert producer.agent.promise(OFFER.tokens, PROOF) is None
    until(lambda: bool(producer.agent.take_freed()))
    handoff = consumer.agent.open(ticket)
    until(lambda: ended(handoff))
    assert handoff.state is State.OVER
    consumer.agent.close("a reset")
    assert not consumer.agent.receives


def test_without_the_key_nothing_is_decoded(
    make: Callable[..., Engine], producer: Engine, consumer: Engine
) -> None:
    address = producer.agent.address
    assert address is not None
    stranger = ControlSockets(keys.generate(), None)
    try:
        for _ in range(20):
            stranger.ask(address, bytes((VERSION,)) + b"x" * 100)
        handoff = consumer.agent.open(producer.offer())
        until(lambda: ended(handoff))
        decoded = producer.agent._server.decoded
        assert decoded == 2  # a hello and a take
        for _ in range(20):
            stranger.wait(0.01, lambda: None)
        assert producer.agent._server.decoded == decoded
    finally:
        stranger.close()


def test_with_the_key_nonsense_is_counted_and_the_channel_lives(
    producer: Engine, consumer: Engine
) -> None:
    address = producer.agent.address
    assert address is not None
    insider = ControlSockets(KEY, None)
    try:
        for size in (0, 1, 100, MAX_ASK_BYTES - 1):
            insider.ask(address, bytes((VERSION,)) + b"\xc1" * size)
        handoff = consumer.agent.open(producer.offer())
        until(lambda: ended(handoff))
        assert handoff.state is State.GRANTED
        until(lambda: "remote_message" in producer.failures())
    finally:
        insider.close()


def test_what_is_said_costs_the_scheduler_no_wait(producer: Engine) -> None:
    """Nothing that the scheduler calls takes a lock that the agent's thread may hold."""
    agent = producer.agent
    stuck = Stuck(agent)
    agent._errands.insist(stuck.hold)
    until(lambda: stuck.is_held)
    try:
        assert agent.promise(OFFER.tokens, PROOF) is not None
        agent.take_freed()
        agent.take_failures()
        agent.take_gone()
        agent.close("over")
    finally:
        stuck.is_held = False


class Stuck:
    """Occupies the agent's thread."""

    def __init__(self, agent: RemoteAgent) -> None:
        self.is_held = False

    def hold(self) -> None:
        self.is_held = True
        deadline = time.monotonic() + 20
        while self.is_held and time.monotonic() < deadline:
            time.sleep(0.002)


def test_an_error_in_the_agent_is_counted_and_the_rest_goes_on(
    producer: Engine, consumer: Engine
) -> None:
    def wrong() -> None:
        raise RuntimeError("injected")

    producer.agent._errands.insist(wrong)
    handoff = consumer.agent.open(producer.offer())
    until(lambda: ended(handoff))
    assert handoff.state is State.GRANTED
    assert producer.failures() == ["internal"]


def test_a_producer_that_speaks_another_version_is_said(
    producer: Engine, consumer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = bytes((VERSION + 1,)) + b"whatever"
    monkeypatch.setattr(producer.agent._server, "answer", lambda *_: other)
    handoff = consumer.agent.open(producer.offer())
    until(lambda: ended(handoff))
    assert f"version {VERSION + 1}" in handoff.reason
    assert consumer.failures() == ["remote_version"]


def test_pages_are_held_against_ours_also_when_ours_become_known_later(
    producer: Engine, consumer: Engine
) -> None:
    handoff = consumer.agent.open(producer.offer())
    until(lambda: handoff.state is State.GRANTED)
    (group,) = memory().layout.groups
    ours = msgspec.structs.replace(group, entry_tokens=32)
    consumer.agent.remember(RankLayout(0, (ours,)), None)
    until(lambda: handoff.state is State.OVER)
    assert "blocks of 16 and of 32 tokens" in handoff.reason
    consumer.agent.release(handoff)
    until(lambda: bool(producer.agent.take_freed()))


def test_a_layout_that_cannot_be_computed_with_is_refused(consumer: Engine) -> None:
    (group,) = memory().layout.groups
    ours = msgspec.structs.replace(group, heads=Heads(1, 1, 2))
    strip = msgspec.structs.replace(group.strips[0], address=(1 << 63) - 1, entry_bytes=2048)
    theirs = msgspec.structs.replace(group, heads=Heads(0, 2, 2), strips=(strip,))
    consumer.agent._layouts[0] = RankLayout(0, (ours,))
    rank = msgspec.structs.replace(memory(), layout=RankLayout(0, (theirs,)))
    why = consumer.agent._refusal(plan_routes, PeerMemory("11" * 16, 1, (rank,)))
    assert why is not None
    assert "makes no sense" in why
