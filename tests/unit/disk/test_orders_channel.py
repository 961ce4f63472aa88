# SPDX-License-Identifier: Apache-2.0
"""What agent and ranks say to each other: its encoding, its bounds, and the sockets between."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
import zmq
from hypothesis import given

from vllm_tiered_kv.protocol import Direction, JobResult, JobStatus
from vllm_tiered_kv.tiers.disk.channel import AgentSockets, RankSockets
from vllm_tiered_kv.tiers.disk.format import ChunkFacts
from vllm_tiered_kv.tiers.disk.orders import (
    MAX_ORDERS,
    CancelReads,
    Hello,
    OpenFolder,
    Order,
    OrderResult,
    Orders,
    Outcome,
    Part,
    RankReport,
    ReadOrder,
    WriteOrder,
    decode_orders,
    decode_report,
    encode,
)

KEY = bytes(range(32))
HELLO = Hello((4096,))
FACTS = ChunkFacts((KEY,), 1, 0, 16)
numbers = st.integers(0, 1 << 40)
keys = st.binary(min_size=1, max_size=96)
parts = st.lists(st.builds(Part, numbers, numbers), min_size=1, max_size=64).map(tuple)
orders = st.one_of(
    st.builds(OpenFolder, st.text(max_size=50), st.text(max_size=50), st.booleans()),
    st.builds(
        WriteOrder,
        numbers,
        keys,
        parts,
        st.builds(ChunkFacts, st.lists(keys, max_size=3).map(tuple), numbers, numbers, numbers),
        numbers,
    ),
    st.builds(ReadOrder, numbers, keys, parts, st.floats(0, 3600)),
    st.builds(CancelReads, st.lists(numbers, max_size=MAX_ORDERS).map(tuple)),
)
results = st.builds(
    OrderResult,
    numbers,
    st.sampled_from(Outcome),
    numbers,
    st.lists(numbers, max_size=4).map(tuple),
    st.floats(0, 1e6),
    st.text(max_size=64),
)


@given(st.lists(orders, max_size=4).map(tuple))
def test_orders_survive_their_encoding(some: tuple[Order, ...]) -> None:
    assert decode_orders(encode(Orders(some))) == Orders(some)


@given(st.builds(RankReport, numbers, st.lists(results, max_size=4).map(tuple)))
def test_a_report_survives_its_encoding(report: RankReport) -> None:
    assert decode_report(encode(report)) == report


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    for decode, kind in ((decode_orders, Orders), (decode_report, RankReport)):
        try:
            assert isinstance(decode(data), kind)
        except msgspec.DecodeError:
            continue


@pytest.mark.parametrize(
    "order",
    [
        ReadOrder(-1, KEY, (Part(0, 0),), 1.0),
        ReadOrder(1, b"", (Part(0, 0),), 1.0),
        ReadOrder(1, bytes(97), (Part(0, 0),), 1.0),
        ReadOrder(1, KEY, (), 1.0),
        ReadOrder(1, KEY, (Part(-1, 0),), 1.0),
        ReadOrder(1, KEY, (Part(0, 0),), -1.0),
        ReadOrder(1, KEY, (Part(0, 0),) * 65, 1.0),
        CancelReads((1,) * (MAX_ORDERS + 1)),
        OpenFolder("x" * 5000, "space", True),
    ],
)
def test_what_is_out_of_bounds_is_refused(order: Order) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_orders(encode(Orders((order,))))


# -- sockets -------------------------------------------------------------------------------


@pytest.fixture
def agent() -> Iterator[AgentSockets]:
    sockets = AgentSockets()
    yield sockets
    sockets.close()


@pytest.fixture
def connect(agent: AgentSockets) -> Iterator[Callable[..., RankSockets]]:
    made: list[RankSockets] = []

    def one(rank: int = 0, secret: bytes | None = None, hello: Hello = HELLO) -> RankSockets:
        addresses = (agent.reports_address, agent.orders_address)
        made.append(RankSockets(rank, *addresses, secret or agent.secret, hello))
        return made[-1]

    yield one
    for sockets in made:
        sockets.close()


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (got := what()):
        assert time.monotonic() < deadline
    return got


def test_orders_go_to_their_rank_and_reports_come_back(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    ranks = [connect(0), connect(1)]
    until(lambda: agent.wait(0.01) is not None and agent.ranks == 2)
    for rank in (0, 1):
        assert agent.send(rank, [CancelReads((rank,))])
    assert [until(lambda r=r: r.receive(0.1)) for r in ranks] == [
        (CancelReads((0,)),),
        (CancelReads((1,)),),
    ]
    report = RankReport(1, (), (JobResult(3, Direction.STORE, JobStatus.DONE),))
    assert ranks[1].send(report)
    assert until(lambda: agent.wait(0.1)) == [report]


def test_a_rank_that_was_never_heard_of_cannot_be_reached(agent: AgentSockets) -> None:
    assert not agent.send(0, [CancelReads((1,))])


def test_a_rank_that_comes_anew_takes_its_place(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    connect(0)
    until(lambda: agent.wait(0.01) is not None and agent.hellos == 1)
    anew = connect(0)
    until(lambda: agent.wait(0.01) is not None and agent.hellos == 2)
    assert agent.ranks == 1
    assert agent.send(0, [CancelReads((5,))])
    assert until(lambda: anew.receive(0.1)) == (CancelReads((5,)),)


def test_who_lacks_the_secret_is_not_heard(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    stranger = connect(0, secret=bytes(16))
    stranger.send(RankReport(0))
    until(lambda: agent.wait(0.01) == [] and agent.malformed == 2)
    assert agent.ranks == 0
    assert not agent.send(0, [CancelReads((1,))])


def test_a_rank_says_what_its_parts_take(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    for rank, hello in enumerate([Hello((4096, 0)), Hello((1 << 40,) * 64)]):
        connect(rank, hello=hello)
    until(lambda: agent.wait(0.01) is not None and agent.ranks == 2)
    assert agent.said == {0: Hello((4096, 0)), 1: Hello((1 << 40,) * 64)}


def test_a_hello_that_is_none_is_counted(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    for hello in (Hello((1,) * 65), Hello((-1,))):
        connect(hello=hello)
    until(lambda: agent.wait(0.01) == [] and agent.malformed == 2)
    assert agent.ranks == 0


def test_a_message_without_end_is_refused(agent: AgentSockets) -> None:
    """Arrays in arrays, beyond what is understood of a report."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(agent.reports_address)
        socket.send(agent.secret + b"\x94\x00\x90\x90" + b"\x91" * 60_000)
        socket.send(agent.secret + encode(RankReport(7)))
        assert until(lambda: agent.wait(0.01)) == [RankReport(7)]
    assert agent.malformed == 1


