# SPDX-License-Identifier: Apache-2.0
"""How long each engine step took, matched with what it computed.

vLLM takes outputs in, in the order in which it planned the steps, one at a time, also where several
are in flight. A step has begun when it was planned or when the one before it ended, whichever is
later: with asynchronous scheduling it is planned while its predecessor runs.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import msgspec

from vllm_tiered_kv.gate.fit import Mean
from vllm_tiered_kv.gate.prefill import Work

MAX_IN_FLIGHT = 64
"""Steps; if more seem to be in flight, ends were missed: then it starts anew."""
MEMORY = 20.0
IDLE_TURN = 0.002
"""Seconds between two looks of an engine that has nothing to compute, before it was measured."""
LONGEST_TURN = 0.02
"""Seconds: what takes longer is an engine without requests, or without a processor."""

_T = TypeVar("_T")


class _Planned(msgspec.Struct, Generic[_T], frozen=True):
    at: float
    work: Work
    is_clean: bool
    last: tuple[_T, ...]


class StepEnd(msgspec.Struct, Generic[_T], frozen=True):
    """A step that has ended."""

    work: Work
    seconds: float
    is_clean: bool
    """It did nothing but compute."""
    last: tuple[_T, ...]
    """What was said to end with it."""


class StepClock(Generic[_T]):
    """Steps under way."""

    def __init__(self) -> None:
        self._planned: deque[_Planned[_T]] = deque()
        self._ended_at: float | None = None
        self._ended_empty = False
        self._busy = Mean(memory=MEMORY, first=1, change=4)
        self._idle = Mean(memory=MEMORY, first=3, change=4)

    def planned(
        self, now: float, work: Work, *, is_clean: bool = True, last: tuple[_T, ...] = ()
    ) -> None:
        """A step has been planned.

        Args:
            is_clean: it does nothing but compute.
            last: given back when it has ended.
        """
        if len(self._planned) >= MAX_IN_FLIGHT:
            self._planned.clear()
            self._ended_at = None
        self._planned.append(_Planned(now, work, is_clean, last))

    def ended(self, now: float) -> StepEnd[_T] | None:
        """The output of the oldest step has been taken in; None if none is known."""
        if not self._planned:
            self._ended_at = None
            return None
        step = self._planned.popleft()
        before, self._ended_at = self._ended_at, now
        was_empty, self._ended_empty = self._ended_empty, not step.work.tokens
        began = step.at if before is None else max(before, step.at)
        seconds = now - began
        if step.work.tokens:
            self._busy.observe(seconds)
        elif was_empty and before is not None and now - before < LONGEST_TURN:
            self._idle.observe(now - before)
        return StepEnd(step.work, seconds, step.is_clean, step.last)

    def turn(self, *, is_busy: bool) -> float:
        """Seconds from one look of the engine to the next."""
        idle = self._idle.value or IDLE_TURN
        return (self._busy.value or idle) if is_busy else idle
