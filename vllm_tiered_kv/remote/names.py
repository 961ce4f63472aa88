# SPDX-License-Identifier: Apache-2.0
"""Who the peers are: addresses as they were written down, and those that names stand for now."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence

from vllm_tiered_kv.remote.options import MAX_PEERS, Address

INTERVAL = 30.0
"""Seconds between two look-ups of all names."""


def resolve(address: Address) -> list[Address]:
    """All addresses of a name, in order; none if it is not known now. Waits for DNS."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return sorted({Address(str(entry[4][0]), address.port) for entry in found}, key=str)


def is_name(address: Address) -> bool:
    """Whether it has to be looked up."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(address.host)
        return False
    return True


class Resolver:
    """Tells who the peers are: at once, and where there are names again whenever that changes.

    Args:
        peers: as they were written down.
        tell: takes at most :data:`MAX_PEERS` addresses; on a thread of the resolver's.
        look_up: finds the addresses of a name; may wait.
    """

    def __init__(
        self,
        peers: Sequence[Address],
        tell: Callable[[Sequence[Address]], None],
        look_up: Callable[[Address], Sequence[Address]] = resolve,
    ) -> None:
        self._peers = tuple(peers)
        self._tell = tell
        self._look_up = look_up
        self._last: dict[Address, Sequence[Address]] = {}
        self._told: tuple[Address, ...] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiered-kv-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Tell nothing more. A look-up under way is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        names = any(is_name(peer) for peer in self._peers)
        while not self._stop.is_set():
            found = self._find()
            if found != self._told and not self._stop.is_set():
                self._told = found
                self._tell(found)
            if not names:
                return
            self._stop.wait(INTERVAL)

    def _find(self) -> tuple[Address, ...]:
        addresses: dict[Address, None] = {}
        for peer in self._peers:
            if not is_name(peer):
                addresses[peer] = None
                continue
            # A name that is not known for a moment keeps the addresses that it had.
            self._last[peer] = self._look_up(peer) or self._last.get(peer, ())
            addresses.update(dict.fromkeys(self._last[peer]))
        return tuple(addresses)[:MAX_PEERS]
