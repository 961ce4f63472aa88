# SPDX-License-Identifier: Apache-2.0
"""Medians, and how far they can be trusted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """A median with its spread, in the unit of the values."""

    median: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> Summary:
        return Summary(self.median * factor, self.low * factor, self.high * factor, self.count)


def with_range(values: Sequence[float]) -> Summary:
    """The median, the smallest and the largest.

    Raises:
        statistics.StatisticsError: there are no values.
    """
    return Summary(statistics.median(values), min(values), max(values), len(values))


def with_interval(values: Sequence[float]) -> Summary:
    """The median and an interval that holds the true one 95 times in 100.

    From the order of the values alone, with no assumption about their distribution. With fewer
    than six of them it is the whole range, which says less.

    Raises:
        statistics.StatisticsError: there are no values.
    """
    ordered = sorted(values)
    count = len(ordered)
    rank = 0
    below = 0.0
    # The largest rank from both ends whose tails stay within 2.5 % each.
    for k in range(count // 2):
        below += math.comb(count, k) * 0.5**count
        if below > 0.025:
            break
        rank = k
    return Summary(statistics.median(ordered), ordered[rank], ordered[count - 1 - rank], count)
