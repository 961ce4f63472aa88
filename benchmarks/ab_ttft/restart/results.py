# SPDX-License-Identifier: Apache-2.0
"""From single requests to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from benchmarks._report import Row
from benchmarks.ab_ttft.arms import DISK_PEERS, Arm
from benchmarks.ab_ttft.cells import ratio, table, times
from benchmarks.ab_ttft.measure import Phase
from benchmarks.ab_ttft.restart.run import Measured, Sample
from benchmarks.ab_ttft.rows import exact_row, summary_row
from benchmarks.ab_ttft.stats import Summary, with_interval, with_range

PEER_RATIO_GOAL = 1.0
_TIMES_TITLE = (
    "Time to first token in ms, median (smallest to largest), of prompts whose KV lies in files "
    "only: all processes were ended and started anew, and nothing was in the page cache. Beside "
    "it the floor: a hit in vLLM's own device cache plus one read of the KV's bytes from the disk "
    "by four threads."
)
_RATIOS_TITLE = (
    "Our time over the peer's, paired prompt by prompt, with the interval that holds the true "
    "median 95 times in 100:"
)


class LengthResult(msgspec.Struct, frozen=True):
    """One prompt length. Times in ms; a median and its range, ratios with the median's interval."""

    tokens: int
    computed: Summary | None
    """Without a connector."""
    hit: dict[Arm, Summary]
    """After the restart, from the disk."""
    floor: Summary | None
    """A hit on the device and one read of the bytes."""
    hit_ratio: dict[Arm, Summary]
    """Our hit to a peer's."""
    misses: dict[Arm, int]
    """Prompts of which the connector did not have nearly all."""
    cached: dict[Arm, int]
    """Hits that did not come from the disk, but from the page cache."""


def summarise(measured: Measured) -> list[LengthResult]:
    """One result a prompt length, in the order of lengths."""
    lengths = sorted({sample.tokens for sample in measured.samples})
    return [_summarise(length, measured) for length in lengths]


def _summarise(length: int, measured: Measured) -> LengthResult:
    samples = [sample for sample in measured.samples if sample.tokens == length]
    hits = [sample for sample in samples if sample.phase is Phase.HIT]
    arms = [arm for arm in Arm if any(sample.arm is arm for sample in hits)]
    good = {
        arm: _by_prompt(s for s in hits if s.arm is arm and s.hit and measured.is_from_device(s))
        for arm in arms
    }
    plain = [sample for sample in samples if sample.arm is Arm.NONE]
    computed = _by_prompt(sample for sample in plain if sample.phase is Phase.COLD)
    device = _by_prompt(sample for sample in plain if sample.phase is Phase.DEVICE)
    reads = measured.disk_reads.get(length, [])
    ours = good.get(Arm.OURS_DISK, {})
    ratios = {
        arm: [ours[n] / good[arm][n] for n in sorted(ours.keys() & good[arm].keys())]
        for arm in arms
        if arm is not Arm.OURS_DISK
    }
    return LengthResult(
        tokens=length,
        computed=_milliseconds(list(computed.values())),
        hit={arm: with_range(list(s.values())).scaled(1e3) for arm, s in good.items() if s},
        floor=_milliseconds(
            [device[n] + read for n, read in zip(sorted(device), reads, strict=False)]
        ),
        hit_ratio={arm: with_interval(found) for arm, found in ratios.items() if found},
        misses={arm: sum(s.arm is arm and not s.hit for s in hits) for arm in arms},
        cached={
            arm: sum(s.arm is arm and s.hit and not measured.is_from_device(s) for s in hits)
            for arm in arms
        },
    )


def rows(results: Sequence[LengthResult], measured: Measured) -> list[Row]:
    """All figures; every goal is an upper limit."""
    found = [row for result in results for row in _of_length(result)]
    for arm, seconds in measured.starts.items():
        found.append(summary_row("start until at rest", arm, with_range(seconds), "s"))
    said = sum(
        sample.cached_tokens
        for sample in measured.samples
        if sample.arm is Arm.OURS_DISK and sample.phase is Phase.HIT
    )
    name = "tokens from disk: answers' less the counter's"
    return [*found, exact_row(name, Arm.OURS_DISK, abs(said - measured.disk_hits), "tokens", 0)]


def _of_length(result: LengthResult) -> Iterator[Row]:
    at = f"{result.tokens} tokens"
    if result.computed is not None:
        yield summary_row(f"computed again, {at}", Arm.NONE, result.computed, "ms")
    for arm, value in result.hit.items():
        yield summary_row(f"hit after restart, {at}", arm, value, "ms")
    if result.floor is not None:
        yield summary_row(f"floor, {at}", None, result.floor, "ms")
    for peer, value in result.hit_ratio.items():
        name = f"hit after restart / {peer.value}, {at}"
        yield summary_row(name, Arm.OURS_DISK, value, "x", PEER_RATIO_GOAL)
    for arm, count in result.misses.items():
        yield exact_row(f"missed hits, {at}", arm, count, "", 0 if arm is Arm.OURS_DISK else None)
    for arm, count in result.cached.items():
        yield exact_row(f"hits from the page cache, {at}", arm, count, "", 0)


def _times(results: Sequence[LengthResult]) -> str:
    arms = [arm for arm in (Arm.OURS_DISK, *DISK_PEERS) if any(arm in r.hit for r in results)]
    header = ["prompt tokens", "computed again", *(arm.label for arm in arms), "floor"]
    lines = [
        [f"{result.tokens:,}", times(result.computed)]
        + [times(result.hit.get(arm)) for arm in arms]
        + [times(result.floor)]
        for result in results
    ]
    return f"{_TIMES_TITLE}\n\n{table(header, lines)}\n"


def render(results: Sequence[LengthResult], conditions: str) -> str:
    """The tables for the documents, and what they were measured on."""
    peers = [arm for arm in DISK_PEERS if any(arm in r.hit_ratio for r in results)]
    header = ["prompt tokens", *(f"to {arm.label}" for arm in peers)]
    lines = [
        [f"{result.tokens:,}", *(ratio(result.hit_ratio.get(arm)) for arm in peers)]
        for result in results
    ]
    ratios = f"{_RATIOS_TITLE}\n\n{table(header, lines)}"
    return f"{_times(results)}\n{ratios}\n\n{conditions}\n"


def _by_prompt(samples: Iterator[Sample]) -> dict[int, float]:
    return {sample.prompt: sample.seconds for sample in samples}


def _milliseconds(seconds: Sequence[float]) -> Summary | None:
    return with_range(seconds).scaled(1e3) if seconds else None
