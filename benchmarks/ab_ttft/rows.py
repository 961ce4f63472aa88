# SPDX-License-Identifier: Apache-2.0
"""The figures as rows, with the goals they are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks._report import Row
from benchmarks.ab_ttft.arms import Arm
from benchmarks.ab_ttft.measure import Measured, Phase
from benchmarks.ab_ttft.results import LengthResult
from benchmarks.ab_ttft.stats import Summary

COLD_RATIO_GOAL = 1.01
FLOOR_RATIO_GOAL = 1.25
PEER_RATIO_GOAL = 1.0
GOALS_FROM_TOKENS = 1000
"""Hits of shorter prompts are reported without a goal."""
_NO_ARM = "-"


def rows(results: Sequence[LengthResult], measured: Measured) -> list[Row]:
    """All of them, those of one length together; every goal is an upper limit.

    A spread is the range, for ratios the interval that holds the true median 95 times in 100.
    """
    return [row for result in results for row in _of_length(result)] + _of_run(measured)


def _of_length(result: LengthResult) -> Iterator[Row]:
    at = f"{result.tokens} tokens"
    held = result.tokens >= GOALS_FROM_TOKENS
    for arm, value in result.cold.items():
        yield summary_row(f"cold TTFT, {at}", arm, value, "ms")
    for arm, value in result.hit.items():
        yield summary_row(f"hit TTFT, {at}", arm, value, "ms")
    if result.device is not None:
        yield summary_row(f"device hit TTFT, {at}", Arm.NONE, result.device, "ms")
    yield summary_row(f"memcpy of the KV, {at}", None, result.memcpy, "ms")
    if result.floor is not None:
        yield exact_row(f"floor, {at}", None, result.floor, "ms")
    for arm, value in result.cold_ratio.items():
        goal = COLD_RATIO_GOAL if arm is Arm.OURS else None
        yield summary_row(f"cold TTFT / none, {at}", arm, value, "x", goal)
    for arm, value in result.floor_ratio.items():
        goal = FLOOR_RATIO_GOAL if arm is Arm.OURS and held else None
        yield summary_row(f"hit TTFT / floor, {at}", arm, value, "x", goal)
    for peer, value in result.hit_ratio.items():
        goal = PEER_RATIO_GOAL if held else None
        yield summary_row(f"hit TTFT / {peer.value}, {at}", Arm.OURS, value, "x", goal)
    for arm, value in result.cold_cpu.items():
        yield summary_row(f"CPU of a cold prompt, {at}", arm, value, "ms")
    for arm, value in result.cold_cpu_added.items():
        yield summary_row(f"CPU added to a cold prompt, {at}", arm, value, "ms")
    for arm, value in result.hit_cpu.items():
        yield summary_row(f"CPU of a hit, {at}", arm, value, "ms")
    for half, milliseconds in sorted(result.hooks.items()):
        yield exact_row(f"{half} hooks, cold prompt, {at}", Arm.OURS, milliseconds, "ms")
    for arm, count in result.misses.items():
        yield exact_row(f"missed hits, {at}", arm, count, "", 0 if arm is Arm.OURS else None)


def _of_run(measured: Measured) -> list[Row]:
    found = [exact_row("idle", arm, cores * 100, "% core") for arm, cores in measured.idle.items()]
    for arm, counted in measured.hit_tokens.items():
        said = sum(
            sample.cached_tokens
            for sample in measured.samples
            if sample.arm is arm and sample.phase is Phase.HIT
        )
        name = "hit tokens: answers' less the counter's"
        found.append(exact_row(name, arm, abs(said - counted), "tokens", 0))
    return [*found, exact_row("requests not at rest after", None, measured.unquiet, "", 0)]


def summary_row(
    metric: str, arm: Arm | None, value: Summary, unit: str, goal: float | None = None
) -> Row:
    """A row whose goal, if any, is an upper limit."""
    return Row(
        metric=metric,
        arm=arm.value if arm is not None else _NO_ARM,
        value=value.median,
        unit=unit,
        spread=(value.low, value.high),
        goal=goal,
        met=None if goal is None else value.median <= goal,
    )


def exact_row(
    metric: str, arm: Arm | None, value: float, unit: str, goal: float | None = None
) -> Row:
    """A row of a figure that does not vary."""
    return summary_row(metric, arm, Summary(value, value, value, 1), unit, goal)
