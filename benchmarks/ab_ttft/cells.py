# SPDX-License-Identifier: Apache-2.0
"""A table in Markdown, and what stands in its cells."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.ab_ttft.stats import Summary

NOTHING = "-"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def times(value: Summary | None) -> str:
    """A median with what lies around it."""
    if value is None:
        return NOTHING
    return f"{number(value.median)} ({number(value.low)} to {number(value.high)})"


def ratio(value: Summary | None) -> str:
    if value is None:
        return NOTHING
    return f"{value.median:.3f} ({value.low:.3f} to {value.high:.3f})"


def number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
