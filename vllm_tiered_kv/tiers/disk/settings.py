# SPDX-License-Identifier: Apache-2.0
"""What the disk tier is built from, as far as its decisions go."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.config import ConfigError, DiskOptions, format_size
from vllm_tiered_kv.tiers.disk.format import file_bytes

FOLDER_BYTES = 260 * 4096
"""What a rank's folders take."""
ENTRY_BYTES = 160
"""What a file's name takes in its folder: folders grow with the files in them."""


class TierSettings(msgspec.Struct, frozen=True):
    """All that is known at start."""

    root: str
    capacity: int
    """Bytes the whole folder may hold."""
    high_water: float
    """Share of the capacity from which chunks are evicted in the background ..."""
    low_water: float
    """... down to this one."""
    min_free: int
    """Bytes of the file system that stay free."""
    shared: bool
    """Others write to the folder meanwhile, and what they write is to be found."""
    io_deadline: float
    """Seconds after which an order counts as hung."""
    ranks: int
    file_bytes: tuple[int, ...]
    """By KV cache group the most bytes a rank's file takes."""
    max_queued: int
    """Writes that may wait; each holds its slots."""


def check_room(options: DiskOptions, parts: Sequence[int], ranks: int) -> None:
    """Refuse a capacity which cannot hold one chunk.

    Args:
        options: of the disk tier.
        parts: bytes of a chunk's part in each KV cache group, on the largest rank.
        ranks: ranks of the engine.

    Raises:
        ConfigError: naming the key, the value and the least that is enough.
    """
    files = sum(map(file_bytes, parts))
    floor = math.ceil((files + FOLDER_BYTES) * ranks / options.high_water)
    if options.capacity < floor:
        raise ConfigError(
            f"disk.capacity: {format_size(options.capacity)} cannot hold one chunk over all ranks "
            f"({format_size(floor)} with its folders); give at least that"
        )
