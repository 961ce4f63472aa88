# SPDX-License-Identifier: Apache-2.0
"""When a device that fails is left alone, and when it is tried again: a small state machine."""

from __future__ import annotations

import enum

FAILURES_IN_A_ROW = 3
FIRST_PAUSE = 1.0
"""Seconds; doubled with each attempt that fails."""
LONGEST_PAUSE = 60.0


SUCCESSES_THAT_COUNT = 16
"""So many in a row, and the next trouble is the first again."""


class Condition(enum.Enum):
    GOOD = "good"
    PAUSED = "paused"  # nothing is asked of it
    DUE = "due"  # to be tried: the next event decides


class Health:
    """Of one kind of I/O. The caller gives the time, in seconds.

    Args:
        failures: so many in a row, and it is paused.
    """

    def __init__(self, failures: int = FAILURES_IN_A_ROW) -> None:
        self._allowed = failures
        self._failures = 0
        self._successes = 0
        self._pause = FIRST_PAUSE
        self._again_at = 0.0
        self._condition = Condition.GOOD

    def condition(self, now: float) -> Condition:
        if self._condition is Condition.PAUSED and now >= self._again_at:
            self._condition = Condition.DUE
        return self._condition

    @property
    def is_good(self) -> bool:
        """Whether nothing stands against it, as of the last event."""
        return self._condition is Condition.GOOD

    def succeeded(self) -> None:
        """Something that was asked of it has worked."""
        self._failures = 0
        self._successes += 1
        if self._condition is Condition.DUE:
            self._condition = Condition.GOOD
            self._successes = 0
        if self._successes >= SUCCESSES_THAT_COUNT:
            self._pause = FIRST_PAUSE

    def failed(self, now: float, *, at_once: bool = False) -> None:
        """Something has not; ``at_once``: it need not be tried so soon again."""
        self._failures += 1
        self._successes = 0
        if self._condition is Condition.PAUSED:
            return
        if self._condition is Condition.GOOD and self._failures < self._allowed and not at_once:
            return
        self._condition = Condition.PAUSED
        self._again_at = now + self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
