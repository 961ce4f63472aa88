# SPDX-License-Identifier: Apache-2.0
"""How long requests wait for their first token, and what that has to do with the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tiered_kv import metrics

if TYPE_CHECKING:
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.requests import RequestState


class FirstTokens:
    """Times each request from its arrival to its first token; scheduler thread only.

    A token is there when vLLM has appended it to the request, which shows when a step ends.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._due: dict[str, RequestState] = {}
        """Requests whose prompt ends in a step that was planned."""

    def begins(self, state: RequestState) -> None:
        """A request is to run, for the first time since it was looked up or its load failed."""
        if state.failed_loads:
            state.began_with = "failed"
        elif state.loaded_from is not None:
            state.began_with = state.loaded_from
        else:
            state.began_with = "device" if state.request.num_computed_tokens else "none"

    def planned(self, state: RequestState) -> None:
        """A step is planned that gives a request's first token, unless it is preempted."""
        state.awaits_token = False
        self._due[state.request.request_id] = state

    def step_ended(self) -> None:
        """vLLM has taken in a step's output."""
        for request_id, state in list(self._due.items()):
            if _has_answered(state):
                del self._due[request_id]
                self._observe(state)

    def gone(self, request_id: str) -> None:
        """A request has ended, possibly with its first token."""
        state = self._due.pop(request_id, None)
        if state is not None and _has_answered(state):
            self._observe(state)

    def _observe(self, state: RequestState) -> None:
        core, source = self._core, state.began_with
        core.tally.observe(metrics.FIRST_TOKEN.key(source), core.clock() - state.arrived_at)
        core.tally.add(metrics.PROMPT_TOKENS.key(source), state.request.num_prompt_tokens)


def _has_answered(state: RequestState) -> bool:
    """Not so an aborted request, nor one that was preempted while its token was computed."""
    request = state.request
    return bool(request.num_tokens > request.num_prompt_tokens)
