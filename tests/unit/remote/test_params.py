# SPDX-License-Identifier: Apache-2.0
"""Tickets and ``kv_transfer_params``: what a producer says, and whatever else may arrive."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.params import DEFAULT, ParamsError, RequestParams, parse_params
from vllm_tiered_kv.remote.params import (
    NOTHING,
    RemoteParams,
    Wish,
    answer,
    parse_remote,
    refusal,
)
from vllm_tiered_kv.remote.ticket import MAX_SEALED, VERSION, Ticket, TicketError, seal, unseal

KEY, OTHER = b"k" * 32, b"o" * 32
TICKET = Ticket(VERSION, "ab" * 16, "10.0.0.5", 7600, 17, 1234, b"p" * 32)
FROM_ROUTER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
NAMES = st.sampled_from([*FROM_ROUTER, "remote_request_id", "tiered_kv", "tp_size", "transfer_id"])


def said() -> dict[str, Any]:
    """A producer's answer after its way through a router."""
    params = answer(
        TICKET,
        seal(TICKET, KEY),
        engine_id="prefill-0",
        request_id="cmpl-1",
        blocks=((1, 2, 3),),
        tensor_parallel=2,
    )
    return json.loads(json.dumps(params))  # type: ignore[no-any-return]


def read(raw: Any) -> RemoteParams:
    return parse_remote(raw, parse_params(raw))


def test_what_a_router_sends_to_a_producer() -> None:
    assert read(FROM_ROUTER) == RemoteParams(Wish.SEND)


def test_what_a_producer_says_reaches_a_consumer() -> None:
    params = read(said())
    assert params.wish is Wish.RECEIVE
    assert unseal(params.handoff, KEY) == TICKET


def test_a_producer_that_hands_nothing_over_asks_nothing() -> None:
    assert read(refusal()) == NOTHING


def test_the_answer_has_the_names_that_routers_know() -> None:
    params = said()
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert params["remote_engine_id"] == "prefill-0"
    assert params["remote_request_id"] == "cmpl-1"
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.5", 7600)
    assert params["remote_block_ids"] == [[1, 2, 3]]
    assert params["tp_size"] == 2


@pytest.mark.parametrize("raw", [None, {}, {"transfer_id": "x"}, {"do_remote_decode": None}, 7])
def test_others_parameters_ask_nothing_of_us(raw: Any) -> None:
    assert parse_remote(raw, DEFAULT) == NOTHING


@pytest.mark.parametrize(
    "change",
    [
        {"do_remote_decode": True},
        {"do_remote_prefill": "yes"},
        {"tiered_kv": {}},
        {"tiered_kv": {"handoff": ""}},
        {"tiered_kv": {"handoff": 7}},
    ],
)
def test_a_hand_over_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ParamsError, match="kv_transfer_params"):
        read({**said(), **change})


@pytest.mark.parametrize(
    "change",
    [{"remote_host": "10.6.6.6"}, {"remote_host": ["x"]}, {"remote_port": 7e99}, {"tp_size": ""}],
)
def test_what_is_beside_the_ticket_is_not_looked_at(change: dict[str, Any]) -> None:
    assert read({**said(), **change}) == read(said())


def test_an_overlong_ticket_is_refused_before_it_is_looked_at() -> None:
    with pytest.raises(ParamsError, match="handoff"):
        parse_params({"tiered_kv": {"handoff": "x" * (MAX_SEALED + 1)}})


@given(st.dictionaries(NAMES, JSON) | JSON)
def test_whatever_arrives_is_read_or_refused(raw: Any) -> None:
    try:
        ours = parse_params(raw)
    except ParamsError:
        ours = RequestParams()
    try:
        params = parse_remote(raw, ours)
    except ParamsError:
        return
    if params.wish is Wish.RECEIVE:
        with pytest.raises(TicketError):
            unseal(params.handoff, KEY)


# -- tickets ---------------------------------------------------------------------------


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_nothing_else_is_a_ticket(data: bytes) -> None:
    with pytest.raises(TicketError):
        unseal(data.decode("latin-1"), KEY)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_ticket_is_refused(at: int, by: int) -> None:
    text = seal(TICKET, KEY)
    at %= len(text)
    changed = text[:at] + chr((ord(text[at]) ^ by) % 128) + text[at + 1 :]
    try:
        opened = unseal(changed, KEY)
    except TicketError:
        return
    assert opened == TICKET  # the last character has bits that mean nothing


def test_another_fleets_ticket_is_refused() -> None:
    with pytest.raises(TicketError, match="sealed"):
        unseal(seal(TICKET, OTHER), KEY)


def test_a_ticket_of_another_version_is_refused() -> None:
    import msgspec

    newer = msgspec.structs.replace(TICKET, version=VERSION + 1)
    with pytest.raises(TicketError, match="version"):
        unseal(seal(newer, KEY), KEY)


def test_a_ticket_fits_its_bound() -> None:
    largest = Ticket(VERSION, "f" * 32, "h" * 253, 65535, 1 << 62, 1 << 31, b"p" * 32)
    text = seal(largest, KEY)
    assert len(text) <= MAX_SEALED
    assert unseal(text, KEY) == largest
