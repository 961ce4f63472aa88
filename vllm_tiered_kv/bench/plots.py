# SPDX-License-Identifier: Apache-2.0
"""The pictures. matplotlib is imported only when they are drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from vllm_tiered_kv.bench.report import SHARES, Percentile, Report
from vllm_tiered_kv.bench.stats import quantiles
from vllm_tiered_kv.bench.summary import LATENCIES, MS, Measured

_SIZE = (8.0, 4.2)


def draw(report: Report, found: Sequence[Measured]) -> dict[str, bytes]:
    """PNG files by what they show."""
    import matplotlib as mpl

    mpl.use("Agg")
    return {
        "Time to first token: share of requests that have it": _distribution(found, "ttft"),
        "Percentiles with their intervals": _percentiles(report),
        "Median time to first token, block by block": _drift(found),
        "Prompt tokens that were not computed": _hits(report),
    }


def _distribution(found: Sequence[Measured], metric: str) -> bytes:
    """An empirical distribution function an arm."""
    figure, axes = _axes()
    for arm in found:
        values = arm.sample(LATENCIES[metric]).values * MS
        shares = [100 * (place + 1) / len(values) for place in range(len(values))]
        axes.step(values, shares, where="post", label=arm.arm)
    axes.set(xscale="log", xlabel="time to first token, ms", ylabel="requests, %", ylim=(0, 101))
    _plain_numbers(axes.xaxis)
    return _png(figure, axes)


def _percentiles(report: Report) -> bytes:
    from matplotlib import pyplot

    metrics = ("ttft", "tpot", "itl")
    figure, panels = pyplot.subplots(1, len(metrics), figsize=(10, 4.2), layout="constrained")
    for metric, axes in zip(metrics, panels, strict=True):
        axes.set(ylabel="ms", yscale="log")
        _plain_numbers(axes.yaxis)
        for number, arm in enumerate(report.arms):
            latency = next(each for each in arm.latencies if each.metric == metric)
            shift = 0.16 * (number - (len(report.arms) - 1) / 2)
            places = [place + shift for place in range(len(SHARES))]
            values, below, above = zip(*map(_bar, latency.percentiles), strict=True)
            axes.errorbar(places, values, yerr=(below, above), fmt="o", capsize=3, label=arm.name)
        axes.set_title(metric.upper())
        axes.set_xticks(range(len(SHARES)), [f"p{100 * share:g}" for share in SHARES])
        axes.grid(visible=True, color="0.9")
        axes.set_axisbelow(True)
    return _png(figure, panels[0])


def _bar(percentile: Percentile) -> tuple[float, float, float]:
    """A value, and how far its interval reaches below and above it."""
    value, low, high = (
        percentile.estimate.value,
        percentile.estimate.low,
        percentile.estimate.high,
    )
    if value is None:
        return math.nan, 0.0, 0.0
    if low is None or high is None:
        return value, 0.0, 0.0
    return value, max(0.0, value - low), max(0.0, high - value)


def _drift(found: Sequence[Measured]) -> bytes:
    """What the machine did to all arms while they were measured."""
    figure, axes = _axes()
    for arm in found:
        points = []
        for place, block in enumerate(arm.blocks):
            one = Measured(arm.arm, (block,)).sample(LATENCIES["ttft"])
            if (median := quantiles(one, (0.5,))[0]) is not None:
                points.append((place + 1, median * MS))
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=arm.arm)
    axes.set(xlabel="block", ylabel="median time to first token, ms")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    return _png(figure, axes)


def _hits(report: Report) -> bytes:
    figure, axes = _axes()
    tiers = [hit.tier for hit in report.arms[0].hits]
    for number, arm in enumerate(report.arms):
        shift = 0.8 * (number - (len(report.arms) - 1) / 2) / len(report.arms)
        shares = [100 * (hit.share.value or 0.0) for hit in arm.hits]
        places = [place + shift for place in range(len(tiers))]
        axes.bar(places, shares, width=0.8 / len(report.arms), label=arm.name)
        for place, hit in zip(places, arm.hits, strict=True):
            if hit.tokens is None:
                axes.text(place, 0, " not reported", rotation=90, ha="center", va="bottom", size=7)
    axes.set_xticks(range(len(tiers)), tiers, rotation=20, ha="right")
    axes.set(ylabel="of prompt tokens, %")
    return _png(figure, axes)


def _plain_numbers(axis: Any) -> None:
    """On a log scale 1, 2, 5, 10 instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _axes() -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    axes.grid(visible=True, color="0.9")
    axes.set_axisbelow(True)
    return figure, axes


def _png(figure: Any, labelled: Any) -> bytes:
    from matplotlib import pyplot

    handles, names = labelled.get_legend_handles_labels()
    if handles:
        # A name is text, not mathematics.
        legend = figure.legend(
            handles, names, loc="outside lower center", ncols=3, fontsize="small"
        )
        for text in legend.get_texts():
            text.set_parse_math(False)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    pyplot.close(figure)
    return stream.getvalue()
