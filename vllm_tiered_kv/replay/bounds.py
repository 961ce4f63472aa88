# SPDX-License-Identifier: Apache-2.0
"""What no policy can exceed: an endless cache, and one that knows the future."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

from vllm_tiered_kv.replay.trace import Request

NEVER = 1 << 62


def endless(requests: Iterable[Request]) -> int:
    """Blocks that a cache without a limit serves."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        for block in request.hash_ids:
            if block in seen:
                hits += 1
        seen.update(request.hash_ids)
    return hits


def belady(requests: Sequence[Request], capacity: int) -> int:
    """Blocks that a cache of ``capacity`` blocks serves if it knows all that will come.

    It lets in only what is used again and evicts what is used again last (L. A. Belady, "A study of
    replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966, with bypass),
    of what is used again by the same request the tail first. A chunk is used whenever one behind it
    is, so it is never used again later than that: the tail of a prefix always goes before its head,
    and the optimum without that constraint is the optimum with it.
    """
    future = _next_uses(requests)
    cached: dict[int, int] = {}  # block: the request that uses it next
    order: list[tuple[int, int, int]] = []  # (-next use, -position, block); some out of date
    hits = 0
    for now, request in enumerate(requests):
        for position, block in enumerate(request.hash_ids):
            if cached.pop(block, None) is not None:
                hits += 1
            following = future[now][position]
            if following != NEVER:
                cached[block] = following
                heapq.heappush(order, (-following, -position, block))
        while len(cached) > capacity:
            due, _, block = heapq.heappop(order)
            if cached.get(block) == -due:
                del cached[block]
        if len(order) > 2 * capacity + 10_000:
            order = [entry for entry in order if cached.get(entry[2]) == -entry[0]]
            heapq.heapify(order)
    return hits


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each block of each request, the request that uses it next, or :data:`NEVER`."""
    following: dict[int, int] = {}
    uses: list[list[int]] = []
    for now in range(len(requests) - 1, -1, -1):
        blocks = requests[now].hash_ids
        uses.append([following.get(block, NEVER) for block in blocks])
        following.update(dict.fromkeys(blocks, now))
    uses.reverse()
    return uses
