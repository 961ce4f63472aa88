# SPDX-License-Identifier: Apache-2.0
"""How long a tier takes to give what is asked of it, from jobs that have ended.

A job of ``b`` bytes behind ``q`` others takes ``latency + (b + q) / bandwidth`` seconds, and the
engine sees its end only when it steps: another ``k S`` where ``S`` is what a step takes now. Both
are learned, the one from the job's own clock, the other from what the scheduler waited beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.gate.fit import Fit, Mean, Row

MEMORY = 12.0
"""Jobs: tiers change faster than models."""
CHANGE = 3
LATENCY = 0
"""The coefficient of what every job takes."""
STEPS = 2.0
"""Engine steps that a job costs, before it was measured."""
LEAST_STEPS, MOST_STEPS = 0.1, 8.0
"""What it can cost: a step that took far longer than those before it is no reason to count many of
them, nor is a queue that was shorter than it seemed one to count less than none."""
MIN_STEP = 1e-4
"""Seconds: where steps take less, waiting is not counted in steps."""


class LoadModel:
    """One tier.

    Args:
        bandwidth: bytes a second that it should give at least. While only small jobs were seen,
            what is missing to it is taken for latency: a larger one is tried, and tells.
        first: jobs before anything is known.
    """

    def __init__(self, bandwidth: float, first: int) -> None:
        self._slope = 1.0 / bandwidth
        # Small jobs that wait for something else say nothing of the bandwidth; and if they were
        # thought to, no large one would be tried any more.
        self._transfer = Fit(self._start, memory=MEMORY, first=first, change=CHANGE, blamed=LATENCY)
        self._steps = Mean(memory=MEMORY, first=2, change=CHANGE)

    def _start(self, medians: Row, seconds: float) -> Sequence[float]:
        slope = min(self._slope, 0.5 * seconds / max(1.0, medians[1]))
        return seconds - slope * medians[1], slope

    @property
    def is_known(self) -> bool:
        return self._transfer.is_known

    def observe(self, nbytes: int, seconds: float, ahead: int = 0) -> None:
        """A job has ended well.

        Args:
            seconds: by its own clock, with the time it was queued where ``ahead`` is given.
            ahead: bytes that were queued before it.
        """
        self._transfer.observe((1.0, float(nbytes + ahead)), seconds)

    def noticed(self, seconds: float, step: float) -> None:
        """So much later than by its own clock the engine went on."""
        steps = seconds / max(step, MIN_STEP)
        self._steps.observe(min(MOST_STEPS, max(LEAST_STEPS, steps)))

    @property
    def bandwidth(self) -> float:
        """Bytes a second; 0 while nothing is known."""
        slope = self._transfer.coefficients[1] if self.is_known else 0.0
        return 1.0 / slope if slope > 0 else 0.0

    def seconds(self, nbytes: int, ahead: int = 0) -> float:
        """By the job's own clock; 0 while nothing is known."""
        return self._transfer.predict((1.0, float(nbytes + ahead))) or 0.0

    def queueing(self, ahead: int) -> float:
        """Seconds for bytes that are queued before a job."""
        return self.seconds(0, ahead) - self.seconds(0)

    def delay(self, step: float) -> float:
        """Seconds until the engine goes on after a job's end."""
        steps = STEPS if self._steps.value is None else self._steps.value
        return steps * max(step, MIN_STEP)


class Backlog:
    """Bytes of jobs under way that have not been moved yet, where only their ends are reported.

    What is being moved is taken to go on at the tier's bandwidth: all of a large job that is nearly
    done would keep others from loading what they could have in a moment.
    """

    def __init__(self) -> None:
        self._left = 0.0
        self._unended = 0
        self._at = 0.0

    def left(self, now: float, bandwidth: float) -> int:
        """Those that are left now."""
        moved = max(0.0, now - self._at) * bandwidth
        self._at = now
        self._left = min(max(0.0, self._left - moved), self._unended)
        return int(self._left)

    def add(self, nbytes: int, now: float, bandwidth: float) -> None:
        """A job of so many begins."""
        self._left = self.left(now, bandwidth) + nbytes
        self._unended += nbytes

    def ended(self, nbytes: int) -> None:
        """It is over, however it ended."""
        self._unended -= nbytes
