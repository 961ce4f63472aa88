# SPDX-License-Identifier: Apache-2.0
"""The options below ``remote``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.config import ConfigError, parse_options
from vllm_tiered_kv.remote.options import Address, Handoff, parse_address, parse_listen

REMOTE = {"listen": "10.0.0.5:7600", "key_file": "/etc/vllm/tiered-kv.key"}


def parse(**remote: Any) -> Any:
    return parse_options({"remote": {**REMOTE, **remote}}).remote


def test_what_must_be_given_is_enough() -> None:
    remote = parse()
    assert remote.handoff is Handoff.AUTO
    assert remote.peers is None
    assert not remote.verify


def test_without_it_there_is_none() -> None:
    assert parse_options({"cpu": {"capacity": 1}}).remote is None


@pytest.mark.parametrize(
    ("remote", "parts"),
    [
        ({"lisen": 1}, ["remote.lisen", "'remote.listen'"]),
        ({"keyfile": "/x"}, ["remote.keyfile", "'remote.key_file'"]),
        ({"listen": 7600}, ["remote.listen", "7600"]),
        ({"listen": "10.0.0.5"}, ["remote.listen", "host:port"]),
        ({"listen": "10.0.0.5:"}, ["remote.listen"]),
        ({"listen": "10.0.0.5:65536"}, ["remote.listen"]),
        ({"listen": "0.0.0.0:7600"}, ["remote.listen", "peers"]),
        ({"listen": "[::]:7600"}, ["remote.listen", "peers"]),
        ({"listen": "*:7600"}, ["remote.listen"]),
        ({"listen": ":65536"}, ["remote.listen", "host:port"]),
        ({"listen": "tcp://10.0.0.5:7600"}, ["remote.listen"]),
        ({"listen": "10.0.0.5:7600;x"}, ["remote.listen"]),
        ({"key_file": "fleet.key"}, ["remote.key_file", "absolute"]),
        ({"key_file": "/\ud800"}, ["remote.key_file", "absolute"]),
        ({"handoff": "gpu"}, ["remote.handoff", "'gpu'", "auto, device, cpu"]),
        ({"peers": ["10.0.0.6:0"]}, ["remote.peers", "10.0.0.6:0"]),
        ({"listen": "fe80::1:7600"}, ["remote.listen", "brackets"]),
        ({"listen": "[zz]:7600"}, ["remote.listen", "IPv6 address"]),
        ({"peers": "10.0.0.6:7600"}, ["remote.peers", "a list"]),
        ({"peers": [7]}, ["remote.peers[0]: 7 ", "text in quotes"]),
        ({"peers": ["x"]}, ["remote.peers", "'x'"]),
        ({"peers": ["x:1"] * 65}, ["remote.peers", "65"]),
        ({"lease": 0.5}, ["remote.lease", "0.5"]),
        ({"lease": float("nan")}, ["remote.lease", "nan"]),
        ({"deadline": 0}, ["remote.deadline"]),
        ({"max_leases": 0}, ["remote.max_leases"]),
        ({"verify": "yes"}, ["remote.verify", "'yes'"]),
    ],
)
def test_a_refusal_names_key_and_value(remote: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(**remote)
    for part in parts:
        assert part in str(error.value)


def test_listen_and_key_file_are_required() -> None:
    for key in REMOTE:
        with pytest.raises(ConfigError, match=f"remote.{key}: required"):
            parse_options({"remote": {k: v for k, v in REMOTE.items() if k != key}})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.5:7600", Address("10.0.0.5", 7600)),
        ("prefill-0.pods.local:1", Address("prefill-0.pods.local", 1)),
        ("[fe80::1]:7600", Address("fe80::1", 7600)),
        ("localhost:0", Address("localhost", 0)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text
    assert address.endpoint == f"tcp://{text}"


@pytest.mark.parametrize(
    ("host_ip", "host"), [("10.0.0.5", "10.0.0.5"), ("fe80::1", "fe80::1"), ("node-3", "node-3")]
)
def test_an_address_without_a_host_is_at_vllms_own(host_ip: str, host: str) -> None:
    assert parse(listen=":7600").listen == ":7600"
    assert parse_listen(":7600", host_ip) == Address(host, 7600)
    assert parse_listen("10.0.0.9:7600", host_ip) == Address("10.0.0.9", 7600)


@pytest.mark.parametrize(
    ("host_ip", "why"),
    [("", "VLLM_HOST_IP"), ("no host", "host"), ("0.0.0.0", "peers"), ("::", "peers")],
)
def test_an_address_without_any_host_is_refused(host_ip: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_listen(":7600", host_ip)


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError:
        return
    assert 0 <= address.port <= 65535
    assert parse_address(str(address)) == address
