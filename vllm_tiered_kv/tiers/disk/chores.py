# SPDX-License-Identifier: Apache-2.0
"""What the keeper is asked to do, and what it tells of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.entries import NEVER, FileName, FoundFile

BATCH = 256
"""Files in one chore or one piece of news."""


class Prepare(msgspec.Struct, frozen=True):
    """Make the folder ready: create it, say what the namespace is, find out what it can do."""

    namespace: str
    identity: Mapping[str, object]


class Scan(msgspec.Struct, frozen=True):
    """Go through the whole folder, and remove what was left behind in it.

    The folders of our own ranks are not counted, nor temporary files of our namespace that were
    changed within ``young`` seconds: their writers may be at them.
    """

    namespace: str
    ranks: int
    young: float


class Remove(msgspec.Struct, frozen=True):
    """Remove files."""

    files: Sequence[FileName]


class Mark(msgspec.Struct, frozen=True):
    """Leave word that what was written in this process's life may be wrong; see `marks`."""

    namespace: str


class Unmark(msgspec.Struct, frozen=True):
    """All of that is gone."""

    namespace: str


class Touch(msgspec.Struct, frozen=True):
    """Write down when files were used, for later starts and other engines."""

    files: Sequence[tuple[FileName, int]]


class Probe(msgspec.Struct, frozen=True):
    """See which of these files are there: others may have written them since the scan."""

    job: int
    files: Sequence[FileName]


class Measure(msgspec.Struct, frozen=True):
    """See how much room the file system has."""


Chore = Prepare | Scan | Remove | Mark | Unmark | Touch | Probe | Measure


class Prepared(msgspec.Struct, frozen=True):
    mode: IoMode
    full: bool = False
    """Whether nothing can be written for want of room; what is there can be read, and removed."""


class ScanPiece(msgspec.Struct, frozen=True):
    files: Sequence[FoundFile]
    since_ns: int = NEVER
    """Those used since then, nanoseconds since the epoch, were used since the scan before."""


class ScanEnded(msgspec.Struct, frozen=True):
    """The scan is through; what else than chunks lies there takes so many bytes."""

    other_bytes: int
    seconds: float
    missed: int
    """Folders and files that could not be looked at."""


class Removed(msgspec.Struct, frozen=True):
    gone: Sequence[FileName]
    stuck: Sequence[FileName]
    """Files that could not be removed."""


class Probed(msgspec.Struct, frozen=True):
    job: int
    there: Sequence[FoundFile]


class Measured(msgspec.Struct, frozen=True):
    free_bytes: int


class Trouble(msgspec.Struct, frozen=True):
    """A chore could not be done."""

    chore: Chore
    reason: str


News = Prepared | ScanPiece | ScanEnded | Removed | Probed | Measured | Trouble
