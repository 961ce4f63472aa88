# SPDX-License-Identifier: Apache-2.0
"""Which blocks belong to several chunks: prompts that part ways inside a chunk share its head.

Whoever follows events keeps a set of blocks. So a block may be taken back only when the last
chunk that holds it goes.
"""

from __future__ import annotations

from collections.abc import Sequence

Counts = dict[tuple[int, bytes], int]


class SharedHeads:
    """Chunks by their first block. Every call costs the blocks it is given.

    Hardly any chunk has siblings, so one that has none is only noted by its key.
    """

    def __init__(self) -> None:
        self._families: dict[bytes, tuple[int, tuple[bytes, ...]] | Counts] = {}

    def __len__(self) -> int:
        return len(self._families)

    def add(self, hashes: tuple[bytes, ...], groups: int) -> None:
        """A chunk is held by the groups of a bit mask."""
        family = self._families.get(hashes[0])
        if family is None:
            self._families[hashes[0]] = (groups, hashes)
            return
        if isinstance(family, tuple):
            family = self._families[hashes[0]] = _count({}, family[1], family[0], 1)
        _count(family, hashes, groups, 1)

    def remove(self, hashes: tuple[bytes, ...], groups: int) -> None:
        """Undo one :meth:`add`, given the same."""
        family = self._families.get(hashes[0])
        if isinstance(family, dict):
            _count(family, hashes, groups, -1)
        if isinstance(family, tuple) or not family:
            self._families.pop(hashes[0], None)

    def kept(self, hashes: tuple[bytes, ...], group: int) -> int:
        """How many of a chunk's blocks, from its head, others hold in a group."""
        family = self._families.get(hashes[0])
        if family is None:
            return 0
        if isinstance(family, tuple):
            groups, others = family
            if not groups >> group & 1:
                return 0
            same = (a == b for a, b in zip(hashes, others, strict=True))
            return next((i for i, equal in enumerate(same) if not equal), len(hashes))
        held = (family.get((group, block_hash), 0) for block_hash in hashes)
        return next((i for i, count in enumerate(held) if not count), len(hashes))


def _count(counts: Counts, hashes: Sequence[bytes], groups: int, step: int) -> Counts:
    for group in range(groups.bit_length()):
        if not groups >> group & 1:
            continue
        for block_hash in hashes:
            key = (group, block_hash)
            counts[key] = counts.get(key, 0) + step
            if not counts[key]:
                del counts[key]
    return counts
