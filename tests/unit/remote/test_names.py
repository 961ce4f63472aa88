# SPDX-License-Identifier: Apache-2.0
"""Who the peers are."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from vllm_tiered_kv.remote import names
from vllm_tiered_kv.remote.names import Resolver, resolve
from vllm_tiered_kv.remote.options import MAX_PEERS, Address

FIXED = Address("10.0.0.1", 7600)
NAME = Address("engines.example", 7600)


class Told:
    def __init__(self) -> None:
        self.all: list[Sequence[Address]] = []
        self._event = threading.Event()

    def __call__(self, addresses: Sequence[Address]) -> None:
        self.all.append(addresses)
        self._event.set()

    def wait(self) -> Sequence[Address]:
        assert self._event.wait(20)
        self._event.clear()
        return self.all[-1]


def test_addresses_are_told_once_and_as_they_are() -> None:
    told = Told()
    resolver = Resolver([FIXED, Address("::1", 7600)], told, lambda _: [])
    assert told.wait() == (FIXED, Address("::1", 7600))
    resolver._thread.join(20)
    assert not resolver._thread.is_alive()


def test_a_name_is_looked_up_again_and_keeps_what_it_had(monkeypatch) -> None:
    monkeypatch.setattr(names, "INTERVAL", 0.001)
    answers = [
        [Address("10.0.0.2", 7600)],
        [],
        [Address("10.0.0.2", 7600)],
        [Address("10.0.0.3", 7600), Address("10.0.0.4", 7600)],
    ]
    told = Told()
    resolver = Resolver([FIXED, NAME], told, lambda _: answers.pop(0) if answers else [])
    while len(told.all) < 2:
        told.wait()
    resolver.close()
    resolver._thread.join(20)
    assert told.all == [
        (FIXED, Address("10.0.0.2", 7600)),
        (FIXED, Address("10.0.0.3", 7600), Address("10.0.0.4", 7600)),
    ]


def test_a_name_of_many_engines_is_bounded() -> None:
    told = Told()
    many = [Address(f"10.0.{i // 200}.{i % 200}", 7600) for i in range(3 * MAX_PEERS)]
    resolver = Resolver([NAME], told, lambda _: many)
    assert len(told.wait()) == MAX_PEERS
    resolver.close()


def test_names_that_are_not_known_have_no_addresses() -> None:
    assert resolve(Address("no-such-name.invalid", 7600)) == []
    assert Address("127.0.0.1", 7600) in resolve(Address("localhost", 7600))
