# SPDX-License-Identifier: Apache-2.0
"""How large a tier has to be to still hold what was used some time ago.

What was used in the last ``T`` seconds is a program's working set (P. J. Denning, "The working set
model for program behavior", CACM 1968). A tier that holds it, least recently used first out, hits
whenever a prefix comes back within ``T``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.replay import Request
from vllm_tiered_kv.sizing.layers import Footprint


def capacity_for(
    footprint: Footprint, seconds: float, requests_per_second: float, new_tokens: int
) -> int:
    """Bytes of what is stored in ``seconds``.

    Args:
        footprint: of all GPUs' copies together.
        new_tokens: that a request adds to what is stored already.
    """
    return round(requests_per_second * seconds * footprint.stored_bytes(new_tokens))


class WorkingSet(msgspec.Struct, frozen=True):
    """Of a trace, in its blocks."""

    seconds: float
    largest: int
    """Most blocks that were used within so many seconds."""
    hits: int
    """Blocks that had been used within so many seconds before, with all blocks before them."""
    blocks: int
    """All that were asked for."""


def working_set(requests: Sequence[Request], seconds: float) -> WorkingSet:
    """What a trace uses within any ``seconds`` seconds.

    Its requests are taken in order; one that seems to come before its predecessor comes with it.
    """
    last: dict[int, float] = {}
    order: deque[tuple[float, int]] = deque()
    now, largest, hits, blocks = 0.0, 0, 0, 0
    for request in requests:
        now = max(now, request.timestamp / 1e3)
        while order and order[0][0] < now - seconds:
            used, block = order.popleft()
            if last.get(block) == used:
                del last[block]
        blocks += len(request.hash_ids)
        for block in request.hash_ids:
            if block not in last:
                break
            hits += 1
        for block in request.hash_ids:
            if last.get(block) != now:
                last[block] = now
                order.append((now, block))
        largest = max(largest, len(last))
    return WorkingSet(seconds, largest, hits, blocks)
