# SPDX-License-Identifier: Apache-2.0
"""The agent's sockets and a rank's: orders one way, reports the other, without a step between.

Both lie in Linux's abstract namespace and are open to this user only. Every message begins with a
secret that travels only with the plans; without it nothing is parsed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Sequence

import zmq

from vllm_tiered_kv.messages import Inbox, Outbox, new_address, new_secret
from vllm_tiered_kv.tiers.disk.orders import (
    Hello,
    Order,
    Orders,
    RankReport,
    decode_hello,
    decode_orders,
    decode_report,
    encode,
)

_QUEUE = 4096  # messages
_MAX_REPORT = 1 << 16  # bytes
_MAX_HELLO = 1024  # bytes; of a handshake too
_MAX_ORDERS_BYTES = 1 << 20


class AgentSockets:
    """The agent's end. Its thread only, but for :meth:`wake`.

    Raises:
        zmq.ZMQError: no socket could be had.
    """

    def __init__(self) -> None:
        self.secret = new_secret()
        self._inbox = Inbox(self.secret, decode_report)
        self._greetings = Inbox(self.secret, decode_hello)
        self._ranks: dict[int, bytes] = {}
        self._hellos = 0
        self.said: dict[int, Hello] = {}
        """What each rank said last when it connected."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        """Who wakes us too late must not meet another's file descriptor."""
        self._context = zmq.Context()
        try:
            self._reports, self.reports_address = self._bind(zmq.PULL, _MAX_REPORT)
            self._orders, self.orders_address = self._bind(zmq.ROUTER, _MAX_HELLO)
            self._orders.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A rank that connects anew takes the place of what it was.
            self._orders.setsockopt(zmq.ROUTER_HANDOVER, 1)
        except zmq.ZMQError:
            self.close()
            raise
        self._poller = zmq.Poller()
        for pollable in (self._reports, self._orders, self._wake):
            self._poller.register(pollable, zmq.POLLIN)

    def _bind(self, kind: int, max_message: int) -> tuple[zmq.Socket[bytes], str]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, _QUEUE)
        socket.setsockopt(zmq.SNDHWM, _QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        address = new_address()
        socket.bind(address)
        return socket, address

    @property
    def malformed(self) -> int:
        """Messages that were not reports, nor a rank's hello."""
        return self._inbox.malformed + self._greetings.malformed

    @property
    def ranks(self) -> int:
        """Ranks that have said hello."""
        return len(self._ranks)

    @property
    def hellos(self) -> int:
        """So often has any rank said hello."""
        return self._hellos

    def wake(self) -> None:
        """Let :meth:`wait` return; any thread, also after :meth:`close`."""
        with self._wake_lock, contextlib.suppress(OSError):  # full: it wakes anyway
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def wait(self, seconds: float) -> list[RankReport]:
        """Sleep until something comes, at most so long; the reports that have come."""
        self._poller.poll(max(0, int(seconds * 1000)))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._hear_hellos()
        return self._inbox.drain(self._reports, _QUEUE)

    def send(self, rank: int, orders: Sequence[Order]) -> bool:
        """Whether the orders, at most :data:`.orders.MAX_ORDERS`, are on their way."""
        peer = self._ranks.get(rank)
        if peer is None:
            return False
        data = self.secret + encode(Orders(tuple(orders)))
        if len(data) > _MAX_ORDERS_BYTES:
            return False  # the rank would take it for an attack
        try:
            self._orders.send_multipart((peer, data), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)
        with self._wake_lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _hear_hellos(self) -> None:
        for _ in range(_QUEUE):
            try:
                peer, *rest = self._orders.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            hello = self._greetings.open(rest[0] if len(rest) == 1 else b"")
            if hello is None:
                continue
            rank, _, name = peer.partition(b".")
            if not rank.isdigit() or len(rank) > 6 or not name:
                self._greetings.malformed += 1
                continue
            self._ranks[int(rank)] = peer
            self.said[int(rank)] = hello
            self._hellos += 1


class RankSockets:
    """A rank's end: one thread receives, any thread sends.

    Args:
        rank: this rank.
        reports: where reports go.
        orders: where orders come from.
        secret: what messages begin with.
        hello: what is said first.

    Raises:
        zmq.ZMQError: no socket could be had.
    """

    def __init__(self, rank: int, reports: str, orders: str, secret: bytes, hello: Hello) -> None:
        self._inbox = Inbox(secret, decode_orders)
        self._context = zmq.Context()
        try:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, _QUEUE)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(reports)
            self._reports = Outbox(socket, secret)
            self._orders = self._context.socket(zmq.DEALER)
            self._orders.setsockopt(zmq.IDENTITY, b"%d.%s" % (rank, secrets.token_bytes(8)))
            self._orders.setsockopt(zmq.RCVHWM, _QUEUE)
            self._orders.setsockopt(zmq.MAXMSGSIZE, _MAX_ORDERS_BYTES)
            self._orders.setsockopt(zmq.LINGER, 0)
            self._orders.connect(orders)
            self._orders.send(secret + encode(hello), zmq.NOBLOCK)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    @property
    def malformed(self) -> int:
        """Messages that were not orders."""
        return self._inbox.malformed

    def receive(self, seconds: float) -> tuple[Order, ...]:
        """Orders, after a wait of at most so long; what is none is passed over."""
        try:
            if not self._orders.poll(int(seconds * 1000)):
                return ()
        except zmq.ZMQError:
            return ()
        messages = self._inbox.drain(self._orders, 1)
        return messages[0].orders if messages else ()

    def send(self, report: RankReport) -> bool:
        """Whether the report is on its way."""
        return self._reports.send(encode(report))

    def close(self) -> None:
        """The receiving thread must have ended."""
        self._reports.close(lambda: self._context.destroy(linger=0))
