# SPDX-License-Identifier: Apache-2.0
"""Which files make a group's part of a chunk whole: one of each rank that has the group."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

from vllm_tiered_kv.bits import bit_mask, bits_of
from vllm_tiered_kv.tiers.disk.entries import MAX_GROUPS, file_bit


class Whole:
    """The files, as sets of bits (:func:`.entries.file_bit`).

    Args:
        ranks: of the engine; each has all groups until it is known better.
    """

    def __init__(self, ranks: int) -> None:
        self._files = [_files(range(ranks), group) for group in range(MAX_GROUPS)]

    def ranks_have(self, groups: Sequence[int]) -> bool:
        """Which groups each rank has layers of, as bits; whether that is news.

        Pipeline stages may differ in that: of the other groups a rank has no files.
        """
        is_news = False
        for group in bits_of(functools.reduce(operator.or_, groups, 0)):
            ranks = [rank for rank, mask in enumerate(groups) if mask >> group & 1]
            files = _files(ranks, group)
            is_news |= files != self._files[group]
            self._files[group] = files
        return is_news

    def a_rank_with(self, group: int) -> int:
        """The first rank that has files of a group."""
        files = self._files[group]
        return ((files & -files).bit_length() - 1) // MAX_GROUPS

    def is_one(self, files: int, group: int) -> bool:
        """Whether these files make the group's part whole."""
        whole = self._files[group]
        return files & whole == whole

    def groups(self, files: int, among: int) -> int:
        """Those of the groups ``among``, as bits, that these files make whole."""
        return bit_mask(group for group in bits_of(among) if self.is_one(files, group))


def _files(ranks: Sequence[int], group: int) -> int:
    return sum(file_bit(rank, group) for rank in ranks)
