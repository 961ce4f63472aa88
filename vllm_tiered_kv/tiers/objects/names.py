# SPDX-License-Identifier: Apache-2.0
"""What an object's file is called. Pure."""

from __future__ import annotations

import hashlib

import msgspec

from vllm_tiered_kv.tiers.disk.entries import MAX_GROUPS, FileName
from vllm_tiered_kv.tiers.disk.names import MAX_KEY_BYTES

MAX_RANK = (1 << 64) - 1

_RANK_BYTES = 8
_SALT_BYTES = 16
_SUFFIX = _RANK_BYTES + _SALT_BYTES
_DIGITS = 32
"""Of a digest: 128 bits of SHA-256."""


class Family(msgspec.Struct, frozen=True):
    """Objects that one model makes, whatever their layout."""

    kind: str
    """The host program: lower-case letters."""
    model: str
    revision: str = ""
    """What else the bytes depend on and the host does not say."""

    @property
    def prefix(self) -> str:
        """What the names of its namespaces begin with."""
        return f"{self.kind}-{_digest(self.kind, self.model, self.revision)}"


class ObjectId(msgspec.Struct, frozen=True):
    """One object as the host names it: its layout is not known."""

    family: str
    """:attr:`Family.prefix`."""
    group: int
    key: bytes

    def file(self, namespace: str) -> FileName:
        return FileName(namespace, 0, self.group, self.key)


class KeyParts(msgspec.Struct, frozen=True):
    """What :func:`object_key` has put together."""

    chunk_hash: bytes
    rank: int
    salt: bytes
    """:func:`salt_digest` of it."""


def object_key(chunk_hash: bytes, rank: int, salt: str) -> bytes | None:
    """The key of a chunk's part of one rank; names must not tell salts.

    Returns:
        None if there can't be one: the hash is empty or too long, or the rank out of bounds.
    """
    if not 1 <= len(chunk_hash) <= MAX_KEY_BYTES - _SUFFIX or not 0 <= rank <= MAX_RANK:
        return None
    return chunk_hash + rank.to_bytes(_RANK_BYTES, "big") + salt_digest(salt)


def split_key(key: bytes) -> KeyParts | None:
    """The parts of a key; None for what is none."""
    if len(key) <= _SUFFIX:
        return None
    rank = int.from_bytes(key[-_SUFFIX:-_SALT_BYTES], "big")
    return KeyParts(key[:-_SUFFIX], rank, key[-_SALT_BYTES:])


def salt_digest(salt: str) -> bytes:
    return hashlib.sha256(salt.encode(errors="surrogatepass")).digest()[:_SALT_BYTES]


def valid_group(group: int) -> bool:
    return 0 <= group < MAX_GROUPS


def namespace_of(family: str, layout: str) -> str:
    """The namespace of objects of one layout."""
    return f"{family}-{_digest('layout', layout)}"


def family_of(namespace: str) -> str:
    """The :attr:`Family.prefix` of a namespace."""
    return namespace.rpartition("-")[0]


def _digest(*parts: str) -> str:
    data = msgspec.msgpack.encode([part.encode(errors="surrogatepass") for part in parts])
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
