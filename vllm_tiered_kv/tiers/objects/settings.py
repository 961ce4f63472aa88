# SPDX-License-Identifier: Apache-2.0
"""The options of a folder of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_tiered_kv.config import ConfigError, FolderOptions, Size, check_folder, decode_options
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES, TierSettings

MAX_THREADS = 64
MAX_REVISION = 256
LONGEST_DEADLINE = 120.0
"""Seconds. What waits and is then read or written is answered within twice as long: hosts lend
their memory for a few minutes (LMCache for five) and then take it back unasked."""
LEAST_CAPACITY = 8 * FOLDER_BYTES
"""Folders alone take an eighth of it."""


class ObjectOptions(FolderOptions, frozen=True, forbid_unknown_fields=True):
    """Where objects are kept, and how."""

    readers: int = 4
    """Threads that read."""
    writers: int = 2
    """Threads that write."""
    max_queued: Size | None = None
    """Bytes of objects that may wait to be written; None: half of the host's own tier."""
    revision: str = ""
    """Anything that changes when the model's weights do: part of every object's identity."""


def parse_object_options(raw: Mapping[str, Any], root: str) -> ObjectOptions:
    """Check and convert the options.

    Args:
        raw: what was given.
        root: what the whole of it is called.

    Raises:
        ConfigError: naming the key, the value and the nearest valid key.
    """
    options = decode_options(raw, ObjectOptions, root)
    check_folder(options)
    if options.capacity < LEAST_CAPACITY:
        raise ConfigError(
            f"capacity: {options.capacity!r} must be at least {LEAST_CAPACITY}: "
            "folders alone take an eighth of that"
        )
    if options.io_deadline > LONGEST_DEADLINE:
        raise ConfigError(
            f"io_deadline: {options.io_deadline!r} must be at most {LONGEST_DEADLINE:g} seconds"
        )
    for key, threads in (("readers", options.readers), ("writers", options.writers)):
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"{key}: {threads!r} must be from 1 to {MAX_THREADS}")
    if len(options.revision) > MAX_REVISION:
        raise ConfigError(f"revision: must have at most {MAX_REVISION} characters")
    return options


def tier_settings(options: ObjectOptions) -> TierSettings:
    """What quota and upkeep go by."""
    return TierSettings(
        root=options.path,
        capacity=int(options.capacity),
        high_water=options.high_water,
        low_water=options.low_water,
        min_free=int(options.min_free),
        shared=options.shared,
        io_deadline=options.io_deadline,
        ranks=1,
        file_bytes=(),
        max_queued=0,
    )
