# SPDX-License-Identifier: Apache-2.0
"""A report as tables and sentences, for a terminal, Markdown and HTML alike."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vllm_tiered_kv.bench.agreement import Agreement, Difference
from vllm_tiered_kv.bench.config import Mode, Placement
from vllm_tiered_kv.bench.report import SHARES, ArmReport, Hits, Percentile, Ratio, Report
from vllm_tiered_kv.bench.stats import FEW_BEYOND, Estimate
from vllm_tiered_kv.config import format_size

FEW = "*"
NOT_REPORTED = "not reported"
NOTHING = "-"
_IN_BRACKETS = (
    "In brackets the interval that holds the true figure 95 times in 100, by a bootstrap over "
    "blocks."
)
NAMES = {
    "ttft": "Time to first token, ms",
    "tpot": "Time per output token after the first, ms",
    "itl": "Time between parts of the stream, ms",
    "e2e": "Time to the last token, ms",
}


class Table(msgspec.Struct, frozen=True):
    """The first column is of words, the others of figures."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(report: Report) -> list[Table]:
    """All of them; without those that would be empty."""
    found = [_latency(report, metric) for metric in NAMES]
    found += [_ratios(report), _rates(report), _hits(report), _outputs(report), _requests(report)]
    found.append(_differences(report))
    return [table for table in found if table.rows]


def conditions(report: Report) -> str:
    """In a sentence or two what was measured on what."""
    experiment, machine = report.experiment, report.machine
    load = experiment.load
    if load.mode is Mode.CLOSED:
        coming = f"{load.concurrency} sessions at once"
    else:
        coming = (
            f"sessions that begin by the clock, {load.rate:g} a second unless a trace has times"
        )
    kind = experiment.workload.__struct_config__.tag
    turns = "all servers up, requests to one at a time, block by block in changing order"
    if experiment.placement is Placement.ONE_AT_A_TIME:
        turns = f"servers up one at a time, each {experiment.rounds} times"
    return (
        f"Workload {kind}: {experiment.sessions} sessions in {report.blocks} blocks after "
        f"{experiment.warmup} for warm-up, {coming}, seed {experiment.seed}; {turns}. Client: "
        f"{machine.processor}, {machine.cores} cores, {format_size(machine.memory_bytes)}, Python "
        f"{machine.python}, vllm-tiered-kv {report.tool}; load average before the start "
        f"{machine.load_average:.1f}. Model: {experiment.model or 'as served'}."
    )


def remarks(report: Report) -> list[str]:
    """How to read the figures, and what is wrong with them."""
    found = [_IN_BRACKETS]
    latencies = (latency for arm in report.arms for latency in arm.latencies)
    if any(percentile.few for latency in latencies for percentile in latency.percentiles):
        found.append(
            f"{FEW} Too few values: fewer than {FEW_BEYOND} are expected to lie beyond this "
            "percentile, so that it is hardly known."
        )
    return [*found, *report.notes]


def figure(value: float | None) -> str:
    """Three digits or more: 0.0123, 1.23, 123, 12,345."""
    if value is None:
        return NOTHING
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _with_interval(estimate: Estimate, factor: float = 1.0) -> str:
    if estimate.value is None:
        return NOTHING
    text = figure(estimate.value * factor)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({figure(estimate.low * factor)} to {figure(estimate.high * factor)})"


def _latency(report: Report, metric: str) -> Table:
    rows = []
    for arm in report.arms:
        latency = next(each for each in arm.latencies if each.metric == metric)
        cells = [_percentile(percentile) for percentile in latency.percentiles]
        rows.append((arm.name, *cells, f"{latency.values:,}"))
    return Table(NAMES[metric], ("arm", *map(_share, SHARES), "values"), tuple(rows))


def _percentile(percentile: Percentile) -> str:
    text = _with_interval(percentile.estimate)
    return f"{text} {FEW}" if percentile.few and text != NOTHING else text


def _share(share: float | None) -> str:
    return f"p{100 * share:g}" if share is not None else ""


