# SPDX-License-Identifier: Apache-2.0
"""The control channel: who has the key is heard, who has not is not."""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils import z85

from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.channel import ControlSockets
from vllm_tiered_kv.remote.keys import FleetKey
from vllm_tiered_kv.remote.messages import MAX_ANSWER_BYTES, MAX_ASK_BYTES
from vllm_tiered_kv.remote.options import Address

LOOPBACK = Address("127.0.0.1", 0)
KEY = keys.generate()


class End:
    """Sockets, and all they have heard."""

    def __init__(self, key: FleetKey, listen: Address | None = None) -> None:
        self.sockets = ControlSockets(key, listen)
        self.asks: list[tuple[bytes, bytes]] = []
        self.answers: list[tuple[Address, bytes]] = []

    @property
    def address(self) -> Address:
        assert self.sockets.address is not None
        return self.sockets.address

    def look(self) -> None:
        heard = self.sockets.wait(0.02, lambda: None)
        self.asks += heard.asks
        self.answers += heard.answers


def until(done: Callable[[], bool], *ends: End, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        for end in ends:
            end.look()


@pytest.fixture
def make() -> Iterator[Callable[..., End]]:
    made: list[End] = []

    def one(key: FleetKey = KEY, listen: Address | None = None) -> End:
        made.append(End(key, listen))
        return made[-1]

    yield one
    for end in made:
        end.sockets.close()


def test_a_question_and_its_answer(make: Callable[..., End]) -> None:
    server, client = make(listen=LOOPBACK), make()
    assert server.address.port
    assert client.sockets.ask(server.address, b"question")
    until(lambda: bool(server.asks), server, client)
    peer, data = server.asks[0]
    assert data == b"question"
    assert server.sockets.reply(peer, b"answer")
    until(lambda: bool(client.answers), server, client)
    assert client.answers == [(server.address, b"answer")]
    assert client.sockets.peers == 1
    assert server.sockets.turned_away == 0


def test_two_ways_at_once(make: Callable[..., End]) -> None:
    first, second = make(listen=LOOPBACK), make(listen=LOOPBACK)
    first.sockets.ask(second.address, b"from first")
    second.sockets.ask(first.address, b"from second")
    until(lambda: bool(first.asks and second.asks), first, second)
    assert [data for _, data in first.asks] == [b"from second"]
    assert [data for _, data in second.asks] == [b"from first"]


def _stranger(server: End, public: bytes, secret: bytes, known: bytes) -> zmq.Socket[bytes]:
    """A DEALER with CURVE keys of its own choice."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(known))
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(public))
    dealer.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(secret))
    dealer.connect(server.address.endpoint)
    return dealer


def test_another_key_is_turned_away_though_the_public_half_is_known(
    make: Callable[..., End],
) -> None:
    server, other = make(listen=LOOPBACK), keys.generate()
    stranger = _stranger(server, other.public, other.secret, KEY.public)
    stranger.send(b"let me in")
    until(lambda: server.sockets.turned_away > 0, server)
    friend = make()
    friend.sockets.ask(server.address, b"hello")
    until(lambda: bool(server.asks), server, friend)
    assert [data for _, data in server.asks] == [b"hello"]
    stranger.close(0)


def test_a_claim_to_the_fleets_key_without_its_secret_half(make: Callable[..., End]) -> None:
    server, other = make(listen=LOOPBACK), keys.generate()
    liar = _stranger(server, KEY.public, other.secret, KEY.public)
    liar.send(b"let me in")
    friend = make()
    friend.sockets.ask(server.address, b"hello")
    until(lambda: bool(server.asks), server, friend)
    for _ in range(20):
        server.look()
    assert [data for _, data in server.asks] == [b"hello"]
    liar.close(0)


def test_no_encryption_no_entry(make: Callable[..., End]) -> None:
    server = make(listen=LOOPBACK)
    plain = zmq.Context.instance().socket(zmq.DEALER)
    plain.setsockopt(zmq.LINGER, 0)
    plain.connect(server.address.endpoint)
    plain.send(b"let me in")
    friend = make()
    friend.sockets.ask(server.address, b"hello")
    until(lambda: bool(server.asks), server, friend)
    for _ in range(20):
        server.look()
    assert [data for _, data in server.asks] == [b"hello"]
    plain.close(0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 4096,
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x04\xc8\x05HELLO" + bytes(194),
        GREETING + b"CURVE".ljust(20, b"\0") + bytes(32) + b"\x06" + b"\xff" * 8,
        GREETING + b"NULL".ljust(20, b"\0") + bytes(32) + b"\x04\x06\x05READY",
        GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"\x04\x08\x05HELLO\x00\x00",
        *(os.urandom(700) for _ in range(8)),
    ],
)
def test_bytes_of_all_kinds_are_heard_by_nobody(make: Callable[..., End], data: bytes) -> None:
    server, friend = make(listen=LOOPBACK), make()
    with socket.create_connection((server.address.host, server.address.port), 5) as raw:
        raw.sendall(data)
        friend.sockets.ask(server.address, b"hello")
        until(lambda: bool(server.asks), server, friend)
    for _ in range(5):
        server.look()
    assert [said for _, said in server.asks] == [b"hello"]


def test_a_message_that_is_too_large_ends_the_connection_alone(make: Callable[..., End]) -> None:
    server, client, other = make(listen=LOOPBACK), make(), make()
    client.sockets.ask(server.address, b"x" * (MAX_ASK_BYTES + 1))
    other.sockets.ask(server.address, b"hello")
    until(lambda: bool(server.asks), server, client, other)
    assert [data for _, data in server.asks] == [b"hello"]


def test_a_message_of_several_parts_is_counted(make: Callable[..., End]) -> None:
    server, client = make(listen=LOOPBACK), make()
    client.sockets.ask(server.address, b"one")
    client.sockets._peers[server.address].send_multipart([b"two", b"parts"])
    client.sockets.ask(server.address, b"three")
    until(lambda: len(server.asks) == 2, server, client)
    assert server.sockets.malformed == 1


def test_a_server_that_comes_later_and_comes_back(make: Callable[..., End]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        address = Address("127.0.0.1", place.getsockname()[1])
    client = make()
    assert client.sockets.ask(address, b"early")
    server = make(listen=address)
    until(lambda: bool(server.asks), server, client)
    server.sockets.close()
    again = make(listen=address)

    def heard() -> bool:
        client.sockets.ask(address, b"late")
        return bool(again.asks)

    until(heard, again, client)


class Endless:
    """A socket of a peer that says large things and does not stop."""

    def recv_multipart(self, flags: int) -> list[bytes]:
        assert flags == zmq.NOBLOCK
        return [bytes(MAX_ANSWER_BYTES // 2)]


def test_a_few_large_messages_are_taken_at_a_time(make: Callable[..., End]) -> None:
    assert len(make().sockets._receive(Endless())) == 2  # type: ignore[arg-type]


def test_names_are_looked_up_where_nobody_else_waits(make: Callable[..., End]) -> None:
    sockets = make(listen=LOOPBACK).sockets
    for host in ("127.0.0.1", "::1", "engine.invalid"):
        assert sockets.ask(Address(host, 9), b"question")
    threads = {a.host: s.getsockopt(zmq.AFFINITY) for a, s in sockets._peers.items()}
    assert sockets._server is not None
    others = {threads["127.0.0.1"], threads["::1"], sockets._server.getsockopt(zmq.AFFINITY)}
    assert others == {1}
    assert threads["engine.invalid"] == 2


def test_an_address_that_is_taken_is_an_error(make: Callable[..., End]) -> None:
    server = make(listen=LOOPBACK)
    with pytest.raises(zmq.ZMQError):
        ControlSockets(KEY, server.address)


def test_what_was_said_before_a_message_came_is_known_first(make: Callable[..., End]) -> None:
    server, client = make(listen=LOOPBACK), make()
    client.sockets.ask(server.address, b"question")
    order: list[str] = []
    deadline = time.monotonic() + 10
    while "asked" not in order and time.monotonic() < deadline:
        heard = server.sockets.wait(0.05, functools.partial(order.append, "obeyed"))
        order += ["asked" for _ in heard.asks]
    assert order[-2:] == ["obeyed", "asked"]


def test_waking_also_after_the_end(make: Callable[..., End]) -> None:
    server = make(listen=LOOPBACK)
    server.sockets.wake()
    began = time.monotonic()
    server.sockets.wait(30.0, lambda: None)
    assert time.monotonic() - began < 25
    server.sockets.close()
    server.sockets.wake()
    server.sockets.close()


def test_hanging_up_and_asking_again(make: Callable[..., End]) -> None:
    server, client = make(listen=LOOPBACK), make()
    client.sockets.ask(server.address, b"one")
    client.sockets.hang_up(server.address)
    assert client.sockets.peers == 0
    client.sockets.hang_up(server.address)
    client.sockets.ask(server.address, b"two")
    until(lambda: len(server.asks) == 2, server, client)
