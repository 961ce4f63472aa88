# SPDX-License-Identifier: Apache-2.0
"""What became of a file that was to be written or read."""

from __future__ import annotations

import enum

import msgspec

from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.format import ChunkFacts, Reason


class WriteStatus(enum.Enum):
    WRITTEN = "written"
    EXISTED = "existed"
    """A file of this name and size was there; its content was not looked at."""
    FAILED = "failed"


class ReadStatus(enum.Enum):
    OK = "ok"
    MISSING = "missing"
    DAMAGED = "damaged"
    """What was read is not what was written; the file was removed, unless that failed."""
    FAILED = "failed"
    """It could not be read now; the file was left alone."""


class Written(msgspec.Struct, frozen=True):
    status: WriteStatus
    nbytes: int = 0
    """The file's size; 0 where there is none."""
    reason: FailureReason | None = None


class Read(msgspec.Struct, frozen=True):
    status: ReadStatus
    reason: Reason | FailureReason | None = None
    facts: ChunkFacts | None = None
    """With `OK`."""
    nbytes: int = 0
    """The file's size, with `OK`."""
