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
STEPS = 2.0
"""Engine steps that a job costs, before it was measured."""
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
        self._transfer = Fit(self._start, memory=MEMORY, first=first, change=CHANGE)
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
        self._steps.observe(seconds / max(step, MIN_STEP))

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
