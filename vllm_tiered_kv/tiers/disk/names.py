# SPDX-License-Identifier: Apache-2.0
"""The names of folders and files. Pure; whatever is not exactly ours is foreign."""

from __future__ import annotations

import re

import msgspec

MAX_KEY_BYTES = 96
"""A block hash, maybe followed by an adapter's digest."""
MAX_NAMESPACE_LENGTH = 128
MAX_RANK = 0xFFFF
MAX_GROUP = 0xFFFF

TEMP_FOLDER = "tmp"
IDENTITY_FILE = "identity.json"
IDENTITY_TOKEN = "identity-"
"""What the name of a temporary file begins with that is to become an identity file."""

_NUMBER = r"0|[1-9][0-9]{0,4}"
_NAMESPACE = re.compile(rf"[0-9a-z-]{{1,{MAX_NAMESPACE_LENGTH}}}")
_MODEL = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")
_RANK = re.compile(rf"r({_NUMBER})")
_SHARD = re.compile(r"[0-9a-f]{2}")
_CHUNK = re.compile(rf"((?:[0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}})\.({_NUMBER})\.kv")
_TEMP = re.compile(rf"(?:{IDENTITY_TOKEN})?[0-9a-f]{{24}}\.tmp")
_MARK = re.compile(r"distrusted-([0-9]{1,19})\.mark")


class ChunkName(msgspec.Struct, frozen=True):
    """Which part of which chunk a file is named after."""

    key: bytes
    group: int


def valid_key(key: bytes) -> bool:
    return 1 <= len(key) <= MAX_KEY_BYTES


def valid_namespace(name: str) -> bool:
    return _NAMESPACE.fullmatch(name) is not None


def is_models_namespace(name: str) -> bool:
    """Whether it is named by two digests, as those of models are; see `identity.namespace`."""
    return _MODEL.fullmatch(name) is not None


def valid_rank(rank: int) -> bool:
    return 0 <= rank <= MAX_RANK


def valid_group(group: int) -> bool:
    return 0 <= group <= MAX_GROUP


def chunk_file(key: bytes, group: int) -> str | None:
    """The file's name; None where there is no such name."""
    return f"{key.hex()}.{group}.kv" if valid_key(key) and valid_group(group) else None


def parse_chunk_file(name: str) -> ChunkName | None:
    match = _CHUNK.fullmatch(name)
    if match is None or int(match[2]) > MAX_GROUP:
        return None
    return ChunkName(bytes.fromhex(match[1]), int(match[2]))


def shard_folder(key: bytes) -> str:
    """The folder of a key's files within the rank's."""
    return key[:1].hex()


def is_shard_folder(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None


def rank_folder(rank: int) -> str:
    return f"r{rank}"


def parse_rank_folder(name: str) -> int | None:
    match = _RANK.fullmatch(name)
    rank = None if match is None else int(match[1])
    return rank if rank is not None and valid_rank(rank) else None


def temp_file(token: str) -> str:
    """Args: token: 24 hexadecimal digits, or these behind :data:`IDENTITY_TOKEN`."""
    return f"{token}.tmp"


def is_temp_file(name: str) -> bool:
    """Whether it is one of ours: the folder may be others' as well, and old ones are removed."""
    return _TEMP.fullmatch(name) is not None


def mark_file(since_ns: int) -> str | None:
    """Args: since_ns: nanoseconds since the epoch. None where there is no such name."""
    return f"distrusted-{since_ns}.mark" if 0 <= since_ns < 10**19 else None


def parse_mark_file(name: str) -> int | None:
    match = _MARK.fullmatch(name)
    return None if match is None else int(match[1])
