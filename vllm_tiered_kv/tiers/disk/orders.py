# SPDX-License-Identifier: Apache-2.0
"""What the disk agent and the ranks say to each other: typed, bounded, decoded after the secret.

The agent orders, a rank reports. An order names a chunk and the slots of its parts; each rank
does it with its own files and answers once.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from vllm_tiered_kv.protocol import JobResult
from vllm_tiered_kv.tiers.disk.format import ChunkFacts

MAX_ORDERS = 64
"""Orders in one message."""
MAX_RESULTS = 256
"""Results in one message."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Key = Annotated[bytes, msgspec.Meta(min_length=1, max_length=96)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One KV cache group's part of a chunk."""

    group: Count
    slot: Count


Parts = Annotated[tuple[Part, ...], msgspec.Meta(min_length=1, max_length=64)]


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """The first thing a rank says."""

    part_bytes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)]
    """By KV cache group the bytes of a chunk's part there; 0 where it has no layer of the group."""


class OpenFolder(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """From now on orders may come: the namespace is known and its folder is there."""

    root: Text
    namespace: Text
    direct: bool
    """Whether the file system takes direct I/O."""


class WriteOrder(msgspec.Struct, frozen=True, array_like=True, tag="write"):
    """Write a chunk's parts out of their slots."""

    job: Count
    key: Key
    parts: Parts
    facts: ChunkFacts
    used_ns: Count
    """When the chunk was last used, nanoseconds since the epoch."""


class ReadOrder(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Read a chunk's parts into their slots."""

    job: Count
    key: Key
    parts: Parts
    patience: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    """Seconds this may wait before it begins."""


class CancelReads(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Reads that nobody waits for any more; those that have begun go on."""

    jobs: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ORDERS)]


Order = OpenFolder | WriteOrder | ReadOrder | CancelReads


class Orders(msgspec.Struct, frozen=True, array_like=True):
    """One message to a rank."""

    orders: Annotated[tuple[Order, ...], msgspec.Meta(max_length=MAX_ORDERS)]


class Outcome(enum.Enum):
    """How an order ended on a rank, from good to bad."""

    DONE = "done"
    DROPPED = "dropped"  # not begun: late, cancelled, no room in the queue, shutdown
    MISSING = "missing"  # there was no such file
    DAMAGED = "damaged"  # it was not what it should have been, and is gone
    FAILED = "failed"  # an I/O error, which says nothing about the file


WORSE = {outcome: i for i, outcome in enumerate(Outcome)}


class OrderResult(msgspec.Struct, frozen=True, array_like=True):
    """How one order ended on one rank."""

    job: Count
    outcome: Outcome
    nbytes: Count = 0
    """Bytes that were read, or that new files take."""
    sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=64)] = ()
    """For each part that was done, in order, the bytes of its file, which is there now."""
    seconds: float = 0.0
    reason: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """What went wrong, for the log."""


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """One message to the agent."""

    rank: Count
    results: Annotated[tuple[OrderResult, ...], msgspec.Meta(max_length=MAX_RESULTS)] = ()
    stores: Annotated[tuple[JobResult, ...], msgspec.Meta(max_length=MAX_RESULTS)] = ()
    """Copies out of the device that have ended: what is in their slots may be written."""


_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Orders)
_report = msgspec.msgpack.Decoder(RankReport)
_hello = msgspec.msgpack.Decoder(Hello)


def encode(message: Orders | RankReport | Hello) -> bytes:
    return _encoder.encode(message)


def decode_orders(data: bytes) -> Orders:
    """Read a message to a rank.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _orders.decode(data)


def decode_hello(data: bytes) -> Hello:
    """Read a rank's first message.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _hello.decode(data)


def decode_report(data: bytes) -> RankReport:
    """Read a message to the agent.

    Raises:
        msgspec.DecodeError: it is not one.
    """
    return _report.decode(data)
