# SPDX-License-Identifier: Apache-2.0
"""How chunks and their files are named in memory, and sets of one chunk's files as bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

MAX_GROUPS = 64
"""KV cache groups of a model."""
MAX_RANKS = 1024
NEVER = 1 << 63
"""A time that no file has, nanoseconds since the epoch."""


class ChunkName(NamedTuple):
    """A chunk of any namespace."""

    namespace: str
    key: bytes


class FileName(NamedTuple):
    """One rank's file of one KV cache group's part of a chunk."""

    namespace: str
    rank: int
    group: int
    key: bytes


class FoundFile(NamedTuple):
    """A file as a scan finds it."""

    name: FileName
    nbytes: int
    used_ns: int
    """When it was last used, nanoseconds since the epoch."""


PolicyKey: TypeAlias = bytes | ChunkName
"""A chunk in the order of eviction: one of ours by its key alone, which takes less memory."""


def file_bit(rank: int, group: int) -> int:
    """One rank's file of one KV cache group, in a set of a chunk's files."""
    return 1 << (rank * MAX_GROUPS + group)


def files_of(name: ChunkName, files: int) -> Iterator[FileName]:
    """A set of a chunk's files, one by one."""
    while files:
        bit = (files & -files).bit_length() - 1
        files &= files - 1
        yield FileName(name.namespace, bit // MAX_GROUPS, bit % MAX_GROUPS, name.key)


def groups_in(files: int) -> int:
    """The KV cache groups, as bits, of which a set of files has any."""
    groups = 0
    while files:
        groups |= files & ((1 << MAX_GROUPS) - 1)
        files >>= MAX_GROUPS
    return groups
