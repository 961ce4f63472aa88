# SPDX-License-Identifier: Apache-2.0
"""What ``plan`` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tiered_kv.cli.output import console, print_notes, print_table
from vllm_tiered_kv.sizing.plan_report import PlanReport, TraceWindowRow
from vllm_tiered_kv.sizing.timing import Choice
from vllm_tiered_kv.sizing.trace_report import TraceReport
from vllm_tiered_kv.sizing.units import show_bytes, show_rate, show_seconds, show_tokens

if TYPE_CHECKING:
    from rich.console import Console


def print_plan(report: PlanReport) -> None:
    to = console()
    _print_lengths(to, report)
    _print_break_even(to, report)
    _print_window(to, report)
    if report.trace is not None:
        _print_trace(to, report.trace, report.trace_window)
    notes = list(report.notes)
    assumed = [link.name for link in report.links if link.source == "assumed"]
    if assumed:
        notes.append(f"speeds of {' and '.join(assumed)} are assumed: --measure or --speed")
    print_notes(to, notes)


def _print_lengths(to: Console, report: PlanReport) -> None:
    parameters = report.parameters
    to.print(
        f"{report.model}: {report.bytes_per_token:,} bytes a token in {report.kv_dtype}; "
        f"{parameters.active / 1e9:.4g}e9 parameters a token ({parameters.source})",
        markup=False,
    )
    for row in report.compute:
        to.print(
            f"{row.gpus} x {row.gpu}: {row.peak_flops / 1e12:,.4g} TFLOP/s in {row.precision} "
            f"x {row.fraction:g} = {row.flops / 1e12:,.4g} TFLOP/s",
            markup=False,
        )
    if report.measured is not None:
        found = report.measured
        to.print(
            f"measured with {found.threads} threads: memory {show_rate(found.copy.rate)}; disk "
            f"writes {show_rate(found.disk_write.rate)}, reads {show_rate(found.disk_read.rate)} "
            f"({found.disk_mode.value})",
            markup=False,
        )
    header = ["prompt", "GPUs", "bytes", "compute"]
    header += [f"{link.name}, {show_rate(link.bandwidth)}" for link in report.links]
    resident = any(row.resident is not None for row in report.lengths)
    if resident:
        header.append("fit the GPUs")
    rows = []
    for length in report.lengths:
        cells = [
            show_tokens(length.tokens),
            str(length.gpus),
            show_bytes(length.bytes),
            show_seconds(length.compute_seconds),
        ]
        for fetch in length.fetch:
            style = "bold" if fetch.choice is Choice.FETCH else "dim"
            text = f"{show_seconds(fetch.seconds)} ({fetch.speedup:.3g}x)"
            cells.append(f"[{style}]{text}[/{style}]")
        if resident:
            cells.append(f"{length.resident:,}" if length.resident is not None else "")
        rows.append(cells)
    print_table(to, "Computing a prompt again, and fetching its KV", header, rows)


def _print_break_even(to: Console, report: PlanReport) -> None:
    rows = [
        (row.tier, str(row.gpus), f"{row.tokens:,}" if row.tokens is not None else "never")
        for row in report.break_even
    ]
    print_table(to, "Fetching pays from this many tokens on", ("tier", "GPUs", "tokens"), rows)


def _print_window(to: Console, report: PlanReport) -> None:
    if report.hit_window is not None:
        window = report.hit_window
        to.print(
            f"To keep {show_seconds(window.hit_window)} of {window.requests_per_second:g} requests "
            f"a second with {window.new_tokens:,} new tokens: {show_bytes(window.capacity)}",
            markup=False,
        )


def _print_trace(to: Console, trace: TraceReport, window: TraceWindowRow | None) -> None:
    facts = trace.facts
    to.print(
        f"\nThe trace: {facts.requests:,} requests in {show_seconds(facts.seconds)}, "
        f"{facts.blocks:,} blocks, {facts.distinct_blocks:,} distinct "
        f"({show_bytes(facts.distinct_bytes)}); an endless tier serves "
        f"{facts.endless_hit_rate:.1%}",
        markup=False,
    )
    if window is not None:
        to.print(
            f"It uses at most {show_bytes(window.capacity)} within "
            f"{show_seconds(window.hit_window)}; kept, they serve {window.hit_rate:.1%}",
            markup=False,
        )
    rows = []
    for outcome in trace.outcomes:
        saved = outcome.ttft_saved_where_it_pays
        rows.append(
            (
                outcome.policy.value,
                f"{outcome.cpu_hit_rate:.1%}",
                f"{outcome.disk_hit_rate:.1%}",
                show_bytes(outcome.bytes_written),
                show_bytes(outcome.bytes_written_per_day),
                f"{show_seconds(saved / facts.requests)} ({saved / outcome.ttft:.1%})",
                show_seconds(outcome.ttft_saved / facts.requests),
            )
        )
    header = (
        *("policy", "from cpu", "from disk", "written", "a day"),
        *("TTFT saved a request", "if always loaded"),
    )
    print_table(to, "Served by the tiers", header, rows)
    capacities = sorted({point.capacity for point in trace.curve})
    rates = {(point.policy, point.capacity): point.hit_rate for point in trace.curve}
    shares = {point.capacity: point.share for point in trace.curve}
    policies = dict.fromkeys(point.policy for point in trace.curve)
    print_table(
        to,
        "Blocks served by a CPU tier alone, by capacity",
        ("policy", *(f"{show_bytes(c)} ({shares[c]:.0%})" for c in capacities)),
        [(policy, *(f"{rates[policy, c]:.1%}" for c in capacities)) for policy in policies],
    )
