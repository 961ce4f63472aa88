# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that nobody takes, that are broken off, and parameters that are wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.engine._handover import (
    IN_FLIGHT,
    TO_PRODUCER,
    Pair,
    alone,
    begun,
    decode,
    failures,
    fresh,
    goes_on,
    in_flight,
    prefill,
    settled,
    wait,
)
from tests.engine._server import assert_same_output, flushed
from tools.serving import Client
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.ticket import Ticket, seal, unseal

pytest.importorskip("nixl")

ROUNDS, AT_ONCE = 10, 10


def test_a_hundred_aborts_while_bytes_are_on_their_way_leak_nothing(pair: Pair) -> None:
    consumer = pair.consumer.client
    settled(pair.producer.client, consumer)
    texts = [fresh(1500) for _ in range(AT_ONCE)]
    before, failed = pair.pulled(), pair.failures()
    for _ in range(ROUNDS):
        wait(lambda: in_flight(consumer, "load") == 0, "reads do not end")
        with pair.held.reads():
            with contextlib.ExitStack() as going:
                for text in texts:
                    going.enter_context(begun(consumer, text, pair.prefill(text)))
                consumer.wait_for_metrics(
                    lambda metrics: metrics.value(IN_FLIGHT, direction="load") == AT_ONCE
                )
                pair.held.wait_reached()
            # All are gone, and nothing has arrived.
            consumer.wait_for_metrics(
                lambda metrics: (
                    not metrics.value("vllm:num_requests_running")
                    and not metrics.value("vllm:num_requests_waiting")
                )
            )
            assert consumer.metrics().value(IN_FLIGHT, direction="load") == AT_ONCE
    settled(consumer, pair.producer.client)
    assert not (pair.failures() - failed)["internal"]
    for text in texts[:2]:
        got = decode(consumer, text, pair.prefill(text))
        assert_same_output(alone(consumer, text), got)
    assert pair.pulled() > before


def test_what_fifty_requests_do_not_take_comes_back(pair: Pair) -> None:
    """Dropped by a router, rejected by the consumer, or of another prompt."""
    consumer = pair.consumer.client
    before, failed = pair.pulled(), pair.failures()
    for i in range(50):
        text = fresh(300)
        params = pair.prefill(text)
        if i % 3 == 1:
            request = {"prompt": text, "max_tokens": -1, "kv_transfer_params": params}
            url = f"{consumer.url}/v1/completions"
            assert httpx.post(url, json=request, trust_env=False).is_client_error
        elif i % 3 == 2:
            other = fresh(300)
            got = decode(consumer, other, params, 1)
            assert_same_output(alone(consumer, other, 1), got)
    assert pair.pulled() == before
    assert pair.failures() - failed == {"remote_proof": 16}
    settled(pair.producer.client)
    decode(consumer, text, params)  # too late
    assert (pair.failures() - failed)["remote_lease"] == 1
    assert pair.pulled() == before


def test_prefills_that_are_aborted_between_their_steps(pair: Pair) -> None:
    producer = pair.producer.client
    settled(producer)
    before = offered(producer)
    count = 40  # many seconds of work, of which the first answer says that it has begun
    with contextlib.ExitStack() as going:
        connections = [
            going.enter_context(begun(producer, fresh(4000), TO_PRODUCER, max_tokens=1))
            for _ in range(count)
        ]
        assert connections[0].getresponse().readline()
    settled(producer)
    assert offered(producer) - before < count
    assert not failures(producer)["internal"]


def offered(client: Client) -> float:
    return client.metrics().value("vllm:tiered_kv_handoffs_total", event="offered")


# -- parameters ------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], dict[str, Any]]


def ticket(text: Any) -> Change:
    return lambda params: {**params, "tiered_kv": {"handoff": text}}


def other_character(params: dict[str, Any]) -> dict[str, Any]:
    sealed = params["tiered_kv"]["handoff"]
    return ticket(sealed[:60] + ("A" if sealed[60] != "A" else "B") + sealed[61:])(params)


def cut(params: dict[str, Any]) -> dict[str, Any]:
    return ticket(params["tiered_kv"]["handoff"][:-8])(params)


def without(params: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key != "tiered_kv"}


