# SPDX-License-Identifier: Apache-2.0
"""The side channel: what ranks report between steps reaches the scheduler half.

Nothing wakes an idle engine, so a store that ends after the last step would be known only
after the next request's look-up. The ranks therefore push their reports over a local
ZeroMQ socket as well, and the scheduler half drains it at the start of its hooks.

The socket lies in Linux's abstract namespace: there is no file that a killed engine could
leave behind. Whoever runs on the host could write to it, so each message begins with a
secret that travels only with the plans; without it nothing is parsed.

Losing the channel loses nothing but promptness: every report also travels with vLLM's
worker metadata, and results count once however often they come.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import zmq

from vllm_tiered_kv.messages import Inbox, Outbox, new_address, new_secret
from vllm_tiered_kv.protocol import WorkerReport, decode_report, encode_report

_QUEUE = 1024  # messages
_MAX_MESSAGE = 4096  # bytes: a report here is one result


class SchedulerEndpoint:
    """The receiving end. Scheduler thread only."""

    def __init__(self) -> None:
        self.address = new_address()
        self.secret = new_secret()
        self._inbox = Inbox(self.secret, decode_report)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._closer = _closes(self, self._socket, self._context)
        try:
            # The queue's bound is one of each connection: nobody else may open any.
            self._socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
            self._socket.bind(self.address)
        except zmq.ZMQError:
            self.close()
            raise

    @property
    def malformed(self) -> int:
        """Messages that were not reports."""
        return self._inbox.malformed

    def drain(self, limit: int = 64) -> list[WorkerReport]:
        """What has arrived, without waiting; at most ``limit`` reports."""
        return self._inbox.drain(self._socket, limit)

    def close(self) -> None:
        self._closer()


def _closes(
    owner: object, socket: zmq.Socket[bytes], context: zmq.Context[Any]
) -> Callable[[], Any]:
    """Closes both, when called or when the owner is dropped.

    An engine that fails to start drops its connector without a word; a context that is collected
    before its socket would wait for that forever.
    """

    def close() -> None:
        socket.close(linger=0)
        context.term()

    return weakref.finalize(owner, close)


class WorkerEndpoint:
    """The sending end of one rank; any thread. Never waits, never raises."""

    def __init__(self, address: str, secret: bytes) -> None:
        self._outbox: Outbox | None = None
        self._context = zmq.Context()
        try:
            socket = self._context.socket(zmq.PUSH)
            self._closer = _closes(self, socket, self._context)
            socket.setsockopt(zmq.SNDHWM, _QUEUE)
            socket.setsockopt(zmq.LINGER, 0)
            self._outbox = Outbox(socket, secret)
            socket.connect(address)
        except zmq.ZMQError:  # such as too many open files: worker metadata is enough
            self.close()

    def send(self, report: WorkerReport) -> bool:
        """Whether the report is on its way; if not, worker metadata still carries it."""
        return self._outbox is not None and self._outbox.send(encode_report(report))

    def close(self) -> None:
        if self._outbox is not None:
            self._outbox.close(self._closer)
