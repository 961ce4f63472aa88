# SPDX-License-Identifier: Apache-2.0
"""The picture of the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ab_ttft.arms import Arm
from benchmarks.ab_ttft.results import LengthResult
from benchmarks.ab_ttft.stats import Summary

_COLOURS = {
    Arm.OURS: "#0b6e4f",
    Arm.LMCACHE: "#c8553d",
    Arm.EXAMPLE: "#8d7b5f",
    Arm.NONE: "#3d405b",
}
_INK, _GRID = "#333333", "#dddddd"
_MARKERS = {Arm.OURS: "o", Arm.LMCACHE: "s", Arm.EXAMPLE: "^", Arm.NONE: "D"}


def draw(results: Sequence[LengthResult], path: Path) -> None:
    """Write a PNG: time to first token over prompt length, cold and hit, log scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    lengths = [result.tokens for result in results]
    figure, (cold, hit) = pyplot.subplots(1, 2, figsize=(10, 4.6), sharey=True)
    for arm in (Arm.EXAMPLE, Arm.LMCACHE, Arm.NONE, Arm.OURS):
        _line(cold, arm, lengths, [result.cold.get(arm) for result in results])
        # Without a connector the prompt is computed again.
        _line(hit, arm, lengths, [(r.cold if arm is Arm.NONE else r.hit).get(arm) for r in results])
    floors = [result.floor for result in results]
    if None not in floors:
        hit.plot(lengths, floors, color=_INK, linewidth=1.2, linestyle=(0, (4, 3)), label="floor")
    cold.set_title("Never seen before", loc="left", fontsize=11, color=_INK)
    hit.set_title("In the tier, not on the device", loc="left", fontsize=11, color=_INK)
    cold.set_ylabel("time to first token, ms", color=_INK)
    for axes in (cold, hit):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("prompt tokens", color=_INK)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.grid(visible=True, color=_GRID, linewidth=0.7)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, length=0, labelleft=True)
        axes.spines[:].set_visible(False)
    handles, labels = hit.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="lower center",
        ncol=len(labels),
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
    )
    figure.tight_layout(w_pad=2.5, rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _line(axes: Any, arm: Arm, lengths: Sequence[int], values: Sequence[Summary | None]) -> None:
    points = [(x, value) for x, value in zip(lengths, values, strict=True) if value is not None]
    if not points:
        return
    x = [length for length, _ in points]
    width = 2.4 if arm is Arm.OURS else 1.5
    axes.fill_between(
        x, [v.low for _, v in points], [v.high for _, v in points], color=_COLOURS[arm], alpha=0.1
    )
    axes.plot(
        x,
        [v.median for _, v in points],
        color=_COLOURS[arm],
        marker=_MARKERS[arm],
        markersize=5,
        linewidth=width,
        label=arm.label,
    )
