# SPDX-License-Identifier: Apache-2.0
"""From single hand-overs to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from benchmarks._report import Row
from benchmarks.ab_ttft.cells import NOTHING, number, ratio, table, times
from benchmarks.ab_ttft.stats import Summary, with_interval, with_range
from benchmarks.pd.arms import Arm
from benchmarks.pd.limits import Limit
from benchmarks.pd.run import HandOver, Measured

GIB = 1 << 30
RAW_GOAL = 0.9
"""Least share of NIXL alone, of prompts of at least ..."""
RATE_TOKENS = 4_000
"""... so many tokens."""
PEER_GOAL = 1.0
"""The most of the other connector's time."""
TTFT_GOAL = {4_000: 100.0}
"""Milliseconds by prompt length."""
IDLE_GOAL = 3.0
"""Percent of a core, of every process."""

_TTFT_TITLE = (
    "Time to first token of the decode request in ms, median (smallest to largest): prefill is "
    "over, and the request brings what the prefill engine answered. Ratios are paired by round, "
    "with the interval that holds the true median 95 times in 100:"
)
_RATE_TITLE = (
    "GiB/s of the same bytes: one large memcpy; NIXL alone, reading scattered pages in pieces of "
    "the same size; the reads of the engines, by their own counters. The whole hand-over is what "
    "the decode request takes longer than one whose prompt is on the device:"
)
_IDLE_TITLE = "Percent of a core while nothing is asked:"


class LengthResult(msgspec.Struct, frozen=True):
    """One prompt length. Times in ms, rates in GiB/s; a median and its range.

    Ratios and differences are of the same round; they have the median's interval.
    """

    tokens: int
    ttft: dict[Arm, Summary]
    cached: dict[Arm, Summary]
    """Of a prompt in the consumer's device cache."""
    handover: dict[Arm, Summary]
    """What the first has over the second."""
    to_peer: Summary | None
    """Our time to the first token over NixlConnector's."""
    read: dict[Arm, Summary]
    """The rate of the read alone, by the consumer's counters."""
    raw: Summary
    """NIXL alone."""
    memcpy: Summary
    read_to_raw: dict[Arm, Summary]
    """The read's rate over that of NIXL alone."""
    handover_to_raw: dict[Arm, Summary]
    """The whole hand-over's."""


class _Length:
    """What was seen of one length, by round."""

    def __init__(self, handovers: Sequence[HandOver], limits: Sequence[Limit]) -> None:
        self.limits = dict(enumerate(limits))
        self.by_arm: dict[Arm, dict[int, HandOver]] = {}
        for each in handovers:
            self.by_arm.setdefault(each.arm, {})[each.round] = each

    def each(
        self, of: Callable[[HandOver], float], over: Callable[[Sequence[float]], Summary]
    ) -> dict[Arm, Summary]:
        return {arm: over([of(h) for h in seen.values()]) for arm, seen in self.by_arm.items()}

    def rates(self, seconds: Callable[[HandOver], float]) -> dict[Arm, Summary]:
        """GiB/s; without an arm for which so many seconds are sometimes none."""
        return {
            arm: with_range([each.nbytes / seconds(each) / GIB for each in seen.values()])
            for arm, seen in self.by_arm.items()
            if all(seconds(each) > 0 for each in seen.values())
        }

    def to_raw(self, seconds: Callable[[HandOver], float]) -> dict[Arm, Summary]:
        """The rate in so many seconds over that of NIXL alone in the same round."""
        return {
            arm: with_interval([self._to_raw(each, seconds(each)) for each in seen.values()])
            for arm, seen in self.by_arm.items()
            if all(seconds(each) > 0 for each in seen.values())
        }

    def _to_raw(self, each: HandOver, seconds: float) -> float:
        limit = self.limits[each.round]
        return each.nbytes / seconds / (limit.nbytes / limit.raw_seconds)


def summarise(measured: Measured) -> list[LengthResult]:
    """One result a prompt length, in the order of lengths."""
    return [_summarise(length, measured) for length in sorted(measured.limits)]


def _summarise(length: int, measured: Measured) -> LengthResult:
    limits = measured.limits[length]
    seen = _Length([h for h in measured.handovers if h.tokens == length], limits)
    ours, peers = seen.by_arm.get(Arm.OURS, {}), seen.by_arm.get(Arm.NIXL, {})
    ratios = [ours[n].seconds / peers[n].seconds for n in sorted(ours.keys() & peers.keys())]
    return LengthResult(
        tokens=length,
        ttft=seen.each(lambda h: h.seconds * 1e3, with_range),
        cached=seen.each(lambda h: h.cached_seconds * 1e3, with_range),
        handover=seen.each(lambda h: _extra(h) * 1e3, with_interval),
        to_peer=with_interval(ratios) if ratios else None,
        read=seen.rates(lambda h: h.read_seconds),
        raw=with_range([limit.nbytes / limit.raw_seconds / GIB for limit in limits]),
        memcpy=with_range([limit.nbytes / limit.memcpy_seconds / GIB for limit in limits]),
        read_to_raw=seen.to_raw(lambda h: h.read_seconds),
        handover_to_raw=seen.to_raw(_extra),
    )


