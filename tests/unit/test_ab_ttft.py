# SPDX-License-Identifier: Apache-2.0
"""The arithmetic and the tables of the TTFT benchmark; its servers are run by the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ab_ttft import markdown
from benchmarks.ab_ttft.arms import Arm
from benchmarks.ab_ttft.measure import Measured, Phase, Sample
from benchmarks.ab_ttft.results import LengthResult, summarise
from benchmarks.ab_ttft.rows import rows
from benchmarks.ab_ttft.stats import with_interval, with_range

TOKENS = 2048


def sample(arm: Arm, number: int, phase: Phase, ms: float, cached: int = 0) -> Sample:
    return Sample(arm, TOKENS, number, phase, ms / 1e3, cached, cpu_seconds=ms / 1e3)


def measured(*, ours_hit: float = 30.0, ours_cached: int = TOKENS) -> Measured:
    """Three rounds of ever slower machines; 20 % more for LMCache, hits as given."""
    found = Measured(memcpy={TOKENS: [0.005, 0.005, 0.005]})
    for number, slow in enumerate((1.0, 2.0, 4.0)):
        found.samples += [
            sample(Arm.NONE, number, Phase.COLD, 100 * slow),
            sample(Arm.LMCACHE, number, Phase.COLD, 120 * slow),
            sample(Arm.OURS, number, Phase.COLD, 100 * slow),
            sample(Arm.NONE, number, Phase.DEVICE, 25, TOKENS),
            sample(Arm.LMCACHE, number, Phase.HIT, 60, TOKENS),
            sample(Arm.OURS, number, Phase.HIT, ours_hit, ours_cached),
        ]
    return found


def only_result(found: Measured) -> LengthResult:
    (result,) = summarise(found)
    return result


def test_ratios_are_paired_by_round() -> None:
    result = only_result(measured())
    ratio = result.cold_ratio[Arm.LMCACHE]
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((1.2, 1.2, 1.2))
    assert result.cold[Arm.LMCACHE].high == pytest.approx(480)
    assert result.floor == pytest.approx(30)
    assert result.floor_ratio[Arm.OURS].median == pytest.approx(1.0)
    assert result.hit_ratio[Arm.LMCACHE].median == pytest.approx(0.5)
    assert result.cold_cpu_added[Arm.LMCACHE].median == pytest.approx(40)


def test_a_missed_hit_is_counted_and_is_no_hit_time() -> None:
    found = measured(ours_hit=1.0, ours_cached=0)
    result = only_result(found)
    assert result.misses == {Arm.LMCACHE: 0, Arm.OURS: 3}
    assert Arm.OURS not in result.hit
    assert Arm.OURS not in result.floor_ratio
    missed = [row for row in rows([result], found) if row.metric.startswith("missed hits")]
    assert {row.arm: row.met for row in missed} == {"lmcache": None, "ours": False}


@pytest.mark.parametrize(("ours_hit", "met"), [(37.0, True), (38.0, False)])
def test_the_floor_is_a_goal(ours_hit: float, met: bool) -> None:
    found = measured(ours_hit=ours_hit)
    table = {(row.metric, row.arm): row for row in rows(summarise(found), found)}
    assert table["hit TTFT / floor, 2048 tokens", "ours"].met is met
    assert table["cold TTFT / none, 2048 tokens", "ours"].met is True
    assert table["cold TTFT / none, 2048 tokens", "lmcache"].met is None


def test_hit_tokens_are_held_against_the_servers_counter() -> None:
    found = measured()
    found.hit_tokens = {Arm.OURS: 3.0 * TOKENS, Arm.LMCACHE: 0.0}
    met = {row.arm: row.met for row in rows([], found) if row.metric.startswith("hit tokens")}
    assert met == {"ours": True, "lmcache": False}


def test_interval_of_the_median() -> None:
    # Ranks from the binomial distribution: 8 values the extremes, 36 values the 12th from each end.
    assert with_interval(range(8)).low == 0
    wide = with_interval(range(36))
    assert (wide.low, wide.median, wide.high) == (11, 17.5, 24)
    assert (with_range(range(36)).low, with_range(range(36)).high) == (0, 35)


@pytest.mark.parametrize("old", ["\nold\n<!-- /table:ab_ttft -->", ""])
def test_readme_keeps_everything_outside_the_markers(tmp_path: Path, old: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"a\n<!-- table:ab_ttft -->{old}\nb\n")
    table = markdown.render(summarise(measured()), "Conditions.")
    for _ in range(2):  # the second time changes nothing
        markdown.update(readme, "ab_ttft", table)
    text = readme.read_text()
    assert text == f"a\n<!-- table:ab_ttft -->\n{table}<!-- /table:ab_ttft -->\nb\n"
    assert "| 2,048 | 200 (100 to 400) | 30.0 (30.0 to 30.0) |" in text


def test_readme_without_markers_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n")
    with pytest.raises(ValueError, match="table:ab_ttft"):
        markdown.update(readme, "ab_ttft", "table\n")
    assert readme.read_text() == "a\n"
