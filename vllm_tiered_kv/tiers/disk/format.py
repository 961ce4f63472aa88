# SPDX-License-Identifier: Apache-2.0
"""What is in a file: a header of 4096 bytes, then the payload, padded with zeros. Pure.

===========  ==============================================================
bytes        content
===========  ==============================================================
0 to 7       magic
8 and 9      version of this format, little-endian
10 and 11    length `n` of the body, little-endian
12 to 27     XXH3-128 of the header without these 16 bytes
28 to 27+n   the body: a MessagePack array, `_Body`
to 4095      zeros
===========  ==============================================================

Nothing in a file decides how much is read or where it goes: the caller says what it expects, and
a file that says anything else is refused. The checksums find damage, not forgery.
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from vllm_tiered_kv.tiers.disk.names import (
    MAX_GROUP,
    MAX_KEY_BYTES,
    MAX_NAMESPACE_LENGTH,
    MAX_RANK,
)

ALIGNMENT = 4096
"""Of memory, offsets and lengths in bytes, as `O_DIRECT` wants them."""
HEADER_BYTES = 4096
MAX_PAYLOAD_BYTES = 1 << 40
MAX_COUNT = (1 << 63) - 1
"""Of what is counted, so that it fits 64 bits with a sign."""

MAGIC = b"TKVCHUNK"
VERSION = 1

_PROLOGUE = struct.Struct("<8sHH16s")
_CHECKSUM = slice(12, 28)
_ROOM = HEADER_BYTES - _PROLOGUE.size

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
_Key = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
_Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class ChunkId(msgspec.Struct, frozen=True):
    """Which file this is: one group's part of one chunk, of one rank."""

    namespace: Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_LENGTH)]
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)]
    key: _Key
    group: Annotated[int, Meta(ge=0, le=MAX_GROUP)]


class ChunkFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a chunk besides its bytes. Nothing is decided by it when it is read."""

    block_hashes: Annotated[tuple[_Key, ...], Meta(max_length=_ROOM)]
    """Of the chunk's blocks, from the first. Fewer than `num_blocks` where not all fit."""
    num_blocks: _Count
    index: _Count
    """Of the chunk in its prefix; 0 for the first."""
    tokens: _Count
    """How many tokens it covers."""


class Header(msgspec.Struct, frozen=True):
    """A header that belongs to the file that was asked for."""

    facts: ChunkFacts
    payload_checksum: bytes
    """XXH3-128 of the payload with its padding: 16 bytes."""


class Reason(enum.Enum):
    """Why a file is not what was asked for: it is damaged, or was put there under a wrong name."""

    SHORT = "short"
    """It ended before all was read."""
    SIZE = "size"
    """The file is smaller or larger than it should be."""
    MAGIC = "magic"
    VERSION = "version"
    CHECKSUM = "checksum"
    """The header's."""
    MALFORMED = "malformed"
    """The header is whole but says what it can't."""
    NAMESPACE = "namespace"
    RANK = "rank"
    KEY = "key"
    GROUP = "group"
    LENGTH = "length"
    PAYLOAD = "payload"
    """The payload's checksum."""
    PADDING = "padding"
    """What follows the payload is not zero."""


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: Annotated[str, Meta(min_length=1, max_length=MAX_NAMESPACE_LENGTH)]
    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)]
    group: Annotated[int, Meta(ge=0, le=MAX_GROUP)]
    key: _Key
    nbytes: Annotated[int, Meta(ge=1, le=MAX_PAYLOAD_BYTES)]
    payload_checksum: _Digest
    facts: ChunkFacts


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def file_bytes(nbytes: int) -> int:
    """The size of a file with a payload of `nbytes` bytes."""
    return HEADER_BYTES + padded(nbytes)


def checksum(data: memoryview) -> bytes:
    """XXH3-128: 16 bytes. Other threads run meanwhile: xxhash lets go of the interpreter's lock."""
    hasher = xxhash.xxh3_128()
    hasher.update(data)
    return hasher.digest()


def encode_header(
    chunk: ChunkId, nbytes: int, payload_checksum: bytes, facts: ChunkFacts
) -> bytes | None:
    """The `HEADER_BYTES` of a header; as many of the block hashes as fit.

    None where it couldn't be read again: something is out of bounds.

    Args:
        nbytes: of the payload without padding.
        payload_checksum: `checksum` of the payload with its padding.
    """
    body = _Body(
        chunk.namespace, chunk.rank, chunk.group, chunk.key, nbytes, payload_checksum, facts
    )
    try:
        encoded = _encoder.encode(body)
        if len(encoded) > _ROOM:
            kept = _that_fit(facts.block_hashes, len(encoded) - _ROOM)
            facts = msgspec.structs.replace(facts, block_hashes=kept)
            encoded = _encoder.encode(msgspec.structs.replace(body, facts=facts))
        if len(encoded) > _ROOM or _decoder.decode(encoded).facts != facts:
            return None
    except (ValueError, TypeError, OverflowError):  # of msgspec's errors, too
        return None
    header = bytearray(HEADER_BYTES)
    _PROLOGUE.pack_into(header, 0, MAGIC, VERSION, len(encoded), bytes(16))
    header[_PROLOGUE.size : _PROLOGUE.size + len(encoded)] = encoded
    header[_CHECKSUM] = _header_checksum(memoryview(header))
    return bytes(header)


def check_header(header: memoryview, expected: ChunkId, nbytes: int) -> Header | Reason:
    """What the header says, if it is whole and of the expected file.

    Args:
        header: at least the first `HEADER_BYTES` of the file.
        nbytes: the expected length of the payload without padding.
    """
    if header.nbytes < HEADER_BYTES:
        return Reason.SHORT
    header = header[:HEADER_BYTES]
    magic, version, length, digest = _PROLOGUE.unpack_from(header)
    if magic != MAGIC:
        return Reason.MAGIC
    if version != VERSION:
        return Reason.VERSION
    if digest != _header_checksum(header):
        return Reason.CHECKSUM
    if length > _ROOM or not is_zero(header[_PROLOGUE.size + length :]):
        return Reason.MALFORMED
    try:
        body = _decoder.decode(header[_PROLOGUE.size : _PROLOGUE.size + length])
    except (ValueError, RecursionError):
        return Reason.MALFORMED
    for same, reason in (
        (body.namespace == expected.namespace, Reason.NAMESPACE),
        (body.rank == expected.rank, Reason.RANK),
        (body.key == expected.key, Reason.KEY),
        (body.group == expected.group, Reason.GROUP),
        (body.nbytes == nbytes, Reason.LENGTH),
    ):
        if not same:
            return reason
    return Header(body.facts, body.payload_checksum)


def check_payload(payload: memoryview, nbytes: int, header: Header) -> Reason | None:
    """Args: payload: with its padding. None if it is what was written."""
    if not is_zero(payload[nbytes:]):
        return Reason.PADDING
    return None if checksum(payload) == header.payload_checksum else Reason.PAYLOAD


def is_zero(data: memoryview) -> bool:
    return bytes(data) == bytes(data.nbytes)


def _header_checksum(header: memoryview) -> bytes:
    hasher = xxhash.xxh3_128()
    hasher.update(header[: _CHECKSUM.start])
    hasher.update(header[_CHECKSUM.stop :])
    return hasher.digest()


def _that_fit(hashes: tuple[bytes, ...], excess: int) -> tuple[bytes, ...]:
    """Without the last ones, which give at least `excess` bytes (and a head of 2 bytes each)."""
    count = len(hashes)
    while count and excess > 0:
        count -= 1
        excess -= len(hashes[count]) + 2
    return hashes[:count]
