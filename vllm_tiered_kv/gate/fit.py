# SPDX-License-Identifier: Apache-2.0
"""A linear model of seconds, learned from one observation after the other.

``seconds = c[0] x[0] + c[1] x[1] + ...`` with ``c >= 0``: recursive least squares with exponential
forgetting (Ljung, *System Identification*, 2nd ed., section 11.2), in the form that keeps the sums
and solves for the coefficients when they are asked for. Four things are added to it:

- **Relative errors count.** An observation is divided by the seconds that were predicted or
  measured, whichever are more, so a long step does not outweigh a hundred short ones.
- **A far-off value moves little.** What is more times as long or as short as predicted than usual
  is moved to where that begins (Huber, *Robust Estimation of a Location Parameter*, 1964). Several
  in a row on the same side are no accident but a change: then all is taken to be slower or faster
  by as much, and the past nearly forgotten. Where what is thought slow is not measured any more
  it may be put down to one term: the others are known again when they matter.
- **What is not excited stays.** The solution is drawn to the last one by a small part of an
  observation (a proximal step), so that months of equal prompts do not let the other coefficients
  run away as plain forgetting would.
- **Nothing is known before a few observations**; the first solution starts from their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

CLIP = 3.0
"""Usual errors beyond which a value is far off."""
LEAST_ERROR = 0.05
MOST_ERROR = 0.5
"""What counts as a usual error at least and at most: 0.5 is half as long again, or two thirds."""
ERROR_RATE = 0.1
"""How fast the usual error follows."""
PULL = 0.05
"""Observations that the last solution weighs."""
KEPT = 0.02
"""Share of the past that a change leaves."""
TINY = 1e-9
"""Seconds."""

LEAST = 1e-30

Row = tuple[float, ...]
Start = Callable[[Row, float], Sequence[float]]
"""``(medians of the features, median seconds)`` -> first coefficients."""


class Usual:
    """How far observations usually lie from what was predicted, and which of them to believe.

    Args:
        change: far-off values in a row, on the same side, that mean a change.
    """

    __slots__ = ("_change", "_error", "_far")

    def __init__(self, change: int) -> None:
        self._change = change
        self._error = MOST_ERROR
        self._far = 0
        """Far-off values in a row; negative: below."""

    def believe(self, seconds: float, predicted: float) -> tuple[float, bool]:
        """What to take an observation for, both positive; and whether all has changed."""
        above = seconds > predicted
        times = seconds / predicted if above else predicted / seconds
        bound = 1 + CLIP * self._error
        changed = False
        if times <= bound:
            self._far = 0
        else:
            side = 1 if above else -1
            self._far = self._far + side if self._far * side > 0 else side
            changed = abs(self._far) >= self._change
            if changed:
                self._far, self._error = 0, MOST_ERROR
                return seconds, True
            times = bound
        error = self._error + ERROR_RATE * (1.25 * (times - 1) - self._error)
        self._error = min(MOST_ERROR, max(LEAST_ERROR, error))
        return (predicted * times if above else predicted / times), False


class Mean:
    """One number that follows what is observed, as :class:`Fit` does: for what comes in every step.

    Args:
        memory: observations after which one counts for a third (1/e) only.
        first: observations before anything is known; their median is the first value.
        change: far-off values in a row that mean a change.
    """

    __slots__ = ("_first", "_rate", "_usual", "_values", "value")

    def __init__(self, *, memory: float, first: int, change: int) -> None:
        self._rate = 1.0 / memory
        self._first = first
        self._usual = Usual(change)
        self._values: list[float] = []
        self.value: float | None = None
        """None while nothing is known."""

    def observe(self, value: float) -> None:
        value = max(value, TINY)
        if self.value is None:
            self._values.append(value)
            if len(self._values) >= self._first:
                self.value = statistics.median(self._values)
            return
        value, changed = self._usual.believe(value, self.value)
        self.value = value if changed else self.value + self._rate * (value - self.value)


class Fit:
    """One model.

    Args:
        start: the first coefficients.
        memory: observations after which one counts for a third (1/e) only.
        first: observations before anything is known.
        change: far-off values in a row, on the same side, that mean a change.
        blamed: the coefficient that a change is put down to as far as it can be, of a feature that
            is never 0; None: all alike.
    """

    def __init__(
        self, start: Start, *, memory: float, first: int, change: int, blamed: int | None = None
    ) -> None:
        self._start = start
        self._blamed = blamed
        self._keep = 1.0 - 1.0 / memory
        self._first = first
        self._usual = Usual(change)
        self._rows: list[tuple[Row, float]] = []
        self._sums: list[list[float]] = []
        self._products: list[float] = []
        self._weight = 0.0
        self._coefficients: list[float] = []
        self._is_solved = True

    @property
    def is_known(self) -> bool:
        return bool(self._coefficients)

    @property
    def coefficients(self) -> Sequence[float]:
        """What is believed now; empty while nothing is known."""
        if not self._is_solved:
            self._solve()
        return self._coefficients

    def predict(self, x: Row) -> float | None:
        """Seconds; None while nothing is known."""
        if not self.is_known:
            return None
        return _dot(self.coefficients, x)

    def observe(self, x: Row, seconds: float) -> None:
        """Learn from one observation of non-negative features."""
        if self.is_known:
            self._learn(x, seconds)
            return
        self._rows.append((x, seconds))
        if len(self._rows) >= self._first:
            self._begin()

    def _begin(self) -> None:
        rows, self._rows = self._rows, []
        size = len(rows[0][0])
        middle = statistics.median(seconds for _, seconds in rows)
        medians = tuple(statistics.median(x[i] for x, _ in rows) for i in range(size))
        self._coefficients = [max(0.0, c) for c in self._start(medians, middle)]
        self._sums = [[0.0] * size for _ in range(size)]
        self._products = [0.0] * size
        for x, seconds in rows:
            self._learn(x, seconds)

    def _learn(self, x: Row, seconds: float) -> None:
        predicted = max(_dot(self.coefficients, x), TINY)
        seconds, changed = self._usual.believe(max(seconds, TINY), predicted)
        if changed:
            self._change_to(x, seconds, predicted)
            predicted = seconds
        self._add(x, seconds, predicted)

    def _change_to(self, x: Row, seconds: float, predicted: float) -> None:
        """What was predicted takes so long, as far as is known; the rest will show."""
        believed, at = list(self.coefficients), self._blamed
        kept = KEPT * (predicted / seconds) ** 2  # the past is weighed by what it would take now
        if at is not None:
            believed[at] = max(0.0, believed[at] + (seconds - predicted) / x[at])
        if at is None or not believed[at]:
            predicted = max(_dot(believed, x), TINY)
            believed = [seconds / predicted * c for c in believed]
        self._weight *= KEPT
        self._coefficients = believed
        self._sums = [[kept * each for each in row] for row in self._sums]
        self._products = [_dot(row, believed) for row in self._sums]

    def _add(self, x: Row, seconds: float, predicted: float) -> None:
        scale, keep, products = max(seconds, predicted), self._keep, self._products
        row, value = [each / scale for each in x], seconds / scale
        for i, sums in enumerate(self._sums):
            here = row[i]
            products[i] = keep * products[i] + here * value
            for j, there in enumerate(row):
                sums[j] = keep * sums[j] + here * there
        self._weight = keep * self._weight + 1.0
        self._is_solved = False

    def _solve(self) -> None:
        self._is_solved = True
        # In units in which every feature is about one, so that the pull is as strong on each.
        count = max(self._weight, 1.0)
        units = [max(self._sums[i][i] / count, LEAST) ** 0.5 for i in range(len(self._sums))]
        matrix = [
            [value / (units[i] * units[j]) for j, value in enumerate(sums)]
            for i, sums in enumerate(self._sums)
        ]
        right = [product / units[i] for i, product in enumerate(self._products)]
        for i, last in enumerate(self._coefficients):
            matrix[i][i] += PULL
            right[i] += PULL * last * units[i]
        solved = non_negative(matrix, right)
        self._coefficients = [value / unit for value, unit in zip(solved, units, strict=True)]


def non_negative(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """The ``w >= 0`` that makes ``w'Mw - 2 r'w`` least; ``matrix`` is positive definite.

    By trying which of a handful of coefficients are zero (the conditions of Karush, Kuhn and
    Tucker name exactly one solution): there are three of them at most.
    """
    size = len(right)
    choices = sorted(range(1, 1 << size), key=int.bit_count, reverse=True)
    for chosen in choices:
        free = [i for i in range(size) if chosen >> i & 1]
        part = _solve_linear([[matrix[i][j] for j in free] for i in free], [right[i] for i in free])
        if part is None or min(part) < 0:
            continue
        w = [0.0] * size
        for i, value in zip(free, part, strict=True):
            w[i] = value
        slack = 1e-9 * max(map(abs, right))
        bound = (i for i in range(size) if not chosen >> i & 1)
        if all(_dot(matrix[i], w) - right[i] >= -slack for i in bound):
            return w
    return [0.0] * size


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination; the matrix is symmetric and positive definite, so no pivots."""
    size = len(right)
    for i in range(size):
        if matrix[i][i] <= 0:
            return None
        for k in range(i + 1, size):
            factor = matrix[k][i] / matrix[i][i]
            for j in range(i, size):
                matrix[k][j] -= factor * matrix[i][j]
            right[k] -= factor * right[i]
    for i in reversed(range(size)):
        right[i] = (right[i] - _dot(matrix[i][i + 1 :], right[i + 1 :])) / matrix[i][i]
    return right


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
