# SPDX-License-Identifier: Apache-2.0
"""What a look-up wants of the disk tier: read within bounds. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.scheduler.fetch import Look
from vllm_tiered_kv.scheduler.groups import last_of
from vllm_tiered_kv.scheduler.reading import Reading

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.gating import RequestGate
    from vllm_tiered_kv.scheduler.requests import RequestState

LOOK_PATIENCE = 0.2
"""Seconds a look-up waits at most to see what other engines have written to a shared folder."""
CONNECT_PATIENCE = 2.0
"""Seconds the first look-ups of an engine wait at most for its ranks; it takes milliseconds."""


class DiskLookups:
    """Reads for requests; does nothing where there is no disk tier.

    Args:
        core: what the scheduler half's parts share.
        gate: whether that is worth it.
        wait: whether a request has not yet waited for so many seconds.
    """

    def __init__(
        self,
        core: Core,
        gate: RequestGate,
        wait: Callable[[RequestState, float], bool],
    ) -> None:
        self._core = core
        self._gate = gate
        self._wait = wait
        self._reading = Reading(gate, lambda state: wait(state, core.settings.load_deadline))
        self._ranks_by: float | None = None
        """Until when look-ups wait for ranks that do not know of the disk tier yet."""

    def waits(self, state: RequestState, computed: int) -> bool:
        """Whether to ask again later: something is on its way already; cheap."""
        return self._awaits_disk(state) or self._awaits_ranks(state)

    def begins(
        self,
        state: RequestState,
        keys: Sequence[bytes],
        first: int,
        computed: int,
        ends: Sequence[int],
    ) -> bool:
        """Begin to read what is worth it; whether to ask again later."""
        disk = self._core.disk
        if disk is None or state.fetch is not None or first + last_of(ends) >= len(keys):
            return False
        if self._gate.may_read(self._gate.disk, state, keys, first, computed, ends):
            if self._awaits_look(state, keys, first, computed):
                return True
            state.fetch = self._reading.begin(
                self._gate.disk, disk.lookups, state, keys, first, computed, ends
            )
        return self._awaits_disk(state)

    def forget(self, state: RequestState) -> None:
        """Nothing is wanted for a request any more; what was read is nobody's in particular."""
        fetch, state.fetch = state.fetch, None
        if fetch is not None and self._core.disk is not None:
            self._core.disk.lookups.release(fetch)

    def _awaits_disk(self, state: RequestState) -> bool:
        """Whether to ask again later: chunks are being read from disk for the request."""
        fetch, disk = state.fetch, self._core.disk
        if fetch is None or fetch.over or disk is None:
            return False
        if self._reading.goes_on(self._gate.disk, disk.lookups, state, fetch):
            return True
        fetch.over = True
        return False

    def _awaits_ranks(self, state: RequestState) -> bool:
        """Whether to ask again later: ranks learn of the disk tier with an engine's first step."""
        disk = self._core.disk
        if disk is None or not disk.agent.is_connecting:
            return False
        now = self._core.clock()
        if self._ranks_by is None:
            self._ranks_by = now + CONNECT_PATIENCE  # a rank that never comes holds up nobody else
        return now < self._ranks_by and self._wait(state, CONNECT_PATIENCE)

    def _awaits_look(
        self, state: RequestState, keys: Sequence[bytes], first: int, computed: int
    ) -> bool:
        """Whether to ask again later: it is being seen what other engines have written."""
        disk = self._core.disk
        if disk is None or not disk.agent.settings.shared:
            return False
        if state.look is None:
            state.look = Look()
        if state.look.over:
            return False
        patience = self._gate.worth_waiting(state, computed, LOOK_PATIENCE)
        if disk.lookups.look(state.look, keys, first) and self._wait(state, patience):
            return True
        state.look.over = True
        return False
