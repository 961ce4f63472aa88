# SPDX-License-Identifier: Apache-2.0
"""The part of ``plan`` that replays a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from vllm_tiered_kv.cli.interrupt import ended_as_interrupted
from vllm_tiered_kv.cli.size import capacities_of
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.hit_window import working_set
from vllm_tiered_kv.sizing.plan_report import PlanQuestion, PlanReport, TraceWindowRow
from vllm_tiered_kv.sizing.read import Model
from vllm_tiered_kv.sizing.timing import Compute, Link
from vllm_tiered_kv.sizing.trace_report import replay_trace
from vllm_tiered_kv.sizing.traces import Tiers, Times, load_trace


class TraceOptions(msgspec.Struct, frozen=True):
    """How a trace is replayed."""

    path: Path
    limit: int
    capacities: list[str] | None
    policies: tuple[Eviction, ...]
    store_after: int
    hit_window: float | None
    jobs: int
    block_tokens: int


def with_trace(
    report: PlanReport,
    model: Model,
    question: PlanQuestion,
    links: Mapping[str, Link],
    wanted: TraceOptions,
) -> PlanReport:
    """``report`` with what the trace says; times are of the first number of GPUs.

    Raises:
        SizingError: the trace cannot be replayed, or tiers and speeds do not fit each other.
    """
    capacities = capacities_of(wanted.capacities)
    unknown = sorted(capacities.keys() - {"cpu", "disk"})
    if unknown or "cpu" not in capacities:
        raise SizingError(f"a trace is replayed in cpu and disk, not in {', '.join(capacities)}")
    missing = sorted(capacities.keys() - links.keys())
    if missing:
        raise SizingError(f"a trace is replayed in {missing[0]}: give --speed {missing[0]}=RATE")
    tp = question.tps[0]
    peak, _ = question.gpu.peak(question.precision)
    times = Times(
        footprint=model.shape.on_all_ranks(tp),
        cpu=links["cpu"],
        disk=links["disk"] if "disk" in capacities else None,
        work=question.work,
        compute=Compute(peak, question.fraction, tp),
        block_tokens=wanted.block_tokens,
    )
    tiers = [
        Tiers(capacities["cpu"], capacities.get("disk", 0), policy, wanted.store_after)
        for policy in wanted.policies
    ]
    with ended_as_interrupted(), _progress() as advance:
        replayed = replay_trace(
            wanted.path, wanted.limit, tiers, times, jobs=wanted.jobs, advance=advance
        )
    window = None
    if wanted.hit_window is not None:
        requests = load_trace(wanted.path, wanted.limit, wanted.block_tokens)
        found = working_set(requests, wanted.hit_window)
        window = TraceWindowRow(
            wanted.hit_window,
            found.largest * times.block_bytes,
            found.hits / found.blocks,
        )
    return msgspec.structs.replace(report, trace=replayed, trace_window=window)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("replaying", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
