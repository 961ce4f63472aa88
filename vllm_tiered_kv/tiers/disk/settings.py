# SPDX-License-Identifier: Apache-2.0
"""What the disk tier is built from, as far as its decisions go."""

from __future__ import annotations

import msgspec

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
