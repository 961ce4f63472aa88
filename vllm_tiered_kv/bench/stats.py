# SPDX-License-Identifier: Apache-2.0
"""Percentiles, rates, and how far they can be trusted.

Intervals come from a bootstrap over blocks: requests of one block share the machine's state and the
caches', so that they are not independent, and blocks are drawn as wholes, with replacement (A. C.
Davison, D. V. Hinkley, Bootstrap Methods and their Application, 1997, section 3.8). All arms did
the same blocks one after another, so the same draw is used for all of them, which makes ratios
between arms paired. The interval is from the 2.5th to the 97.5th percentile of the resamples (B.
Efron, R. J. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Draws = npt.NDArray[np.int64]
"""How often each block was drawn: one row a resample, one column a block."""

FEW_BLOCKS = 10
"""With fewer, intervals tend to be too narrow."""
FEW_BEYOND = 5
"""A percentile that fewer values than this are expected to lie beyond is hardly known."""
_LOST = 0.05


class Estimate(msgspec.Struct, frozen=True):
    """A figure and the interval that holds the true one 95 times in 100; None: not known."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Sample(msgspec.Struct, frozen=True):
    """Values in ascending order, and the block that each is of."""

    values: Floats
    blocks: npt.NDArray[np.int64]

    @classmethod
    def make(cls, values: Sequence[float], blocks: Sequence[int]) -> Sample:
        found = np.asarray(values, dtype=np.float64)
        order = np.argsort(found, kind="stable")
        return cls(found[order], np.asarray(blocks, dtype=np.int64)[order])

    def __len__(self) -> int:
        return len(self.values)


def draw(blocks: int, resamples: int, seed: int) -> Draws:
    """Draw as many blocks as there are, with replacement, again and again."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=resamples).astype(np.int64)


def quantiles(sample: Sample, shares: Sequence[float]) -> list[float | None]:
    """Each quantile, with linear interpolation; None of an empty sample."""
    if not len(sample):
        return [None for _ in shares]
    return [float(value) for value in np.quantile(sample.values, shares)]


def resampled_quantiles(sample: Sample, shares: Sequence[float], draws: Draws) -> Floats:
    """The same of each draw: one row a resample, one column a share; NaN where it is empty."""
    found = np.full((len(draws), len(shares)), np.nan)
    if not len(sample):
        return found
    wanted = np.asarray(shares)
    for row, drawn in enumerate(draws):
        # As if each value stood there as often as its block was drawn.
        ends = np.cumsum(drawn[sample.blocks])
        total = int(ends[-1])
        if not total:
            continue
        places = wanted * (total - 1)
        below = np.floor(places).astype(np.int64)
        above = np.minimum(below + 1, total - 1)
        low = sample.values[np.searchsorted(ends, below, side="right")]
        high = sample.values[np.searchsorted(ends, above, side="right")]
        found[row] = low + (high - low) * (places - below)
    return found


def ratio(amounts: Sequence[float], bases: Sequence[float]) -> float | None:
    """Of the sums; None where there is nothing to divide by."""
    base = sum(bases)
    return sum(amounts) / base if base > 0 else None


def resampled_ratio(amounts: Sequence[float], bases: Sequence[float], draws: Draws) -> Floats:
    """The same of each draw; amounts and bases are one a block."""
    above = draws @ np.asarray(amounts, dtype=np.float64)
    below = draws @ np.asarray(bases, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)


def divide(above: Floats, below: Floats) -> Floats:
    """Resample by resample; NaN where there is nothing to divide by."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(below > 0, above / below, np.nan)


def estimate(value: float | None, resampled: Floats, blocks: int) -> Estimate:
    """A figure with its interval; without one where a single block, or too few resamples, tell."""
    if value is None or blocks < 2:
        return Estimate(value)
    known = resampled[~np.isnan(resampled)]
    if len(known) < (1 - _LOST) * len(resampled):
        return Estimate(value)
    low, high = np.quantile(known, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def few(count: int, share: float) -> bool:
    """Are so many values too few for this quantile?"""
    return count * min(share, 1 - share) < FEW_BEYOND
