# SPDX-License-Identifier: Apache-2.0
"""Figures against known answers, and intervals against what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tiered_kv.bench import stats

SHARES = (0.5, 0.9, 0.99)
values = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)


def test_known_answers() -> None:
    sample = stats.Sample.make([5, 1, 4, 2, 3], [0] * 5)
    assert stats.quantiles(sample, (0.0, 0.5, 0.9, 1.0)) == [1, 3, 4.6, 5]
    assert stats.quantiles(stats.Sample.make([], []), SHARES) == [None, None, None]
    assert stats.ratio([1, 2], [2, 4]) == 0.5
    assert stats.ratio([1], [0]) is None


@given(values, st.data())
@settings(max_examples=200)
def test_a_draw_counts_values_as_often_as_their_blocks(
    drawn_values: list[float], data: st.DataObject
) -> None:
    """The reference repeats the values in memory and lets numpy take the quantile."""
    count = 4
    places = [data.draw(st.integers(0, count - 1)) for _ in drawn_values]
    row = [data.draw(st.integers(0, 3)) for _ in range(count)]
    sample = stats.Sample.make(drawn_values, places)
    repeated = [v for v, place in zip(drawn_values, places, strict=True) for _ in range(row[place])]
    (found,) = stats.resampled_quantiles(sample, SHARES, np.asarray([row]))
    if not repeated:
        assert np.isnan(found).all()
    else:
        assert found == pytest.approx(np.quantile(repeated, SHARES))


@given(st.integers(1, 30), st.integers(0, 1 << 40))
def test_a_draw_has_as_many_blocks_as_there_are(blocks: int, seed: int) -> None:
    drawn = stats.draw(blocks, 100, seed)
    assert drawn.shape == (100, blocks)
    assert (drawn.sum(axis=1) == blocks).all()
    assert (drawn == stats.draw(blocks, 100, seed)).all()


def test_ratios_of_sums() -> None:
    draws = np.asarray([[1, 1], [2, 0], [0, 2]])
    assert stats.resampled_ratio([1, 6], [2, 3], draws) == pytest.approx([7 / 5, 0.5, 2])
    assert np.isnan(stats.resampled_ratio([1, 6], [0, 3], draws)[1])
    assert np.isnan(stats.divide(np.asarray([1.0]), np.asarray([0.0]))[0])


def test_what_cannot_be_known_has_no_interval() -> None:
    assert stats.estimate(3.0, np.full(100, 3.0), 1) == stats.Estimate(3.0)
    assert stats.estimate(None, np.full(100, np.nan), 5) == stats.Estimate(None)
    holes = np.where(np.arange(100) < 10, np.nan, 3.0)
    assert stats.estimate(3.0, holes, 5) == stats.Estimate(3.0)
    assert stats.estimate(3.0, np.full(100, 3.0), 5) == stats.Estimate(3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(9, 0.5, True), (10, 0.5, False), (49, 0.9, True), (51, 0.9, False), (499, 0.99, True)],
)
def test_few_values(count: int, share: float, expected: bool) -> None:
    assert stats.few(count, share) is expected


def covered(rng: np.random.Generator, share: float, truth: float) -> bool:
    """One run of 30 blocks, each with a state of its own that all its requests share."""
    blocks, size = 30, 20
    states = rng.normal(size=blocks)
    found = (states[:, None] + rng.normal(size=(blocks, size))) / np.sqrt(2)
    sample = stats.Sample.make(found.ravel().tolist(), np.repeat(np.arange(blocks), size).tolist())
    draws = stats.draw(blocks, 300, int(rng.integers(1 << 40)))
    (value,) = stats.quantiles(sample, (share,))
    resampled = stats.resampled_quantiles(sample, (share,), draws)[:, 0]
    estimate = stats.estimate(value, resampled, blocks)
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low <= truth <= estimate.high


@pytest.mark.parametrize(("share", "truth"), [(0.5, 0.0), (0.9, 1.2815515655446004)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(share: float, truth: float) -> None:
    """Values of one block are alike. Drawn one by one they would cover it in half of all runs."""
    rng = np.random.default_rng(1)
    runs = 200
    assert sum(covered(rng, share, truth) for _ in range(runs)) >= 0.88 * runs


def test_pairing_makes_a_ratio_sharper() -> None:
    """Both arms meet the same blocks: what a block does to both does not blur their ratio."""
    rng = np.random.default_rng(2)
    blocks = 20
    states = np.exp(rng.normal(size=blocks))
    first, second = states, 0.5 * states * np.exp(0.01 * rng.normal(size=blocks))
    draws = stats.draw(blocks, 1000, 0)

    def resampled(amounts: stats.Floats) -> stats.Floats:
        return stats.resampled_ratio(amounts.tolist(), [1.0] * blocks, draws)

    paired = stats.divide(resampled(second), resampled(first))
    found = stats.estimate(0.5, paired, blocks)
    assert found.low is not None
    assert found.high is not None
    assert 0.49 < found.low < found.high < 0.51