def _ratios(report: Report) -> Table:
    arms = [arm.name for arm in report.arms[1:]]
    known: dict[tuple[str, float | None], dict[str, Ratio]] = {}
    for ratio in report.ratios:
        known.setdefault((ratio.metric, ratio.share), {})[ratio.arm] = ratio
    rows = [
        (
            f"{metric.upper() if metric in NAMES else metric} {_share(share)}".strip(),
            *(_with_interval(by_arm[arm].estimate) for arm in arms),
        )
        for (metric, share), by_arm in known.items()
    ]
    return Table(f"Each figure over that of {report.arms[0].name}", ("figure", *arms), tuple(rows))


def _rates(report: Report) -> Table:
    names = [rate.metric for rate in report.arms[0].rates]
    rows = [
        (arm.name, *(_with_interval(rate.estimate) for rate in arm.rates)) for arm in report.arms
    ]
    slo = report.experiment.slo
    bounds = (("TTFT", slo.ttft_ms), ("TPOT", slo.tpot_ms), ("end to end", slo.e2e_ms))
    asked = [f"{name} at most {bound:g} ms" for name, bound in bounds if bound is not None]
    title = f"Throughput, and goodput with {', '.join(asked)}" if asked else "Throughput"
    return Table(title, ("arm", *names), tuple(rows))


def _hits(report: Report) -> Table:
    by_arm = [arm.hits for arm in report.arms]
    rows = [(tier[0].tier, *map(_hit, tier)) for tier in zip(*by_arm, strict=True)]
    title = "Prompt tokens that were not computed, %, by who served them"
    return Table(title, ("tier", *(arm.name for arm in report.arms)), tuple(rows))


def _hit(hit: Hits) -> str:
    return NOT_REPORTED if hit.tokens is None else _with_interval(hit.share, 100.0)


def _outputs(report: Report) -> Table:
    header = ("arm", "compared", "same", "share", "compared by", "logprobs apart by")
    rows = tuple(map(_agreement, report.agreements))
    return Table(f"Outputs against those of {report.arms[0].name}", (*header, "not compared"), rows)


def _agreement(found: Agreement) -> tuple[str, ...]:
    by_text = found.compared - found.by_tokens
    ways = [f"token ids: {found.by_tokens}"] if found.by_tokens else []
    ways += [f"text: {by_text}"] if by_text else []
    not_compared = str(found.not_compared)
    if found.other_prompts:
        not_compared += f", and {found.other_prompts} of other prompts"
    return (
        found.arm,
        str(found.compared),
        str(found.same),
        f"{found.same / found.compared:.1%}" if found.compared else "none compared",
        ", ".join(ways) or NOTHING,
        f"{found.worst_logprob:.2g}" if found.worst_logprob is not None else NOT_REPORTED,
        not_compared,
    )


def _requests(report: Report) -> Table:
    header = ("arm", "requests", "answered", "failed", "prompt tokens", "output tokens", "seconds")
    return Table("Requests", header, tuple(map(_request_row, report.arms)))


def _request_row(arm: ArmReport) -> tuple[str, ...]:
    failed = str(arm.requests - arm.answered)
    if arm.failures:
        failed += f" ({', '.join(f'{each.kind}: {each.count}' for each in arm.failures)})"
    outputs = f"{arm.output_tokens:,}"
    if arm.counted_by_chunks:
        outputs += f" ({arm.counted_by_chunks} answers counted by parts of the stream)"
    return (
        arm.name,
        f"{arm.requests:,}",
        f"{arm.answered:,}",
        failed,
        f"{arm.prompt_tokens:,}" if arm.prompt_tokens is not None else NOT_REPORTED,
        outputs,
        f"{arm.seconds:,.1f}",
    )


def _differences(report: Report) -> Table:
    rows = tuple(
        _difference(each.arm, found) for each in report.agreements for found in each.differences
    )
    header = ("arm", "session", "request", "at", "expected", "found", "logprobs")
    return Table("The first outputs that differ", header, rows)


def _difference(arm: str, found: Difference) -> tuple[str, ...]:
    logprobs = NOT_REPORTED
    if found.logprobs is not None:
        logprobs = f"{found.logprobs[0]:.3f}, {found.logprobs[1]:.3f}"
    places: Iterable[int] = (found.session, found.step + 1, found.place)
    return (arm, *map(str, places), found.expected or "(end)", found.actual or "(end)", logprobs)
