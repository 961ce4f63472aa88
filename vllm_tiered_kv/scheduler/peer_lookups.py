# SPDX-License-Identifier: Apache-2.0
"""What a look-up wants of other engines: asked once, waited for within bounds.

Scheduler thread only. What is in the CPU tier is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.scheduler.groups import last_of
from vllm_tiered_kv.scheduler.peers import PeerLook
from vllm_tiered_kv.scheduler.reading import Reading

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.gating import RequestGate
    from vllm_tiered_kv.scheduler.peers import PeerTier
    from vllm_tiered_kv.scheduler.requests import RequestState

ASK_PATIENCE = 1.0
"""Seconds a look-up waits at most for an answer; the agent gives up earlier."""


class PeerLookups:
    """Asks and reads for requests.

    Args:
        core: what the scheduler half's parts share.
        gate: whether that is worth it.
        tier: the other engines.
        may_wait: whether a request may be asked to come back once more.
    """

    def __init__(
        self,
        core: Core,
        gate: RequestGate,
        tier: PeerTier,
        may_wait: Callable[[RequestState], bool],
    ) -> None:
        self._core = core
        self._gate = gate
        self._tier = tier
        self._may_wait = may_wait
        self._reading = Reading(gate, may_wait)

    def waits(self, state: RequestState, computed: int) -> bool:
        """Whether to ask again later: peers were asked, or are being read; cheap."""
        look = state.peers
        if look is None or look.over or look.claim is None:
            return False
        if look.fetch is not None:
            return self._reads(state, look, look.fetch)
        if not look.claim.is_asking:
            return False  # answered: see what to do about it
        waited = self._core.clock() - look.asked_at
        patience = self._gate.worth_waiting(state, computed, ASK_PATIENCE)
        if waited < patience and self._may_wait(state):
            return True
        self._end(look)
        return False

    def begins(
        self,
        state: RequestState,
        keys: Sequence[bytes],
        first: int,
        computed: int,
        ends: Sequence[int],
    ) -> bool:
        """Ask peers, or read what is worth it of what they have; whether to ask again later."""
        slow = self._gate.peers
        look = state.peers
        if slow is None or state.handoff is not None:
            return False
        if look is None:
            missing = self._missing(keys, first + last_of(ends))
            if missing is None or not self._tier.is_readable:
                return False
            look = state.peers = PeerLook(self._core.clock())
            content = state.content.digest if state.content is not None else b""
            if self._gate.may_read(slow, state, keys, first, computed, ends):
                look.claim = self._tier.ask(keys[missing:], content)
            look.over = look.claim is None
        if look.over or look.claim is None:
            return False
        if look.claim.is_asking:
            return self.waits(state, computed)
        self._tier.take_in(look.claim)
        fetch = self._reading.begin(slow, self._tier.lookups, state, keys, first, computed, ends)
        if fetch is None:
            self._end(look)
            return False
        look.fetch = fetch
        return self._reads(state, look, fetch)

    def forget(self, state: RequestState) -> None:
        """Nothing is wanted for a request any more; what was read is nobody's in particular."""
        look, state.peers = state.peers, None
        if look is None:
            return
        if look.fetch is not None:
            self._tier.lookups.release(look.fetch)
        self._end(look)

    def _missing(self, keys: Sequence[bytes], start: int) -> int | None:
        """The first chunk to ask for: what others ask for already, or what is not even coming."""
        if start < len(keys) and self._tier.is_asked(keys[start]):
            return start
        get = self._core.index.get
        return next((i for i in range(start, len(keys)) if get(keys[i]) is None), None)

    def _reads(self, state: RequestState, look: PeerLook, fetch: Fetch) -> bool:
        slow = self._gate.peers
        if look.over or slow is None:
            return False
        if self._reading.goes_on(slow, self._tier.lookups, state, fetch):
            return True
        self._end(look)
        return False

    def _end(self, look: PeerLook) -> None:
        look.over = True
        claim, look.claim = look.claim, None
        if claim is not None:
            self._tier.leave(claim)
