# SPDX-License-Identifier: Apache-2.0
"""A read from a slow source for one request: begun if it is worth it, awaited while it is.

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.scheduler.groups import last_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.gating import RequestGate
    from vllm_tiered_kv.scheduler.reads import SlotReads
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.slow import SlowTier


class Reading:
    """What look-ups in the disk tier and in other engines have in common.

    Args:
        gate: whether a read is worth it.
        may_wait: whether a request may be asked to come back once more.
    """

    def __init__(self, gate: RequestGate, may_wait: Callable[[RequestState], bool]) -> None:
        self._gate = gate
        self._may_wait = may_wait

    def begin(
        self,
        tier: SlowTier,
        reads: SlotReads,
        state: RequestState,
        keys: Sequence[bytes],
        first: int,
        computed: int,
        ends: Sequence[int],
    ) -> Fetch | None:
        """Plan to read what is worth it of what is there; the arguments are those of a look-up."""
        fetch = reads.fetch(keys, first, computed, last_of(ends))
        if fetch is None:
            return None
        worth = self._gate.read_to(tier, state, fetch, keys, first, computed, ends)
        if not worth:
            reads.release(fetch)
            return None
        reads.cut(fetch, worth, first, computed)
        return fetch

    def goes_on(self, tier: SlowTier, reads: SlotReads, state: RequestState, fetch: Fetch) -> bool:
        """Whether to ask again later. If not: what has come is offered, the rest is computed."""
        under_way = reads.goes_on(fetch)
        for _ in range(1, self._gate.waiting.pieces()):
            if fetch.is_ordered:
                break
            under_way = reads.goes_on(fetch)
        if not under_way:
            self._gate.waiting.ended(tier, state, fetch)
        elif not self._may_wait(state):
            self._gate.waiting.given_up(tier, state, fetch)
        elif self._gate.waiting.goes_on(tier, state, fetch):
            return True
        fetch.stop()
        return False