def _extra(handover: HandOver) -> float:
    return handover.seconds - handover.cached_seconds


def rows(results: Sequence[LengthResult], measured: Measured) -> list[Row]:
    """All figures, with the goals they are held to."""
    found = [row for result in results for row in _of_length(result)]
    for arm, seconds in measured.first.items():
        found.append(_row("first hand-over of all", arm, _exactly(seconds * 1e3), "ms"))
    for arm, roles in measured.idle.items():
        for role, kinds in roles.items():
            for kind, (whole, threads) in kinds.items():
                value, beside = _exactly(whole), _exactly(threads)
                goal = IDLE_GOAL if arm is Arm.OURS else None
                found.append(_at_most(f"idle, {role}, {kind}", arm, value, "% core", goal))
                found.append(_row(f"idle, {role}, {kind} but main", arm, beside, "% core"))
    return found


def _of_length(result: LengthResult) -> Iterator[Row]:
    at = f"{result.tokens} tokens"
    for arm, value in result.ttft.items():
        goal = TTFT_GOAL.get(result.tokens) if arm is Arm.OURS else None
        yield _at_most(f"TTFT, {at}", arm, value, "ms", goal)
    for arm, value in result.cached.items():
        yield _row(f"TTFT from the device, {at}", arm, value, "ms")
    for arm, value in result.handover.items():
        yield _row(f"hand-over, {at}", arm, value, "ms")
    if result.to_peer is not None:
        name = f"TTFT / {Arm.NIXL.label}, {at}"
        yield _at_most(name, Arm.OURS, result.to_peer, "x", PEER_GOAL)
    yield _row(f"NIXL alone, {at}", None, result.raw, "GiB/s")
    yield _row(f"memcpy, {at}", None, result.memcpy, "GiB/s")
    for arm, value in result.read.items():
        yield _row(f"read, {at}", arm, value, "GiB/s")
    for what, shares in (("read", result.read_to_raw), ("hand-over", result.handover_to_raw)):
        for arm, value in shares.items():
            held = arm is Arm.OURS and result.tokens >= RATE_TOKENS
            goal = RAW_GOAL if held else None
            yield _at_least(f"{what} / NIXL alone, {at}", arm, value, "x", goal)


def _row(metric: str, arm: Arm | None, value: Summary, unit: str) -> Row:
    name = arm.value if arm is not None else NOTHING
    return Row(metric, name, value.median, unit, (value.low, value.high))


def _at_most(metric: str, arm: Arm, value: Summary, unit: str, goal: float | None) -> Row:
    met = None if goal is None else value.median <= goal
    return msgspec.structs.replace(_row(metric, arm, value, unit), goal=goal, met=met)


def _at_least(metric: str, arm: Arm, value: Summary, unit: str, goal: float | None) -> Row:
    met = None if goal is None else value.median >= goal
    return msgspec.structs.replace(_row(metric, arm, value, unit), goal=goal, met=met)


def _exactly(value: float) -> Summary:
    return Summary(value, value, value, 1)


def render(results: Sequence[LengthResult], measured: Measured, conditions: str) -> str:
    """The tables for the documents, and what they were measured on."""
    parts = [_TTFT_TITLE, _ttft_table(results), _RATE_TITLE, _rate_table(results)]
    return "\n\n".join([*parts, _IDLE_TITLE, _idle_table(measured), conditions]) + "\n"


def _ttft_table(results: Sequence[LengthResult]) -> str:
    arms = [arm for arm in Arm if any(arm in result.ttft for result in results)]
    header = ["prompt tokens", *(arm.label for arm in arms), "ours over the other's"]
    header += ["ours, if it is on the device"]
    lines = [
        [
            f"{result.tokens:,}",
            *(times(result.ttft.get(arm)) for arm in arms),
            ratio(result.to_peer),
            times(result.cached.get(Arm.OURS)),
        ]
        for result in results
    ]
    return table(header, lines)


def _rate_table(results: Sequence[LengthResult]) -> str:
    arms = [arm for arm in Arm if any(arm in result.read for result in results)]
    header = ["prompt tokens", "memcpy", "NIXL alone", *(f"{arm.label}, read" for arm in arms)]
    header += ["our read over NIXL alone", "our whole hand-over over NIXL alone"]
    lines = [
        [f"{result.tokens:,}", ratio(result.memcpy), ratio(result.raw)]
        + [ratio(result.read.get(arm)) for arm in arms]
        + [ratio(shares.get(Arm.OURS)) for shares in (result.read_to_raw, result.handover_to_raw)]
        for result in results
        if result.tokens >= RATE_TOKENS
    ]
    return table(header, lines)


def _idle_table(measured: Measured) -> str:
    lines = [
        [arm.label, role.removeprefix("kv_"), kind, number(whole), number(threads)]
        for arm, roles in measured.idle.items()
        for role, kinds in roles.items()
        for kind, (whole, threads) in kinds.items()
    ]
    return table(["", "engine", "process", "in all", "without its main thread"], lines)
