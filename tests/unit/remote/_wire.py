# SPDX-License-Identifier: Apache-2.0
"""A producer and a consumer with a wire between them that can be cut, and a clock."""

from __future__ import annotations

import itertools

from vllm_tiered_kv.remote.asking import Client
from vllm_tiered_kv.remote.facts import IdentityFacts
from vllm_tiered_kv.remote.handoff import Handoff
from vllm_tiered_kv.remote.leases import LeaseTable
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, RankLayout, Strip
from vllm_tiered_kv.remote.messages import Identity, RankMemory, decode_answer
from vllm_tiered_kv.remote.options import Address
from vllm_tiered_kv.remote.serving import Offer, Server
from vllm_tiered_kv.remote.ticket import VERSION, Ticket
from vllm_tiered_kv.remote.transport import Endpoint, Region

SECONDS, GRACE = 30.0, 5.0
IDENTITY = Identity("a" * 32, "b" * 32)
FACTS = IdentityFacts((("dtype", "float16"), ("rope.theta", "1e4")), (("device", "cpu"),))
ADDRESS = Address("10.0.0.5", 7600)
OFFER = Offer(100, ((4, 5, 6, 7),))


def memory(rank: int = 0, base: int = 1 << 20) -> RankMemory:
    endpoint = Endpoint(f"{rank:032x}", b"metadata", (Region(base, 1 << 16),))
    strip = Strip("layer.0", base, 1024, 1024, True)
    group = GroupLayout("contents", 16, 1, 64, Heads(0, 1, 1), (strip,))
    return RankMemory(rank, endpoint, RankLayout(rank, (group,)))


class Producer:
    """A server, and what it was made of."""

    def __init__(self, wire: Wire, engine: str = "11" * 16) -> None:
        self.engine = engine
        self.leases = LeaseTable(SECONDS, GRACE, 8)
        self.server = Server(engine, 1, self.leases, lambda: wire.now, wire.count)
        self.server.identify(IDENTITY, FACTS)
        self.server.remember(memory())
        self._numbers = itertools.count(1)

    def offer(self, offer: Offer = OFFER) -> Ticket:
        ticket = self.promise(offer.tokens)
        self.server.settle(ticket.lease, offer)
        return ticket

    def promise(self, tokens: int = OFFER.tokens) -> Ticket:
        lease = next(self._numbers)
        self.server.promise(lease)
        return Ticket(VERSION, self.engine, ADDRESS.host, ADDRESS.port, lease, tokens, b"p" * 32)


class Wire:
    """Carries what a client asks to the producer at :data:`ADDRESS`, and its answers back."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.failures: list[str] = []
        self.sentences: list[str] = []
        self.producer: Producer | None = Producer(self)
        self.refusal: str | None = None
        self.client = Client(
            self._send, self._close, lambda _: self.refusal, lambda: self.now, self.count
        )
        self.client.identify(IDENTITY, FACTS)
        self.asks: list[bytes] = []
        """On their way to the producer."""
        self.answers: list[bytes] = []
        """On their way back."""
        self.closed: list[Address] = []
        self._holders = itertools.count(1)

    def count(self, kind: str, sentence: str) -> None:
        self.failures.append(kind)
        self.sentences.append(sentence)

    def open(self, ticket: Ticket) -> Handoff:
        handoff = Handoff(ticket, f"consumer.{next(self._holders)}")
        self.client.open(handoff)
        return handoff

    def run(self) -> None:
        """Deliver everything, both ways, until nothing is on its way."""
        while self.asks or self.answers:
            self.to_producer()
            self.to_client()

    def to_producer(self) -> None:
        asks, self.asks = self.asks, []
        for data in asks:
            answer = self.producer.server.answer(b"peer", data) if self.producer else None
            if answer is not None:
                self.answers.append(answer)

    def to_client(self) -> None:
        answers, self.answers = self.answers, []
        for data in answers:
            self.client.heard(ADDRESS, decode_answer(data))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.client.tick()

    def _send(self, address: Address, data: bytes) -> bool:
        assert address == ADDRESS
        self.asks.append(data)
        return True

    def _close(self, address: Address) -> None:
        self.closed.append(address)
