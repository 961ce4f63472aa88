# SPDX-License-Identifier: Apache-2.0
"""What may be pulled where a producer's sliding window begins elsewhere than one of our blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.scheduler.pulls import Pulls

SIZES = st.sampled_from([4, 8, 16, 32])


@given(
    window=st.integers(1, 100),
    ours=SIZES,
    theirs=SIZES,
    tokens=st.integers(2, 300),
    more=st.integers(0, 3),
    local=st.integers(0, 20),
)
def test_no_block_of_ours_is_left_in_part(
    window: int, ours: int, theirs: int, tokens: int, more: int, local: int
) -> None:
    group = GroupGeometry(GroupKind.WINDOW, ours, 64, window)
    core: Any = SimpleNamespace(geometry=Geometry(ours, ours, (group,)))
    agent: Any = None
    granted: Any = SimpleNamespace(page_tokens=(theirs,))
    start, end = local * ours, min(tokens, tokens + more - 1)
    if start >= end:
        return
    # The producer's blocks from the one on in which the last token's window begins.
    there = max(0, tokens - window) // theirs * theirs
    # vLLM has none of those that the window of the next token has left behind.
    allocated = [
        block for block in range(local, -(-end // ours)) if (block + 1) * ours > end - window + 1
    ]
    whole = all(block * ours >= there for block in allocated)
    fills = Pulls(core, agent, 1.0)._fills(granted, tokens, start, end)
    assert fills is whole or not allocated
    if ours <= theirs:
        assert fills
