# SPDX-License-Identifier: Apache-2.0
"""The tables that docs/benchmarks.md shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ab_ttft.arms import IN_MEMORY, PEERS, Arm
from benchmarks.ab_ttft.cells import number, ratio, table, times
from benchmarks.ab_ttft.results import LengthResult

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


def render(results: Sequence[LengthResult], conditions: str) -> str:
    """Three tables and what they were measured on."""
    hit_arms = [arm for arm in (Arm.OURS, *PEERS) if any(arm in r.hit for r in results)]
    cold_arms = [arm for arm in IN_MEMORY if any(arm in r.cold for r in results)]
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


def update(document: Path, name: str, content: str) -> None:
    """Put ``content`` between the two markers of that name; the second one is added if need be.

    Raises:
        ValueError: the first marker is not there.
    """
    begin, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
    text = document.read_text(encoding="utf-8")
    before, found, rest = text.partition(begin)
    if not found:
        raise ValueError(f"{document}: no {begin}")
    _, closed, after = rest.partition(end)
    new = f"{before}{begin}\n{content}{end}{after if closed else rest}"
    document.write_text(new, encoding="utf-8")


def _hit_table(results: Sequence[LengthResult], arms: Sequence[Arm]) -> str:
    ours = Arm.OURS in arms
    header = ["prompt tokens", "computed again", *(arm.label for arm in arms), "floor"]
    rows = []
    for result in results:
        cells = [f"{result.tokens:,}", times(result.cold.get(Arm.NONE))]
        cells += [times(result.hit.get(arm)) for arm in arms]
        cells += [number(result.floor)]
        if ours:
            cells += [ratio(result.floor_ratio.get(Arm.OURS))]
        rows.append(cells)
    return table([*header, "ours / floor"] if ours else header, rows)


def _cold_table(results: Sequence[LengthResult], arms: Sequence[Arm]) -> str:
    compared = [arm for arm in arms if arm is not Arm.NONE]
    header = ["prompt tokens", *(arm.label for arm in arms)]
    header += [f"{arm.label}, ratio" for arm in compared]
    rows = [
        [f"{result.tokens:,}"]
        + [times(result.cold.get(arm)) for arm in arms]
        + [ratio(result.cold_ratio.get(arm)) for arm in compared]
        for result in results
    ]
    return table(header, rows)


def _cost_table(results: Sequence[LengthResult], arms: Sequence[Arm]) -> str:
    """What noise cannot hide: the processor time of a cold prompt."""
    with_hooks = any(result.hooks for result in results)
    header = ["prompt tokens", *(arm.label for arm in arms)]
    if with_hooks:
        header += ["our hooks, scheduler", "our hooks, worker"]
    rows = []
    for result in results:
        cells = [f"{result.tokens:,}"] + [times(result.cold_cpu.get(arm)) for arm in arms]
        if with_hooks:
            cells += [_hook(result.hooks, half) for half in ("scheduler", "worker")]
        rows.append(cells)
    return table(header, rows)


def _hook(hooks: Mapping[str, float], half: str) -> str:
    return f"{hooks[half]:.2f}" if half in hooks else "-"
