# SPDX-License-Identifier: Apache-2.0
"""The control channel's sockets: ZeroMQ with CURVE, which both ends prove the fleet's key by.

Who listens admits only who has proved to have the fleet's own key pair (RFC 27/ZAP): without it a
connection ends within ZeroMQ's handshake. Who connects knows whom it talks to, since nobody else
can answer to the fleet's public key.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import threading
from collections.abc import Callable

import zmq
from zmq.utils import z85

from vllm_tiered_kv.remote.keys import FleetKey
from vllm_tiered_kv.remote.messages import MAX_ANSWER_BYTES, MAX_ASK_BYTES
from vllm_tiered_kv.remote.names import is_name
from vllm_tiered_kv.remote.options import Address

_QUEUE = 1024  # messages, of one connection
_ANSWERS = 64  # the same, where they may be large: what else comes waits at the peer
_DOMAIN = b"vllm-tiered-kv"
_ZAP = "inproc://zeromq.zap.01"
_HANDSHAKE_MS = 5_000
_HEARTBEAT_MS = 5_000
"""A connection whose other end says nothing for some of these is closed and made anew."""
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 5_000
_BY_ADDRESS, _BY_NAME = 1, 2
"""ZeroMQ's threads, as bits: the one that looks names up stands still while DNS says nothing."""
_PER_WAIT = 256
"""Messages taken from one socket, if they are small, before the others have their turn."""


class Heard:
    """What has arrived: from consumers, by connection, and from producers, by address."""

    __slots__ = ("answers", "asks")

    def __init__(self) -> None:
        self.asks: list[tuple[bytes, bytes]] = []
        self.answers: list[tuple[Address, bytes]] = []


class ControlSockets:
    """All sockets of one engine. One thread only, but for :meth:`wake`.

    Args:
        key: the fleet's.
        listen: where to listen; port 0 for any that is free. None: nobody is served.

    Raises:
        zmq.ZMQError: the address cannot be had, or no socket.
    """

    def __init__(self, key: FleetKey, listen: Address | None) -> None:
        self._key = key
        self._peers: dict[Address, zmq.Socket[bytes]] = {}
        self._addresses: dict[zmq.Socket[bytes], Address] = {}
        self.turned_away = 0
        """Connections of somebody who has another key."""
        self.malformed = 0
        """Messages of more than one part, or of none."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._context = zmq.Context(io_threads=2)
        self._zap: zmq.Socket[bytes] | None = None
        self._server: zmq.Socket[bytes] | None = None
        self.address = listen
        """Where we listen."""
        self._poller = zmq.Poller()
        self._poller.register(self._wake, zmq.POLLIN)
        try:
            if listen is not None:
                self._listen(listen)
        except zmq.ZMQError:
            self.close()
            raise

    def _listen(self, address: Address) -> None:
        # The handler is there before the first connection can be: without one all are admitted.
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)
        self._server = self._socket(zmq.ROUTER, MAX_ASK_BYTES, _BY_ADDRESS)
        self._server.setsockopt(zmq.CURVE_SERVER, 1)
        self._server.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._key.secret))
        self._server.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(self._key.public))
        self._server.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        self._server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        self._server.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._server.bind(address.endpoint if address.port else f"{address.endpoint[:-1]}*")
        bound = self._server.getsockopt(zmq.LAST_ENDPOINT)
        port = int(bytes(bound).rstrip(b"\0").rpartition(b":")[2])
        self.address = Address(address.host, port)
        self._poller.register(self._zap, zmq.POLLIN)
        self._poller.register(self._server, zmq.POLLIN)

    def _socket(self, kind: int, max_message: int, thread: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.AFFINITY, thread)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
        return socket

    @property
    def peers(self) -> int:
        """Connections to producers."""
        return len(self._peers)

    def wake(self) -> None:
        """Let :meth:`wait` return; any thread, also after :meth:`close`."""
        with self._wake_lock, contextlib.suppress(OSError):  # full: it wakes anyway
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def wait(self, seconds: float, meanwhile: Callable[[], None]) -> Heard:
        """Sleep until something comes, at most so long.

        Args:
            seconds: at most.
            meanwhile: called after the sleep and before anything is read: what was said by others
                before a message came is known before the message is.
        """
        heard = Heard()
        ready = dict(self._poller.poll(max(0, int(seconds * 1000))))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        meanwhile()
        if self._zap is not None and self._zap in ready:
            self._admit(self._zap)
        if self._server is not None and self._server in ready:
            for parts in self._receive(self._server):
                if len(parts) == 2:
                    heard.asks.append((parts[0], parts[1]))
                else:
                    self.malformed += 1
        for socket, address in list(self._addresses.items()):
            if socket in ready:
                for parts in self._receive(socket):
                    if len(parts) == 1:
                        heard.answers.append((address, parts[0]))
                    else:
                        self.malformed += 1
        return heard

    def reply(self, peer: bytes, data: bytes) -> bool:
        """Answer a consumer; False if it is gone or takes nothing in."""
        if self._server is None:
            return False
        try:
            self._server.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def ask(self, address: Address, data: bytes) -> bool:
        """Say something to a producer; False if it cannot be put on its way."""
        try:
            socket = self._peers.get(address) or self._connect(address)
            socket.send(data, zmq.NOBLOCK)
        except (zmq.ZMQError, OSError):
            return False
        return True

    def _connect(self, address: Address) -> zmq.Socket[bytes]:
        thread = _BY_NAME if is_name(address) else _BY_ADDRESS
        socket = self._socket(zmq.DEALER, MAX_ANSWER_BYTES, thread)
        socket.setsockopt(zmq.RCVHWM, _ANSWERS)
        try:
            socket.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(self._key.public))
            socket.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(self._key.public))
            socket.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(self._key.secret))
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
            socket.connect(address.endpoint)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._peers[address] = socket
        self._addresses[socket] = address
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def hang_up(self, address: Address) -> None:
        """End the connection to a producer."""
        socket = self._peers.pop(address, None)
        if socket is not None:
            del self._addresses[socket]
            self._poller.unregister(socket)
            # Not at once: a last release may be on its way.
            socket.close(1000)

    def close(self) -> None:
        self._context.destroy(linger=0)
        with self._wake_lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _receive(self, socket: zmq.Socket[bytes]) -> list[list[bytes]]:
        messages: list[list[bytes]] = []
        nbytes = 0
        while len(messages) < _PER_WAIT and nbytes < MAX_ANSWER_BYTES:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:  # nothing more, or closed
                break
            messages.append(parts)
            nbytes += sum(map(len, parts))
        return messages

    def _admit(self, zap: zmq.Socket[bytes]) -> None:
        """Answer ZeroMQ's question whether a connection's key is good."""
        for _ in range(_PER_WAIT):
            try:
                request = zap.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            good = (
                len(request) == 7
                and request[2] == _DOMAIN
                and request[5] == b"CURVE"
                and hmac.compare_digest(request[6], self._key.public)
            )
            if not good:
                self.turned_away += 1
            number = request[1] if len(request) > 1 else b""
            status = (b"200", b"OK") if good else (b"400", b"not this fleet's key")
            with contextlib.suppress(zmq.ZMQError):
                zap.send_multipart((b"1.0", number, *status, b"", b""), zmq.NOBLOCK)
