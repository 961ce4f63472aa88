# SPDX-License-Identifier: Apache-2.0
"""Where recurrent states can be copied from: pure functions.

A Mamba or linear-attention layer keeps one state that every token changes. vLLM leaves a copy
behind at some block boundaries only ("align" mode) and says at which; such a copy is not
written again. A block table alone cannot tell them from states that are still running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_tiered_kv.geometry import Geometry, GroupKind

States = Mapping[int, Mapping[int, int]]
"""By index of the chunk at whose end it is: the device block of the state, by group."""
NO_STATES: States = {}


def kept_states(geometry: Geometry, handed_over: Iterable[tuple[int, int, int]]) -> States:
    """States that vLLM says are complete once the step being planned has run.

    Args:
        geometry: the cut.
        handed_over: ``(group, block, tokens)`` each: the state after that many tokens.
    """
    states: dict[int, dict[int, int]] = {}
    for group, block, tokens in handed_over:
        if tokens <= 0 or tokens % geometry.chunk_tokens:
            continue  # in the midst of a block, where no look-up ends
        if group in geometry.group_ids and geometry.groups[group].kind is GroupKind.STATE:
            states.setdefault(tokens // geometry.chunk_tokens - 1, {})[group] = block
    return states


def found_states(
    geometry: Geometry, computed: int, block_ids: Sequence[Sequence[int]], null_block: int
) -> States:
    """States a request goes on from when it is scheduled for the first time.

    They are the last blocks of what was found, and it is continued in a copy of them.

    Args:
        geometry: the cut.
        computed: tokens that were found.
        block_ids: the request's block table, one list a group.
        null_block: the id that stands for "no block".
    """
    if computed <= 0 or computed % geometry.chunk_tokens:
        return NO_STATES
    found: dict[int, int] = {}
    for group, spec in enumerate(geometry.groups):
        at = computed // spec.block_tokens - 1
        if spec.kind is not GroupKind.STATE or at >= len(block_ids[group]):
            continue
        if block_ids[group][at] != null_block:
            found[group] = block_ids[group][at]
    return {computed // geometry.chunk_tokens - 1: found} if found else NO_STATES
