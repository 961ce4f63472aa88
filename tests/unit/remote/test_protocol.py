# SPDX-License-Identifier: Apache-2.0
"""Both sides of the protocol: what is granted, refused, renewed, late and lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.unit.remote._wire import (
    ADDRESS,
    FACTS,
    GRACE,
    IDENTITY,
    OFFER,
    SECONDS,
    Producer,
    Wire,
    memory,
)
from vllm_tiered_kv.remote import serving
from vllm_tiered_kv.remote.asking import (
    ASK_SECONDS,
    COMING_SECONDS,
    IDLE_SECONDS,
)
from vllm_tiered_kv.remote.handoff import Handoff, State
from vllm_tiered_kv.remote.leases import MAX_HOLDERS
from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.remote.messages import (
    VERSION,
    Coming,
    Hello,
    Hold,
    Identity,
    MessageError,
    Met,
    Reason,
    Refused,
    Release,
    Take,
    Welcome,
    decode_answer,
    decode_ask,
    encode,
)
from vllm_tiered_kv.remote.unwilling import MAX_QUIET_SECONDS, QUIET_SECONDS


@pytest.fixture
def wire() -> Wire:
    return Wire()


def granted(wire: Wire) -> Handoff:
    assert wire.producer is not None
    handoff = wire.open(wire.producer.offer())
    wire.run()
    assert handoff.state is State.GRANTED
    return handoff


def freed(wire: Wire) -> list[int]:
    assert wire.producer is not None
    return wire.producer.server.take_freed()


def test_what_was_offered_is_granted_with_its_memory(wire: Wire) -> None:
    handoff = granted(wire)
    assert handoff.granted is not None
    assert handoff.granted.blocks == OFFER.blocks
    assert handoff.granted.memory.ranks == (memory(),)
    assert handoff.valid_until == 1000.0 + SECONDS
    assert not wire.failures


def test_memory_is_asked_for_once(wire: Wire) -> None:
    granted(wire)
    assert wire.producer is not None
    wire.open(wire.producer.offer())
    assert [type(decode_ask(data)) for data in wire.asks] == [Take]


def test_release_frees_at_once(wire: Wire) -> None:
    handoff = granted(wire)
    wire.client.release(handoff)
    wire.run()
    assert freed(wire) == [handoff.ticket.lease]
    assert handoff.state is State.OVER
    wire.client.release(handoff)
    assert wire.asks == []


def test_a_lease_lasts_from_the_question_not_from_the_answer(wire: Wire) -> None:
    assert wire.producer is not None
    handoff = wire.open(wire.producer.offer())
    wire.now += 1.0
    wire.to_producer()
    wire.now += 0.5
    wire.to_client()
    assert handoff.valid_until == 1000.0 + SECONDS
    wire.producer.leases.expire(handoff.valid_until + GRACE)
    assert freed(wire) == []  # the producer's ends later


def test_who_waits_keeps_the_lease(wire: Wire) -> None:
    handoff = granted(wire)
    for _ in range(40):
        wire.pass_time(3.0)
        wire.run()
    assert handoff.state is State.GRANTED
    assert freed(wire) == []
    wire.client.release(handoff)
    wire.run()
    assert freed(wire) == [handoff.ticket.lease]


def test_without_renewals_both_sides_end_it(wire: Wire) -> None:
    handoff = granted(wire)
    for _ in range(12):
        wire.pass_time(3.0)
        wire.asks.clear()
    assert handoff.state is State.OVER
    assert "remote_lease" in wire.failures
    assert freed(wire) == [handoff.ticket.lease]


@pytest.mark.parametrize("renewing", [False, True])
def test_what_was_given_up_is_not_renewed(wire: Wire, renewing: bool) -> None:
    """Its end may be noticed late: an engine that idles is told of it with its next step."""
    handoff = granted(wire)
    if renewing:
        wire.pass_time(SECONDS / 2)
        assert wire.asks
    wire.client.lapse(handoff)
    for _ in range(14):
        wire.run()
        wire.pass_time(3.0)
    assert freed(wire) == [handoff.ticket.lease]
    assert not wire.failures
    wire.client.release(handoff)
    assert wire.asks == []


def test_what_was_given_up_is_given_back_when_no_read_goes_on(wire: Wire) -> None:
    handoff = granted(wire)
    wire.client.lapse(handoff)
    wire.run()
    assert freed(wire) == []
    wire.client.release(handoff)
    wire.run()
    assert freed(wire) == [handoff.ticket.lease]


def test_a_renewal_that_is_refused_ends_it(wire: Wire) -> None:
    handoff = granted(wire)
    assert wire.producer is not None
    wire.producer.server.close("its caches were reset")
    wire.pass_time(SECONDS / 2)
    wire.run()
    assert handoff.state is State.OVER
    assert handoff.valid_until < wire.now  # nor is what is being read accepted


def test_two_who_take_the_same(wire: Wire) -> None:
    assert wire.producer is not None
    ticket = wire.producer.offer()
    first, second = wire.open(ticket), wire.open(ticket)
    wire.run()
    assert first.state is second.state is State.GRANTED
    wire.client.release(first)
    wire.run()
    assert freed(wire) == []
    wire.client.release(second)
    wire.run()
    assert freed(wire) == [ticket.lease]
    third = wire.open(ticket)
    wire.run()
    assert third.state is State.OVER
    assert wire.failures == ["remote_lease"]


# -- what goes wrong -------------------------------------------------------------------


def test_no_answer_ends_in_time_and_the_producer_is_left_alone(wire: Wire) -> None:
    assert wire.producer is not None
    ticket, other = wire.producer.offer(), wire.producer.offer()
    handoff = wire.open(ticket)
    wire.asks.clear()
    wire.pass_time(ASK_SECONDS)
    assert handoff.state is State.OVER
    assert "remote_unanswered" in wire.failures
    again = wire.open(other)
    assert again.state is State.OVER
    assert wire.asks == []
    wire.pass_time(MAX_QUIET_SECONDS)
    once_more = wire.open(other)
    assert once_more.state is State.ASKING
    assert wire.asks


def test_silence_grows_with_each_failure_and_ends_with_an_answer(wire: Wire) -> None:
    silences = []
    for _ in range(8):
        assert wire.producer is not None
        handoff = wire.open(wire.producer.offer())
        assert handoff.state is State.ASKING
        wire.asks.clear()
        wire.pass_time(ASK_SECONDS)
        began = wire.now
        while wire.open(wire.producer.offer()).state is State.OVER:
            wire.now += 0.25
        wire.asks.clear()
        silences.append(wire.now - began)
        wire.producer = Producer(wire)
        wire.pass_time(ASK_SECONDS)
        wire.now += MAX_QUIET_SECONDS
    assert silences == sorted(silences)
    assert silences[0] < 5
    assert silences[-1] <= MAX_QUIET_SECONDS
    granted(wire)
    assert wire.producer is not None
    assert wire.open(wire.producer.offer()).state is State.ASKING


def test_many_questions_that_fail_at_once_are_one_silence(wire: Wire) -> None:
    assert wire.producer is not None
    for _ in range(20):
        wire.open(wire.producer.offer())
    wire.asks.clear()
    wire.pass_time(ASK_SECONDS)
    assert wire.open(wire.producer.offer()).state is State.OVER
    wire.now += 2 * QUIET_SECONDS
    assert wire.open(wire.producer.offer()).state is State.ASKING


def test_a_grant_that_comes_late_is_given_back(wire: Wire) -> None:
    assert wire.producer is not None
    handoff = wire.open(wire.producer.offer())
    wire.to_producer()
    wire.pass_time(ASK_SECONDS)
    assert handoff.state is State.OVER
    wire.to_client()
    assert any(isinstance(decode_ask(data), Release) for data in wire.asks)
    wire.run()
    assert freed(wire) == [handoff.ticket.lease]


def test_who_gives_up_while_asking_gives_back(wire: Wire) -> None:
    assert wire.producer is not None
    handoff = wire.open(wire.producer.offer())
    wire.client.release(handoff)
    wire.run()
    assert freed(wire) == [handoff.ticket.lease]
    assert not wire.failures


def test_a_producer_that_restarted_is_told_apart(wire: Wire) -> None:
    granted(wire)
    old = wire.producer
    assert old is not None
    ticket = old.offer()
    wire.producer = Producer(wire, "22" * 16)
    handoff = wire.open(ticket)
    wire.run()
    assert handoff.state is State.OVER
    assert wire.failures == ["remote_engine"]
    fresh = wire.open(wire.producer.offer())
    wire.run()
    assert fresh.state is State.GRANTED
    assert wire.client.gone == [old.engine]


@pytest.mark.parametrize(
    ("identity", "kind", "word"),
    [
        (Identity("c" * 32, IDENTITY.pages), "remote_semantic", "model"),
        (Identity(IDENTITY.semantic, "c" * 32), "remote_pages", "block size"),
    ],
)
def test_engines_that_differ(wire: Wire, identity: Identity, kind: str, word: str) -> None:
    assert wire.producer is not None
    wire.client.identify(identity)
    handoff = wire.open(wire.producer.offer())
    wire.run()
    assert handoff.state is State.OVER
    assert kind in wire.failures
    assert word in handoff.reason
    assert str(ADDRESS) in handoff.reason


def test_what_differs_is_named_with_both_values(wire: Wire) -> None:
    assert wire.producer is not None
    changes = {"semantic": (("dtype", "bfloat16"), FACTS.semantic[1], ("lora", "on"))}
    ours = msgspec.structs.replace(FACTS, **changes)
    wire.client.identify(Identity("c" * 32, IDENTITY.pages), ours)
    handoff = wire.open(wire.producer.offer())
    wire.run()
    assert "dtype (float16 there, bfloat16 here), lora (nothing there, on here)" in handoff.reason
    assert "rope" not in handoff.reason


def test_who_tells_no_facts_names_no_differences(wire: Wire) -> None:
    assert wire.producer is not None
    wire.producer.server.identify(IDENTITY)
    wire.client.identify(Identity(IDENTITY.semantic, "c" * 32), FACTS)
    handoff = wire.open(wire.producer.offer())
    wire.run()
    assert "pages" in handoff.reason
    assert "nothing there" not in handoff.reason


def test_pages_that_cannot_be_read(wire: Wire) -> None:
    wire.refusal = "blocks of 16 and of 32 tokens"
    assert wire.producer is not None
    for _ in range(2):
        handoff = wire.open(wire.producer.offer())
        wire.run()
        wire.pass_time(ASK_SECONDS)
        wire.run()
        assert handoff.state is State.OVER
        assert wire.refusal in handoff.reason
        assert freed(wire) == [handoff.ticket.lease]


def test_a_producer_whose_ranks_are_not_there_yet(wire: Wire) -> None:
    wire.producer = Producer(wire)
    wire.producer.server._memory.clear()
    handoff = wire.open(wire.producer.offer())
    wire.run()
    assert handoff.state is State.OVER
    assert set(wire.failures) == {"remote_not_ready"}


def test_memory_that_has_moved_is_asked_for_again(wire: Wire) -> None:
    granted(wire)
    assert wire.producer is not None
    wire.producer.server.remember(memory(base=1 << 24))
    handoff = wire.open(wire.producer.offer())
    wire.to_producer()
    wire.to_client()
    assert handoff.state is State.ASKING
    assert [type(decode_ask(data)) for data in wire.asks] == [Hello]
    wire.run()
    assert handoff.state is State.GRANTED
    assert handoff.granted is not None
    assert handoff.granted.memory.ranks == (memory(base=1 << 24),)


def test_memory_that_nobody_tells_of_ends_the_grant(wire: Wire) -> None:
    assert wire.producer is not None
    handoff = wire.open(wire.producer.offer())
    wire.asks = [data for data in wire.asks if isinstance(decode_ask(data), Take)]
    wire.run()
    assert handoff.state is State.ASKING
    wire.pass_time(ASK_SECONDS)
    wire.run()
    assert handoff.state is State.OVER
    assert freed(wire) == [handoff.ticket.lease]


def test_a_grant_of_another_length_is_not_taken(wire: Wire) -> None:
    assert wire.producer is not None
    ticket = msgspec.structs.replace(wire.producer.offer(), tokens=99)
    handoff = wire.open(ticket)
    wire.run()
    assert handoff.state is State.OVER
    assert freed(wire) == [ticket.lease]


def test_too_many_questions_are_not_answered(wire: Wire) -> None:
    assert wire.producer is not None
    ask = encode(Hello(1, wire.producer.engine, IDENTITY))
    answers = [wire.producer.server.answer(b"x", ask) for _ in range(int(serving.BURST) + 10)]
    assert answers.count(None) == 10
    assert wire.producer.server.decoded == serving.BURST
    assert wire.producer.server.answer(b"y", ask) is not None
    wire.now += 1.0
    assert wire.producer.server.answer(b"x", ask) is not None


def test_who_is_not_wanted_is_hung_up_on(wire: Wire) -> None:
    handoff = granted(wire)
    wire.client.release(handoff)
    wire.run()
    wire.pass_time(IDLE_SECONDS + 1)
    assert wire.closed == [ADDRESS]
    assert len(wire.client) == 0
    assert wire.client.gone == [handoff.ticket.engine]


def test_after_a_stop_nothing_is_asked(wire: Wire) -> None:
    assert wire.producer is not None
    wire.client.stop("the caches were reset")
    handoff = wire.open(wire.producer.offer())
    assert handoff.state is State.OVER
    assert "reset" in handoff.reason
    assert wire.asks == []


def test_another_version_is_said(wire: Wire) -> None:
    assert wire.producer is not None
    answer = wire.producer.server.answer(b"x", bytes((VERSION + 1,)) + b"whatever")
    assert answer is not None
    said = decode_answer(answer)
    assert isinstance(said, Refused)
    assert said.reason is Reason.VERSION
    handoff = wire.open(wire.producer.offer())
    wire.client.is_of_another_version(ADDRESS, "it speaks another version")
    assert handoff.state is State.OVER
    assert "version" in handoff.reason


def test_memory_that_turns_out_to_be_unreadable_is_left_alone(wire: Wire) -> None:
    handoff = granted(wire)
    assert wire.producer is not None
    wire.refusal = "blocks of 16 and of 32 tokens"
    wire.client.recheck()
    assert handoff.state is State.OVER
    assert wire.refusal in handoff.reason
    assert wire.client.gone == [handoff.ticket.engine]
    wire.client.release(handoff)
    wire.run()
    assert freed(wire) == [handoff.ticket.lease]
    again = wire.open(wire.producer.offer())
    wire.run()
    assert again.state is State.OVER
    assert wire.refusal in again.reason


def _of_another_rank(ranks: list[Any]) -> None:
    ranks[0][0] += 1


def _twice(ranks: list[Any]) -> None:
    ranks *= 2


def _at_the_end_of_all_addresses(ranks: list[Any]) -> None:
    strip = ranks[0][2][1][0][5][0]
    assert strip[:2] == ["layer.0", 1 << 20]
    strip[1] = (1 << 63) - 1


@pytest.mark.parametrize("spoil", [_of_another_rank, _twice, _at_the_end_of_all_addresses])
def test_memory_that_makes_no_sense_is_no_message(spoil: Callable[[list[Any]], None]) -> None:
    for message in (Welcome(1, 1, (memory(),)), Met(1, "11" * 16, 1, (memory(),))):
        data = encode(message)
        assert decode_answer(data) == message
        fields = msgspec.msgpack.decode(data[1:])
        spoil(fields[-1])
        with pytest.raises(MessageError):
            decode_answer(data[:1] + msgspec.msgpack.encode(fields))


# -- what is promised before it is there ---------------------------------------------------


def promised(wire: Wire) -> tuple[Handoff, int]:
    """A hand-over that is asked for, and its lease, before it is where it will be read from."""
    assert wire.producer is not None
    ticket = wire.producer.promise()
    handoff = wire.open(ticket)
    wire.run()
    assert handoff.state is State.ASKING
    return handoff, ticket.lease


def deliver_late(wire: Wire) -> None:
    assert wire.producer is not None
    wire.answers += [answer for _, answer in wire.producer.server.take_late()]
    wire.run()


def test_who_comes_early_waits_and_is_told_where_it_is(wire: Wire) -> None:
    handoff, lease = promised(wire)
    assert wire.producer is not None
    sums = ((b"s" * 16,),)
    wire.producer.server.settle(lease, serving.Offer(100, ((3, 4),), Place.SLOTS, sums))
    deliver_late(wire)
    assert handoff.state is State.GRANTED
    assert handoff.granted is not None
    assert (handoff.granted.place, handoff.granted.blocks) == (Place.SLOTS, ((3, 4),))
    assert handoff.granted.sums == sums
    assert handoff.valid_until == 1000.0 + SECONDS
    wire.client.release(handoff)
    wire.run()
    assert freed(wire) == [lease]


def test_who_is_told_that_it_comes_waits_for_longer(wire: Wire) -> None:
    handoff, lease = promised(wire)
    wire.pass_time(ASK_SECONDS)
    assert handoff.state is State.ASKING
    assert wire.producer is not None
    wire.producer.server.settle(lease, OFFER)
    deliver_late(wire)
    assert handoff.state is State.GRANTED
    late, _ = promised(wire)
    wire.pass_time(COMING_SECONDS)
    assert late.state is State.OVER
    assert wire.failures == ["remote_unanswered"]


def test_who_waits_is_turned_away_when_nothing_comes(wire: Wire) -> None:
    handoff, lease = promised(wire)
    assert wire.producer is not None
    wire.producer.server.revoke()
    assert freed(wire) == [lease]  # nobody reads: there is nobody to wait for
    deliver_late(wire)
    assert handoff.state is State.OVER
    assert wire.failures == ["remote_lease"]
    wire.producer.server.settle(lease, OFFER)
    assert wire.producer.server.take_late() == []


def test_what_comes_after_its_lease_is_offered_to_nobody(wire: Wire) -> None:
    _, lease = promised(wire)
    assert wire.producer is not None
    wire.now += SECONDS + GRACE
    assert freed(wire) == [lease]
    wire.producer.server.settle(lease, OFFER)
    late = [decode_answer(answer) for _, answer in wire.producer.server.take_late()]
    assert [type(answer) for answer in late] == [Refused]


def test_those_who_wait_for_one_promise_are_bounded(wire: Wire) -> None:
    _, lease = promised(wire)
    assert wire.producer is not None
    server = wire.producer.server
    for number in range(3 * MAX_HOLDERS):
        take = Take(number, wire.producer.engine, IDENTITY, Hold(lease, "the same"))
        assert server.answer(b"peer", encode(take)) == encode(Coming(number))
    server.settle(lease, OFFER)
    assert len(server.take_late()) == MAX_HOLDERS
