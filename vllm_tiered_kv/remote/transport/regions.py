# SPDX-License-Identifier: Apache-2.0
"""Which addresses may be read and written: nothing else is ever handed to NIXL.

Registration doesn't protect anything there (a wrong address reads memory that was never
registered, or ends the process that it is read from), so every run is looked up here first, on
both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_tiered_kv.remote.transport import MAX_REGIONS, MemoryKind, Region

if TYPE_CHECKING:
    from vllm_tiered_kv.remote.transport import Int64s

_TOP = np.iinfo(np.int64).max


class RegionError(ValueError):
    """These regions can't be registered together; says why."""


class RegionTable:
    """Regions by address.

    Raises:
        RegionError: none, too many, an empty one, one that ends beyond the address space, or two
            that overlap.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        if not 0 < len(regions) <= MAX_REGIONS:
            raise RegionError(f"between 1 and {MAX_REGIONS} regions are registered, {len(regions)}")
        ordered = sorted(regions, key=lambda region: region.base)
        for region in ordered:
            if region.base < 1 or region.nbytes < 1 or region.base > _TOP - region.nbytes:
                raise RegionError(f"{region.nbytes} bytes at {region.base:#x} are no region")
        for low, high in itertools.pairwise(ordered):
            if low.base + low.nbytes > high.base:
                raise RegionError(f"the regions at {low.base:#x} and {high.base:#x} overlap")
        self.regions = tuple(ordered)
        self.nbytes = sum(region.nbytes for region in ordered)
        self.devices: Int64s = np.array([region.device for region in ordered], dtype=np.int64)
        self.has_devices = any(region.kind is MemoryKind.VRAM for region in ordered)
        self.on_device = np.array([region.kind is MemoryKind.VRAM for region in ordered])
        self._bases: Int64s = np.array([region.base for region in ordered], dtype=np.int64)
        self._ends = self._bases + np.array([region.nbytes for region in ordered], dtype=np.int64)

    def find(self, addresses: Int64s, nbytes: Int64s) -> Int64s | None:
        """The index of the region that each run lies in as a whole.

        None if a run is empty, or isn't wholly in one region.
        """
        index = np.searchsorted(self._bases, addresses, side="right") - 1
        if index.min() < 0 or nbytes.min() < 1:
            return None
        # Both are positive: the difference does not overflow.
        if not (nbytes <= self._ends[index] - addresses).all():
            return None
        return index.astype(np.int64, copy=False)