WRONG: dict[str, tuple[Change, str]] = {
    "other character": (other_character, "remote_ticket"),
    "cut": (cut, "remote_ticket"),
    "empty": (ticket(""), "remote_params"),
    "not base64": (ticket("\u2603" * 40), "remote_ticket"),
    "long": (ticket("A" * 2000), "params"),
    "five megabytes": (ticket("A" * 5_000_000), "params"),
    "number": (ticket(7), "params"),
    "nested": (ticket([[[[[[[[{}]]]]]]]]), "params"),
    "text": (lambda params: {**params, "tiered_kv": "x"}, "params"),
    "unknown field": (lambda params: {**params, "tiered_kv": {"more": 1}}, "params"),
    "another connector's": (without, "remote_params"),
    "both ways": (lambda params: {**params, "do_remote_decode": True}, "remote_params"),
    "no flag": (lambda params: {**params, "do_remote_prefill": "yes"}, "remote_params"),
}


@pytest.mark.parametrize(("change", "kind"), WRONG.values(), ids=WRONG)
def test_parameters_that_are_wrong(pair: Pair, change: Change, kind: str) -> None:
    text = fresh(140)
    is_refused(pair, text, change(pair.prefill(text)), kind)


def is_refused(pair: Pair, text: list[int], params: dict[str, Any], kind: str) -> None:
    """It is counted, nothing is pulled, and the answer is right."""
    before, failed = pair.pulled(), pair.failures()
    got = decode(pair.consumer.client, text, params)
    new = pair.failures() - failed
    assert pair.pulled() == before
    assert new[kind]
    assert not new["internal"]
    assert_same_output(alone(pair.consumer.client, text), got)


@pytest.fixture(scope="module")
def sealing(fleet_key: Path) -> bytes:
    return keys.load(fleet_key).sealing


FORGED: dict[str, tuple[Callable[[Ticket, Pair], Any], str]] = {
    "a lease that never was": (lambda ticket, pair: {"lease": ticket.lease + 5000}, "remote_lease"),
    "another life": (lambda ticket, pair: {"engine": "1" * 32}, "remote_engine"),
    "more tokens": (lambda ticket, pair: {"tokens": ticket.tokens + 1}, "remote_message"),
    "far more tokens": (lambda ticket, pair: {"tokens": 1 << 31}, "remote_message"),
    "another prompt": (lambda ticket, pair: {"proof": b"x" * 32}, "remote_proof"),
    "nobody there": (lambda ticket, pair: {"port": 9}, "remote_unanswered"),
    "something else": (
        lambda ticket, pair: {"port": pair.producer.server.port},
        "remote_unanswered",
    ),
    "no host": (lambda ticket, pair: {"host": "no such host"}, "remote_unanswered"),
    "half a host": (lambda ticket, pair: {"host": "127.0.0.1\0"}, "remote_unanswered"),
}


@pytest.mark.parametrize(("change", "kind"), FORGED.values(), ids=FORGED)
def test_tickets_forged_with_the_fleets_own_key(
    pair: Pair, sealing: bytes, change: Callable[[Ticket, Pair], Any], kind: str
) -> None:
    text = fresh(140)
    params = pair.prefill(text)
    real = unseal(params["tiered_kv"]["handoff"], sealing)
    forged = msgspec.structs.replace(real, **change(real, pair))
    is_refused(pair, text, ticket(seal(forged, sealing))(params), kind)


def test_a_ticket_of_another_fleet(pair: Pair, sealing: bytes) -> None:
    text = fresh(140)
    params = pair.prefill(text)
    real = unseal(params["tiered_kv"]["handoff"], sealing)
    is_refused(pair, text, ticket(seal(real, keys.generate().sealing))(params), "remote_ticket")


def test_a_ticket_that_is_used_twice(pair: Pair) -> None:
    consumer = pair.consumer.client
    text = fresh(140)
    params = pair.prefill(text)
    decode(consumer, text, params)
    settled(pair.producer.client)
    assert flushed(consumer)
    is_refused(pair, text, params, "remote_lease")


def test_what_is_asked_of_the_wrong_engine(pair: Pair) -> None:
    text = fresh(140)
    params = pair.prefill(text)
    assert_same_output(
        alone(pair.producer.client, text), decode(pair.producer.client, text, params)
    )
    with pytest.raises(KeyError):
        prefill(pair.consumer.client, text)
    odd = {**TO_PRODUCER, "remote_block_ids": [["x" * 10**5]], "tiered_kv": {"handoff": "AAAA"}}
    assert prefill(pair.producer.client, text, kv_transfer_params=odd)["remote_num_tokens"] == 140


def test_after_all_this_both_go_on(pair: Pair) -> None:
    goes_on(pair.producer.client, pair.consumer.client)
    settled(pair.producer.client, pair.consumer.client)
    for client in (pair.producer.client, pair.consumer.client):
        assert client.healthy()
        assert not failures(client)["internal"]
