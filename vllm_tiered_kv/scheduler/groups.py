# SPDX-License-Identifier: Apache-2.0
"""How much of a stored run is a hit when several KV cache groups must agree."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.geometry import Geometry, GroupKind
from vllm_tiered_kv.scheduler.index import ABSENT, Node


def usable_chunks(geometry: Geometry, run: Sequence[Node], first: int, start: int) -> int:
    """The longest usable head of a run.

    A full-attention group needs every chunk of the head; a sliding-window group needs those
    its window still sees from the head's end, a state group the last. What lies before
    ``start`` is on the device.

    Args:
        geometry: the cut.
        run: READY nodes of the chunks ``first, first + 1, ...`` of one prefix.
        first: chunk index of ``run[0]``.
        start: tokens the device already holds; in or before chunk ``first``.

    Returns:
        How many nodes of ``run``, from its head, can be loaded together.
    """
    if len(geometry.groups) == 1 and geometry.groups[0].kind is GroupKind.FULL:
        return len(run)  # a chunk without its full-attention parts is not in the index
    tokens = geometry.chunk_tokens
    gaps = dict.fromkeys(geometry.group_ids, -1)  # last node of the run without the part
    best = 0
    for i, node in enumerate(run):
        end = (first + i + 1) * tokens
        usable = True
        for group, spec in enumerate(geometry.groups):
            if node.slots[group] == ABSENT:
                if spec.kind is GroupKind.FULL:
                    return best
                gaps[group] = i
            needed = max(start, spec.first_needed_token(end)) // tokens - first
            usable = usable and gaps[group] < needed
        if usable:
            best = i + 1
    return best
