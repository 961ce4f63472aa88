# SPDX-License-Identifier: Apache-2.0
"""What wrong choices cost, and what may be spent to find out.

The **regret** of a choice is what it took beyond what the other way would have taken. The one is
measured, the other can only be predicted, by models that what happened has kept true; of a choice
made while they knew too little there is none.
"""

from __future__ import annotations

SHARE = 0.01
"""Of the time that requests take, what may be spent on seeing whether a choice still holds."""
MOST = 1.0
"""Seconds that a trial is thought to cost at most, until one has cost more."""


def regret(actual: float, instead: float | None) -> float:
    """Seconds lost; 0 where nothing was, or where it cannot be known."""
    return 0.0 if instead is None else max(0.0, actual - instead)


class Allowance:
    """Seconds that may be spent on trying what is expected to be slower.

    What is expected may be wrong by any factor, after an accident, and nothing but a trial would
    show it. So a trial never has to wait for more than a share of its cost at first; as long as
    nothing changes it is a larger one each time, and in the end its cost.
    """

    def __init__(self) -> None:
        self._saved = 0.0
        self._most = MOST

    def earn(self, seconds: float) -> None:
        """A request takes so long."""
        self._saved = min(self._most, self._saved + SHARE * seconds)

    def allows(self, seconds: float) -> bool:
        """Whether so much may be lost now."""
        return min(seconds, self._most) <= self._saved

    def spend(self, seconds: float) -> None:
        """So much is lost: nothing is left of what was saved."""
        self._saved = 0.0
        if seconds > self._most:
            self._most *= 2

    def begin_again(self) -> None:
        """It is chosen again: should that change, try soon."""
        self._most = MOST


class Pace:
    """How often something is tried in the background: less and less often while nothing changes.

    Args:
        least: seconds between two at first.
        most: seconds between two at last.
    """

    def __init__(self, least: float, most: float) -> None:
        self._least = least
        self._most = most
        self._wait = least
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        return now >= self._next

    def tried(self, now: float) -> None:
        """It was tried: the next time is twice as far away as the last."""
        self._next = now + self._wait
        self._wait = min(self._most, 2 * self._wait)

    def begin_again(self) -> None:
        """It is used again: should that change, try soon."""
        self._wait = self._least
        self._next = 0.0
