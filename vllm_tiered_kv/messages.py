# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of one engine: sent without waiting, trusted by a secret.

Each begins with a secret that travels only with the plans; without it nothing is parsed.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import zmq

SECRET_BYTES = 16

T = TypeVar("T")


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def new_address() -> str:
    """In Linux's abstract namespace: there is no file that a killed engine could leave behind."""
    return f"ipc://@vllm-tiered-kv-{secrets.token_hex(16)}"


class Inbox(Generic[T]):
    """Opens messages. One thread only.

    Args:
        secret: what they begin with.
        decode: reads the rest; raises msgspec.DecodeError where it is none.
    """

    def __init__(self, secret: bytes, decode: Callable[[bytes], T]) -> None:
        self._secret = secret
        self._decode = decode
        self.malformed = 0
        """Messages that were none."""

    def open(self, data: bytes) -> T | None:
        """What a message says; None for one that is counted as malformed."""
        if hmac.compare_digest(data[:SECRET_BYTES], self._secret):
            try:
                return self._decode(data[SECRET_BYTES:])
            except (msgspec.DecodeError, RecursionError):
                pass
        self.malformed += 1
        return None

    def drain(self, socket: zmq.Socket[bytes], limit: int) -> list[T]:
        """What has arrived, without waiting; at most ``limit`` messages are looked at."""
        opened: list[T] = []
        for _ in range(limit):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing there, or closed
                break
            if (message := self.open(data)) is not None:
                opened.append(message)
        return opened


class Outbox:
    """Sends messages; any thread. Never waits, never raises.

    Args:
        socket: the sending socket, used by nobody else.
        secret: what each message begins with.
    """

    def __init__(self, socket: zmq.Socket[bytes], secret: bytes) -> None:
        self._socket = socket
        self._secret = secret
        self._lock = threading.Lock()
        self._closed = False

    def send(self, data: bytes) -> bool:
        """Whether the message is on its way."""
        with self._lock:
            if self._closed:
                return False
            try:
                self._socket.send(self._secret + data, zmq.NOBLOCK)
            except zmq.ZMQError:
                return False
            return True

    def close(self, end: Callable[[], object]) -> None:
        """Send nothing more; ``end`` closes the socket, once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                end()
