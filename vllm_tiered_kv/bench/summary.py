# SPDX-License-Identifier: Apache-2.0
"""From records to figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import msgspec

from vllm_tiered_kv.bench import stats
from vllm_tiered_kv.bench.config import Arm, Experiment, Slo
from vllm_tiered_kv.bench.records import Answer, Counted, Record
from vllm_tiered_kv.bench.report import (
    SHARES,
    ArmReport,
    Failures,
    Hits,
    Latency,
    Percentile,
    Rate,
    Ratio,
)
from vllm_tiered_kv.bench.runner import BlockResult
from vllm_tiered_kv.bench.scrape import BY_SOURCE, PROMPT_TOKENS, SOURCES

MS = 1e3
OUR_FIRST = "tiered-kv: cpu"
"""Shown in any case: where it serves nothing one wants to know."""
BY_ANSWERS = "by the answers"
"""All tiers together, as ``usage.prompt_tokens_details`` has it."""


class Measured(msgspec.Struct, frozen=True):
    """One arm's blocks, in order, with what is needed again and again."""

    arm: str
    blocks: tuple[BlockResult, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(chain.from_iterable(block.records for block in self.blocks))

    def sample(self, values_of: Callable[[Answer], Sequence[float]]) -> stats.Sample:
        """What each answer gives, with the place of its block."""
        values: list[float] = []
        places: list[int] = []
        for place, block in enumerate(self.blocks):
            for record in block.records:
                if record.answer is not None:
                    found = values_of(record.answer)
                    values += found
                    places += [place] * len(found)
        return stats.Sample.make(values, places)

    def sums(self, value_of: Callable[[Record], float]) -> list[float]:
        """One a block."""
        return [sum(map(value_of, block.records)) for block in self.blocks]

    @property
    def seconds(self) -> list[float]:
        return [block.seconds for block in self.blocks]


class _Figure(msgspec.Struct, frozen=True):
    """A figure of one arm, and what it is in each resample."""

    metric: str
    share: float | None
    estimate: stats.Estimate
    resampled: stats.Floats


class Summary(msgspec.Struct, frozen=True):
    """What there is to say of the arms."""

    arms: tuple[ArmReport, ...]
    ratios: tuple[Ratio, ...]


LATENCIES: Mapping[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: (answer.ttft,),
    "tpot": lambda answer: (answer.tpot,) if answer.tpot is not None else (),
    "itl": lambda answer: answer.gaps,
    "e2e": lambda answer: (answer.seconds,),
}


def good(record: Record, slo: Slo) -> bool:
    """Has it been answered as fast as was asked for?"""
    answer = record.answer
    if answer is None:
        return False
    bounds = (
        (slo.ttft_ms, answer.ttft),
        (slo.tpot_ms, answer.tpot),
        (slo.e2e_ms, answer.seconds),
    )
    return all(most is None or took is None or took * MS <= most for most, took in bounds)


def measured(arms: Sequence[Arm], results: Sequence[Sequence[BlockResult]]) -> list[Measured]:
    """By arm what came by block."""
    return [
        Measured(
            arm.name,
            tuple(result for block in results for result in block if result.arm == arm.name),
        )
        for arm in arms
    ]


def summarise(
    experiment: Experiment,
    found: Sequence[Measured],
    started: Mapping[str, tuple[tuple[str, ...], ...]],
) -> Summary:
    """The figures of all arms, which have done the same blocks.

    Args:
        started: by arm the commands that were started.
    """
    blocks = len(found[0].blocks)
    draws = stats.draw(blocks, experiment.resamples, experiment.seed)
    reports, figures = [], []
    tiers = _tiers(found)
    for arm, each in zip(experiment.arms, found, strict=True):
        latencies = [_latency(name, each, draws) for name in LATENCIES]
        rates = _rates(each, experiment.slo, draws)
        figures.append([*chain.from_iterable(of for _, of in latencies), *rates])
        reports.append(
            _arm(
                arm,
                each,
                started.get(arm.name, ()),
                tuple(latency for latency, _ in latencies),
                tuple(Rate(rate.metric, rate.estimate) for rate in rates),
                tuple(_hits(tier, each, draws) for tier in tiers),
            )
        )
    ratios = [
        _ratio(arm.name, figure, base, blocks)
        for arm, own in zip(experiment.arms[1:], figures[1:], strict=True)
        for figure, base in zip(own, figures[0], strict=True)
    ]
    return Summary(tuple(reports), tuple(ratios))


def _arm(
    arm: Arm,
    found: Measured,
    commands: tuple[tuple[str, ...], ...],
    latencies: tuple[Latency, ...],
    rates: tuple[Rate, ...],
    hits: tuple[Hits, ...],
) -> ArmReport:
    records = found.records
    answers = [record.answer for record in records if record.answer is not None]
    prompts = [answer.prompt_tokens for answer in answers]
    return ArmReport(
        name=arm.name,
        url=arm.url,
        commands=commands,
        requests=len(records),
        answered=len(answers),
        failures=_failures(records),
        prompt_tokens=None if None in prompts else sum(tokens or 0 for tokens in prompts),
        output_tokens=sum(answer.output_tokens for answer in answers),
        counted_by_chunks=sum(answer.counted is Counted.CHUNKS for answer in answers),
        seconds=sum(found.seconds),
        latencies=latencies,
        rates=rates,
        hits=hits,
    )


def _failures(records: Sequence[Record]) -> tuple[Failures, ...]:
    kinds: dict[str, list[str]] = {}
    for record in records:
        if record.failed is not None:
            kinds.setdefault(record.failed.kind.value, []).append(record.failed.reason)
    return tuple(Failures(kind, len(reasons), reasons[0]) for kind, reasons in kinds.items())


def _latency(name: str, found: Measured, draws: stats.Draws) -> tuple[Latency, tuple[_Figure, ...]]:
    sample = found.sample(LATENCIES[name])
    values = stats.quantiles(sample, SHARES)
    resampled = stats.resampled_quantiles(sample, SHARES, draws) * MS
    figures = []
    for column, (share, value) in enumerate(zip(SHARES, values, strict=True)):
        own = resampled[:, column]
        estimate = stats.estimate(None if value is None else value * MS, own, draws.shape[1])
        figures.append(_Figure(name, share, estimate, own))
    percentiles = tuple(
        Percentile(share, figure.estimate, stats.few(len(sample), share))
        for share, figure in zip(SHARES, figures, strict=True)
    )
    return Latency(name, len(sample), percentiles), tuple(figures)


def _rates(found: Measured, slo: Slo, draws: stats.Draws) -> list[_Figure]:
    requests = [float(len(block.records)) for block in found.blocks]
    answered = found.sums(lambda record: float(record.answer is not None))
    outputs = found.sums(lambda record: record.answer.output_tokens if record.answer else 0)
    rates = [("requests/s", answered, found.seconds), ("output tokens/s", outputs, found.seconds)]
    if slo != Slo():
        met = found.sums(lambda record: float(good(record, slo)))
        rates += [("goodput, requests/s", met, found.seconds), ("SLO met, share", met, requests)]
    return [
        _Figure(
            name,
            None,
            stats.estimate(
                stats.ratio(amounts, bases),
                resampled := stats.resampled_ratio(amounts, bases, draws),
                draws.shape[1],
            ),
            resampled,
        )
        for name, amounts, bases in rates
    ]


def _tiers(found: Sequence[Measured]) -> list[str]:
    """What any arm reports; of splits by source and tier what is used, and not the device's."""
    used: dict[str, float] = {}
    for block in chain.from_iterable(each.blocks for each in found):
        for tier, tokens in (block.counted or {}).items():
            used[tier] = used.get(tier, 0.0) + tokens
    places = {source.tier: place for place, source in enumerate(SOURCES)}

    def place(tier: str) -> tuple[int, str]:
        return places[tier.partition(": ")[0]], tier

    shown = (
        tier
        for tier, tokens in used.items()
        if tier not in (PROMPT_TOKENS, f"{BY_SOURCE}: device")
        and (tokens or ": " not in tier or tier == OUR_FIRST)
    )
    always = {"device", "connector"}
    return [*sorted({*shown, *always}, key=place), BY_ANSWERS]


def _hits(tier: str, found: Measured, draws: stats.Draws) -> Hits:
    by_answers = tier == BY_ANSWERS
    tokens = [
        _cached(block) if by_answers else (block.counted or {}).get(tier) for block in found.blocks
    ]
    known = [amount for amount in tokens if amount is not None]
    if len(known) < len(tokens):
        return Hits(tier, None, stats.Estimate(None))
    bases = [_asked(block) if by_answers else _prompt_tokens(block) for block in found.blocks]
    return Hits(
        tier,
        sum(known),
        stats.estimate(
            stats.ratio(known, bases),
            stats.resampled_ratio(known, bases, draws),
            draws.shape[1],
        ),
    )


def _cached(block: BlockResult) -> float | None:
    """By the answers; None where one of them does not say."""
    cached = [record.answer.cached_tokens for record in block.records if record.answer is not None]
    return None if None in cached else float(sum(tokens or 0 for tokens in cached))


def _asked(block: BlockResult) -> float:
    """Prompt tokens by the answers."""
    answers = (record.answer for record in block.records)
    return float(sum(answer.prompt_tokens or 0 for answer in answers if answer is not None))


def _prompt_tokens(block: BlockResult) -> float:
    """By the server's metrics, or else by its answers."""
    counted = (block.counted or {}).get(PROMPT_TOKENS)
    return counted if counted is not None else _asked(block)


def _ratio(arm: str, figure: _Figure, base: _Figure, blocks: int) -> Ratio:
    value, against = figure.estimate.value, base.estimate.value
    quotient = value / against if value is not None and against else None
    resampled = stats.divide(figure.resampled, base.resampled)
    return Ratio(arm, figure.metric, figure.share, stats.estimate(quotient, resampled, blocks))
