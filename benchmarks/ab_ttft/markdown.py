# SPDX-License-Identifier: Apache-2.0
"""The tables that README.md shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.ab_ttft.arms import PEERS, Arm
from benchmarks.ab_ttft.results import LengthResult
from benchmarks.ab_ttft.stats import Summary

_HIT_TITLE = (
    "A prompt whose KV is in the connector's tier and no longer on the device; beside it the "
    "floor: a hit in vLLM's own device cache plus one single-threaded copy of the KV's bytes:"
)
_COLD_TITLE = (
    "A prompt never seen before; ratios are to no connector, paired prompt by prompt, with the "
    "interval that holds the true median 95 times in 100:"
)
_COST_TITLE = (
    "Processor time of a cold prompt in ms, all processes of the arm, with what they do after "
    "the answer:"
)
_BEGIN, _END = "<!-- table:ab_ttft -->", "<!-- /table:ab_ttft -->"


def render(results: Sequence[LengthResult], conditions: str) -> str:
    """Three tables and what they were measured on."""
    hit_arms = [arm for arm in (Arm.OURS, *PEERS) if any(arm in r.hit for r in results)]
    cold_arms = [arm for arm in Arm if any(arm in r.cold for r in results)]
    parts = [
        "Time to first token in ms, median (smallest to largest).",
        _HIT_TITLE,
        _hit_table(results, hit_arms),
        _COLD_TITLE,
        _cold_table(results, cold_arms),
        _COST_TITLE,
        _cost_table(results, cold_arms),
        conditions,
    ]
    return "\n\n".join(parts) + "\n"


def update_readme(readme: Path, table: str) -> None:
    """Put ``table`` between the two markers of ``readme``; the second one is added if need be.

    Raises:
        ValueError: the first marker is not there.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    if not begin:
        raise ValueError(f"{readme}: no {_BEGIN}")
    _, end, after = rest.partition(_END)
    new = f"{before}{_BEGIN}\n{table}{_END}{after if end else rest}"
    readme.write_text(new, encoding="utf-8")


def _hit_table(results: Sequence[LengthResult], arms: Sequence[Arm]) -> str:
    ours = Arm.OURS in arms
    header = ["prompt tokens", "computed again", *(arm.label for arm in arms), "floor"]
    rows = []
    for result in results:
        cells = [f"{result.tokens:,}", _time(result.cold.get(Arm.NONE))]
        cells += [_time(result.hit.get(arm)) for arm in arms]
        cells += [_number(result.floor)]
        if ours:
            cells += [_ratio(result.floor_ratio.get(Arm.OURS))]
        rows.append(cells)
    return _table([*header, "ours / floor"] if ours else header, rows)


def _cold_table(results: Sequence[LengthResult], arms: Sequence[Arm]) -> str:
    compared = [arm for arm in arms if arm is not Arm.NONE]
    header = ["prompt tokens", *(arm.label for arm in arms)]
    header += [f"{arm.label}, ratio" for arm in compared]
    rows = [
        [f"{result.tokens:,}"]
        + [_time(result.cold.get(arm)) for arm in arms]
        + [_ratio(result.cold_ratio.get(arm)) for arm in compared]
        for result in results
    ]
    return _table(header, rows)


def _cost_table(results: Sequence[LengthResult], arms: Sequence[Arm]) -> str:
    """What noise cannot hide: the processor time of a cold prompt."""
    with_hooks = any(result.hooks for result in results)
    header = ["prompt tokens", *(arm.label for arm in arms)]
    if with_hooks:
        header += ["our hooks, scheduler", "our hooks, worker"]
    rows = []
    for result in results:
        cells = [f"{result.tokens:,}"] + [_time(result.cold_cpu.get(arm)) for arm in arms]
        if with_hooks:
            cells += [_hook(result.hooks, half) for half in ("scheduler", "worker")]
        rows.append(cells)
    return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _missing_or(show: Callable[[Summary], str], value: Summary | None) -> str:
    return show(value) if value is not None else "-"


def _time(value: Summary | None) -> str:
    return _missing_or(
        lambda v: f"{_number(v.median)} ({_number(v.low)} to {_number(v.high)})", value
    )


def _ratio(value: Summary | None) -> str:
    return _missing_or(lambda v: f"{v.median:.3f} ({v.low:.3f} to {v.high:.3f})", value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _hook(hooks: Mapping[str, float], half: str) -> str:
    return f"{hooks[half]:.2f}" if half in hooks else "-"