def test_what_is_no_report_is_counted(agent: AgentSockets) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(agent.reports_address)
        socket.send(agent.secret + b"\xc1")
        socket.send(b"")
        until(lambda: agent.wait(0.01) == [] and agent.malformed == 2)


def test_a_message_that_a_rank_would_refuse_is_not_sent(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    rank = connect(0)
    until(lambda: agent.wait(0.01) is not None and agent.ranks == 1)
    large = ChunkFacts((KEY,) * 4000, 4000, 0, 64000)
    order = WriteOrder(1, KEY, (Part(0, 0),), large, 0)
    assert not agent.send(0, [order] * MAX_ORDERS)
    assert agent.send(0, [CancelReads((1,))])
    assert until(lambda: rank.receive(0.1)) == (CancelReads((1,)),)


def test_a_message_that_is_no_order_is_passed_over_and_counted(
    agent: AgentSockets, connect: Callable[..., RankSockets]
) -> None:
    rank = connect(0)
    until(lambda: agent.wait(0.01) is not None and agent.ranks == 1)
    assert agent.send(0, [ReadOrder(1, b"", (), 1.0)])
    assert agent.send(0, [CancelReads((1,))])
    assert until(lambda: rank.receive(0.1)) == (CancelReads((1,)),)
    assert rank.malformed == 1


def test_a_wake_up_after_the_end_touches_no_other_file() -> None:
    sockets = AgentSockets()
    sockets.close()
    reused = [os.pipe() for _ in range(8)]
    for reading, _ in reused:
        os.set_blocking(reading, False)
    sockets.wake()
    for reading, writing in reused:
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        os.close(reading)
        os.close(writing)


def test_a_rank_that_is_closed_sends_nothing(connect: Callable[..., RankSockets]) -> None:
    rank = connect(0)
    rank.close()
    assert not rank.send(RankReport(0))
    rank.close()
