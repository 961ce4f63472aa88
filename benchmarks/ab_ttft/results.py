# SPDX-License-Identifier: Apache-2.0
"""From single requests to the figures that are quoted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from benchmarks.ab_ttft.arms import Arm
from benchmarks.ab_ttft.measure import Measured, Phase, Sample
from benchmarks.ab_ttft.stats import Summary, with_interval, with_range


class LengthResult(msgspec.Struct, frozen=True):
    """One prompt length. Times in ms; a median and its range, ratios with the median's interval.

    Ratios are paired: each is of two requests with the same prompt in the same round.
    """

    tokens: int
    cold: dict[Arm, Summary]
    hit: dict[Arm, Summary]
    device: Summary | None
    memcpy: Summary
    cold_ratio: dict[Arm, Summary]
    """To no connector."""
    floor_ratio: dict[Arm, Summary]
    """A hit to a device hit and one copy of the bytes, together."""
    hit_ratio: dict[Arm, Summary]
    """Our hit to a peer's."""
    cold_cpu: dict[Arm, Summary]
    """Processor time of a cold prompt, all processes of the arm."""
    cold_cpu_added: dict[Arm, Summary]
    """What an arm uses more of it than no connector, paired; the median's interval."""
    hit_cpu: dict[Arm, Summary]
    hooks: dict[str, float]
    """Time in our hooks a cold prompt, by half."""
    misses: dict[Arm, int]
    """Prompts asked a second time of which the connector did not have nearly all."""

    @property
    def floor(self) -> float | None:
        return self.device.median + self.memcpy.median if self.device else None


class _Series:
    """The samples of one length."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._by_key: dict[tuple[Arm, Phase], dict[int, Sample]] = {}
        for sample in samples:
            if sample.phase is not Phase.HIT or sample.hit:
                self._by_key.setdefault((sample.arm, sample.phase), {})[sample.round] = sample

    def arms(self, phase: Phase) -> list[Arm]:
        return [arm for arm in Arm if (arm, phase) in self._by_key]

    def seconds(self, arm: Arm, phase: Phase) -> dict[int, float]:
        """By round."""
        found = self._by_key.get((arm, phase), {})
        return {number: sample.seconds for number, sample in found.items()}

    def cpu(self, arm: Arm, phase: Phase) -> dict[int, float]:
        """Processor seconds by round."""
        found = self._by_key.get((arm, phase), {})
        return {number: sample.cpu_seconds for number, sample in found.items()}

    def milliseconds(self, phase: Phase, of: Callable[[Sample], float]) -> dict[Arm, Summary]:
        return {
            arm: with_range([of(s) * 1e3 for s in self._by_key[arm, phase].values()])
            for arm in self.arms(phase)
        }


def summarise(measured: Measured) -> list[LengthResult]:
    """One result a prompt length, in the order of lengths."""
    lengths = sorted({sample.tokens for sample in measured.samples})
    return [_summarise(length, measured) for length in lengths]


def _summarise(length: int, measured: Measured) -> LengthResult:
    samples = [sample for sample in measured.samples if sample.tokens == length]
    series = _Series(samples)
    copies = dict(enumerate(measured.memcpy[length]))
    device = series.seconds(Arm.NONE, Phase.DEVICE)
    floor = {number: seconds + copies[number] for number, seconds in device.items()}
    cold, hit = _by_arm(series, Phase.COLD), _by_arm(series, Phase.HIT)
    none, ours = cold.pop(Arm.NONE, {}), hit.get(Arm.OURS, {})
    peers = {arm: values for arm, values in hit.items() if arm is not Arm.OURS}
    return LengthResult(
        tokens=length,
        cold=series.milliseconds(Phase.COLD, lambda sample: sample.seconds),
        hit=series.milliseconds(Phase.HIT, lambda sample: sample.seconds),
        device=with_range(list(device.values())).scaled(1e3) if device else None,
        memcpy=with_range(list(copies.values())).scaled(1e3),
        cold_ratio=_ratios({arm: (values, none) for arm, values in cold.items()}),
        floor_ratio=_ratios({arm: (values, floor) for arm, values in hit.items()}),
        hit_ratio=_ratios({arm: (ours, values) for arm, values in peers.items()}),
        cold_cpu=series.milliseconds(Phase.COLD, lambda sample: sample.cpu_seconds),
        cold_cpu_added=_added(series),
        hit_cpu=series.milliseconds(Phase.HIT, lambda sample: sample.cpu_seconds),
        hooks={half: s * 1e3 for half, s in measured.hook_seconds.get(length, {}).items()},
        misses=_misses(samples),
    )


def _added(series: _Series) -> dict[Arm, Summary]:
    cpu = {arm: series.cpu(arm, Phase.COLD) for arm in series.arms(Phase.COLD)}
    none = cpu.pop(Arm.NONE, {})
    pairs = {
        arm: [used[number] - none[number] for number in used.keys() & none.keys()]
        for arm, used in cpu.items()
    }
    return {arm: with_interval(values).scaled(1e3) for arm, values in pairs.items() if values}


def _by_arm(series: _Series, phase: Phase) -> dict[Arm, dict[int, float]]:
    return {arm: series.seconds(arm, phase) for arm in series.arms(phase)}


def _ratios(
    pairs: dict[Arm, tuple[dict[int, float], dict[int, float]]],
) -> dict[Arm, Summary]:
    """Of what both have for the same round; arms without a common round are left out."""
    found: dict[Arm, Summary] = {}
    for arm, (above, below) in pairs.items():
        ratios = [above[number] / below[number] for number in above.keys() & below.keys()]
        if ratios:
            found[arm] = with_interval(ratios)
    return found


def _misses(samples: Sequence[Sample]) -> dict[Arm, int]:
    misses: dict[Arm, int] = {}
    for sample in samples:
        if sample.phase is Phase.HIT:
            misses[sample.arm] = misses.get(sample.arm, 0) + (not sample.hit)
    return misses
