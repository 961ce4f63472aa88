# SPDX-License-Identifier: Apache-2.0
"""Where a hit can end when several KV cache groups must agree: pure functions.

A full-attention group needs every chunk of a hit; a sliding-window group those its window still
sees from the hit's end, a state group the last. What lies before ``start`` is on the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm_tiered_kv.geometry import Geometry, GroupKind
from vllm_tiered_kv.scheduler.index import Node


def usable_ends(geometry: Geometry, run: Sequence[Node], first: int, start: int) -> Sequence[int]:
    """How many nodes of a run, from its head, can be loaded together: all the ways, shortest first.

    Args:
        geometry: the cut.
        run: READY nodes of the chunks ``first, first + 1, ...`` of one prefix.
        first: chunk index of ``run[0]``.
        start: tokens the device already holds; in or before chunk ``first``.
    """
    if len(geometry.groups) == 1 and geometry.keeps_all:  # what lacks that part is not in the index
        return range(1, len(run) + 1)
    return list(ends_by_parts(geometry, (node.parts for node in run), first, start))


def last_of(ends: Sequence[int]) -> int:
    """The longest of some loads, in chunks; 0 if there is none."""
    return ends[-1] if ends else 0


def ends_by_parts(
    geometry: Geometry, parts: Iterable[int], first: int, start: int
) -> Iterator[int]:
    """The same where it is known of each chunk which groups' parts there are, as bits."""
    always = geometry.full_groups
    gaps = dict.fromkeys(partial_groups(geometry), -1)  # last chunk of the run without the part
    for i, mask in enumerate(parts):
        if mask & always != always:
            return
        usable = True
        for group in gaps:
            if not mask >> group & 1:
                gaps[group] = i
            usable = usable and gaps[group] < first_needed(geometry, group, first, start, i)
        if usable:
            yield i + 1


def parts_needed(geometry: Geometry, chunks: int, first: int, start: int) -> list[int]:
    """For each chunk of a hit of so many the groups whose part it takes, as bits."""
    needed = [geometry.full_groups] * chunks
    for group in partial_groups(geometry):
        low = max(0, first_needed(geometry, group, first, start, chunks - 1))
        for i in range(low, chunks):
            needed[i] |= 1 << group
    return needed


def partial_groups(geometry: Geometry) -> list[int]:
    """Those that need the end of a hit alone."""
    return [g for g in geometry.group_ids if geometry.groups[g].kind is not GroupKind.FULL]


def first_needed(geometry: Geometry, group: int, first: int, start: int, last: int) -> int:
    """The first chunk, counted from ``first``, that a hit ending with ``last`` needs."""
    end = (first + last + 1) * geometry.chunk_tokens
    token = max(start, geometry.groups[group].first_needed_token(end))
    return token // geometry.chunk_tokens - first
