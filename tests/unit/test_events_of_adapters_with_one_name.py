# SPDX-License-Identifier: Apache-2.0
"""Two weights under one adapter's name and path have the same block hashes, and two chunks."""

from __future__ import annotations

from vllm_tiered_kv.scheduler.event_log import ChunkFacts, TierLog
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node

HASH = b"h" * 32
FACTS = ChunkFacts((HASH,), None, (1,), {})


def stored(index: ChunkIndex, log: TierLog, content: bytes) -> Node:
    node = index.reserve(HASH + content, None, [0])
    assert node is not None
    log.planned(node.key, FACTS)
    index.commit(node)
    index.unpin(node)
    return node


def test_a_block_is_taken_back_with_the_last_weights_that_hold_it() -> None:
    log = TierLog(8, lambda: None)
    index = ChunkIndex(8, 1, log)
    one = stored(index, log, b"1" * 32)
    two = stored(index, log, b"2" * 32)
    assert len(log.take().stored) == 2
    index.discard(one)
    (part,) = log.take().removed
    assert part.kept == 1, "still there with the other weights"
    index.discard(two)
    (part,) = log.take().removed
    assert part.kept == 0
