# SPDX-License-Identifier: Apache-2.0
"""How many bytes a hit takes: pure arithmetic on the cut."""

from __future__ import annotations

from vllm_tiered_kv.geometry import Geometry, GroupKind


class HitBytes:
    """Bytes that are moved for a hit, over all ranks.

    Args:
        geometry: the cut.
        ranks: that each hold a part of every chunk.
    """

    def __init__(self, geometry: Geometry, ranks: int) -> None:
        self._full = 0
        """Of a chunk, in groups that need every chunk."""
        self._tails: list[tuple[int, int]] = []
        """For the other groups the bytes of a chunk's part, and how many chunks need one."""
        for i, group in enumerate(geometry.groups):
            nbytes = geometry.part_bytes(i) * ranks
            if group.kind is GroupKind.FULL:
                self._full += nbytes
            else:
                window = group.window if group.kind is GroupKind.WINDOW else 1
                self._tails.append((nbytes, -(-window // geometry.chunk_tokens)))

    def of(self, chunks: int) -> int:
        """Of a hit of so many chunks."""
        tails = sum(nbytes * min(chunks, most) for nbytes, most in self._tails)
        return self._full * chunks + tails
