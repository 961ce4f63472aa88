# SPDX-License-Identifier: Apache-2.0
"""Messages of any content, to both sides of the protocol: read, or refused."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.remote._wire import (
    ADDRESS,
    GRACE,
    IDENTITY,
    OFFER,
    SECONDS,
    Wire,
    memory,
)
from vllm_tiered_kv.remote.handoff import State
from vllm_tiered_kv.remote.messages import (
    MAX_ASK_BYTES,
    VERSION,
    Granted,
    Hello,
    Hold,
    MessageError,
    OtherVersion,
    Reason,
    Refused,
    Release,
    Renew,
    Take,
    Welcome,
    decode_answer,
    decode_ask,
    encode,
)

_HOLDS = st.builds(Hold, st.integers(0, 3), st.sampled_from(["consumer.1", "x", ""]))
_ENGINES = st.sampled_from(["11" * 16, "22" * 16, "zz"])
_ASKS = st.one_of(
    st.builds(Hello, st.integers(-1, 1 << 65), _ENGINES, st.just(IDENTITY)),
    st.builds(Take, st.integers(0, 5), _ENGINES, st.just(IDENTITY), _HOLDS),
    st.builds(Renew, st.integers(0, 5), _ENGINES, st.lists(_HOLDS).map(tuple)),
    st.builds(Release, _ENGINES, st.lists(_HOLDS).map(tuple)),
)


def _encoded(message: object) -> bytes:
    try:
        return bytes((VERSION,)) + msgspec.msgpack.encode(message)
    except OverflowError:
        return bytes((VERSION,))


_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=20,
)
_DATA = st.one_of(st.binary(max_size=300), _ASKS.map(_encoded), _PLAIN.map(_encoded))


@given(st.lists(_DATA, max_size=8))
def test_a_producer_survives_whatever_is_said(said: list[bytes]) -> None:
    wire = Wire()
    assert wire.producer is not None
    ticket = wire.producer.offer()
    for data in said:
        answer = wire.producer.server.answer(b"x", data)
        if answer is not None:
            decode_answer(answer)
    wire.now += 2 * SECONDS + GRACE
    assert wire.producer.server.take_freed() in ([], [ticket.lease])
    assert len(wire.producer.leases) == 0


_ANSWERS = st.one_of(
    st.builds(Welcome, st.integers(0, 4), st.integers(0, 2), st.just((memory(),))),
    st.builds(
        Granted,
        st.integers(0, 4),
        st.floats(),
        st.integers(0, 2),
        st.sampled_from([100, 0, 7]),
        st.just(OFFER.blocks),
    ),
    st.builds(Refused, st.integers(0, 4), st.sampled_from(Reason), st.text(max_size=20)),
)


@given(st.lists(_ANSWERS.map(_encoded) | _DATA, max_size=8))
def test_a_consumer_survives_whatever_is_answered(answers: list[bytes]) -> None:
    wire = Wire()
    assert wire.producer is not None
    handoff = wire.open(wire.producer.offer())
    for data in answers:
        with contextlib.suppress(MessageError):
            wire.client.heard(ADDRESS, decode_answer(data))
    if handoff.state is State.GRANTED:
        assert handoff.granted is not None
        assert handoff.granted.blocks == OFFER.blocks
    for _ in range(3):
        wire.asks.clear()
        wire.pass_time(86400.0)
    assert handoff.state is State.OVER


@given(_DATA)
def test_messages_are_read_or_refused(data: bytes) -> None:
    for decode in (decode_ask, decode_answer):
        try:
            message = decode(data)
        except MessageError:
            continue
        assert decode(encode(message)) == message


def test_what_is_too_large_or_of_another_version_is_not_parsed() -> None:
    with pytest.raises(MessageError, match="too large"):
        decode_ask(bytes((VERSION,)) + b"\x00" * MAX_ASK_BYTES)
    with pytest.raises(OtherVersion) as error:
        decode_ask(b"\x07\xff\xff")
    assert error.value.version == 7
