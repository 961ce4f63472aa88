# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv plan``: when fetching KV beats computing it, and how large tiers should be."""

from __future__ import annotations

import os
import re
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from vllm_tiered_kv.cli import options as o
from vllm_tiered_kv.cli.interrupt import ended_as_interrupted
from vllm_tiered_kv.cli.output import print_json
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.replay import BLOCK_TOKENS
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.gpus import Gpu, Precision, find_gpu
from vllm_tiered_kv.sizing.parameters import Parameters
from vllm_tiered_kv.sizing.plan_report import Load, PlanQuestion, PlanReport, plan_report
from vllm_tiered_kv.sizing.timing import Link, Work
from vllm_tiered_kv.sizing.units import (
    parse_named,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_size,
    parse_tokens,
)
from vllm_tiered_kv.sizing.work import attention_pairs

DEFAULT_GPU = "h100"

LATENCY = 2e-3
"""Seconds: about two steps of an engine that decodes a small model, by which a load is later."""

DEFAULT_RATES = {"cpu": 50e9, "disk": 5e9}
"""A PCIe 5 x16 link one way, and a few NVMe drives: to be replaced by what is measured."""

_NEXT_NAME = re.compile(r",(?=[^,]*=)")
_MEASURE, _TRACE = "Measuring this machine", "Replaying a trace"


def plan(
    model: o.ModelName = None,
    layers: o.Layers = None,
    kv_heads: o.KvHeads = None,
    head_dim: o.HeadDim = None,
    heads: o.Heads = None,
    latent_dim: o.LatentDim = None,
    rope_dim: o.RopeDim = None,
    window: o.SlidingWindow = None,
    window_pattern: o.WindowPattern = None,
    params: o.Params = None,
    active_params: o.ActiveParams = None,
    weights: o.WeightsSize = None,
    kv_dtype: o.KvDtype = None,
    state_dtype: o.StateDtype = None,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Lengths of prompts: 32K,128K.", show_default="4K to 1M"),
    ] = None,
    tp: Annotated[
        list[int] | None,
        typer.Option(help="GPUs that share the model; may be repeated.", show_default="1"),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU by name.", show_default=DEFAULT_GPU)
    ] = None,
    peak_flops: Annotated[
        str | None, typer.Option(help="Operations a second of one GPU: 1979T.", show_default=False)
    ] = None,
    memory: o.Memory = None,
    utilisation: o.Utilisation = 0.92,
    precision: Annotated[Precision, typer.Option(help="In which it computes.")] = Precision.FP8,
    fraction: Annotated[
        float, typer.Option(help="Of the peak that a prefill reaches.", min=0.001, max=1.0)
    ] = 0.4,
    attention: Annotated[
        bool, typer.Option("--attention", help="Count the operations of attention itself, too.")
    ] = False,
    speed: Annotated[
        list[str] | None,
        typer.Option(
            help="A tier's way to all GPUs together, NAME=RATE[,LATENCY]: cpu=50GB/s,2ms.",
            show_default="cpu=50GB/s, disk=5GB/s",
        ),
    ] = None,
    hit_window: Annotated[
        str | None, typer.Option(help="Keep what was used in this time: 1h.", show_default=False)
    ] = None,
    request_rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second, for --hit-window.", min=1e-6, max=1e6, show_default=False
        ),
    ] = None,
    new_tokens: Annotated[
        str | None,
        typer.Option(
            help="Tokens that a request adds to what is stored.",
            show_default="the mean of the lengths",
        ),
    ] = None,
    measure_tiers: Annotated[
        bool,
        typer.Option("--measure", help="Measure memory and disk first.", rich_help_panel=_MEASURE),
    ] = False,
    folder: Annotated[
        Path,
        typer.Option(help="On the disk to measure.", rich_help_panel=_MEASURE),
    ] = Path(),
    measure_bytes: Annotated[
        str, typer.Option(help="Written and read at most.", rich_help_panel=_MEASURE)
    ] = "512MiB",
    measure_seconds: Annotated[
        float, typer.Option(help="For each of three runs.", rich_help_panel=_MEASURE, min=0.1)
    ] = 10.0,
    measure_threads: Annotated[
        int, typer.Option(help="That move at once.", rich_help_panel=_MEASURE, min=1, max=16)
    ] = 4,
    trace: Annotated[
        Path | None,
        typer.Option(help="JSON lines of requests (.gz, .xz).", rich_help_panel=_TRACE),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="A tier's bytes, NAME=SIZE.",
            show_default="cpu=256GiB, disk=4TiB",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    policy: Annotated[
        list[Eviction] | None,
        typer.Option(help="May be repeated.", show_default="all", rich_help_panel=_TRACE),
    ] = None,
    store_after: Annotated[
        int,
        typer.Option(
            help="Write to disk what is seen so often.", rich_help_panel=_TRACE, min=1, max=15
        ),
    ] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw hit rate by capacity: a .png file.", rich_help_panel=_TRACE),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(help="Of the trace.", rich_help_panel=_TRACE, min=1, max=100_000_000)
    ] = 1_000_000,
    block_tokens: Annotated[
        int,
        typer.Option(
            help="That one of its hash_ids stands for.",
            rich_help_panel=_TRACE,
            min=1,
            max=1 << 20,
        ),
    ] = BLOCK_TOKENS,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Replays at a time.", show_default="processors", rich_help_panel=_TRACE, min=1
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """When fetching KV beats computing it again, and how large tiers should be."""
    if plot is not None:
        _check_plot(plot, trace)
    flags = o.Flags(
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        heads=heads,
        latent_dim=latent_dim,
        rope_dim=rope_dim,
        window=window,
        window_pattern=window_pattern,
        params=params,
        active_params=active_params,
        weights=weights,
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
    )
    found = o.describe(model, flags)
    parameters = _need_parameters(found.parameters)
    lengths = o.contexts_of(context)
    given = _links(speed)
    measured = None
    if measure_tiers:
        from vllm_tiered_kv.sizing.measure import Bounds, measure

        bounds = Bounds(parse_size(measure_bytes), measure_seconds, measure_threads)
        with ended_as_interrupted():
            measured = measure(folder, bounds)
        given = {**_measured_links(measured.copy.rate, measured.disk_read.rate), **given}
    links = given or {name: Link(name, rate, LATENCY, "assumed") for name, rate in _assumed()}
    question = PlanQuestion(
        lengths=lengths,
        tps=tuple(dict.fromkeys(tp or [1])),
        gpu=_gpu(gpu, peak_flops, memory),
        precision=precision,
        fraction=fraction,
        links=tuple(links.values()),
        work=Work(parameters.active, attention_pairs(found.model) if attention else ()),
        utilisation=utilisation,
        load=_load(hit_window, request_rate, new_tokens, lengths, trace),
    )
    if any(not 1 <= each <= 1024 for each in question.tps):
        raise SizingError("--tp: from 1 to 1024 GPUs")
    report = plan_report(found.name, found.model, question, parameters, found.weights)
    report = msgspec.structs.replace(report, measured=measured)
    if trace is not None:
        from vllm_tiered_kv.cli.plan_trace import TraceOptions, with_trace

        wanted = TraceOptions(
            path=trace,
            limit=max_requests,
            capacities=capacity,
            policies=tuple(dict.fromkeys(policy or Eviction)),
            store_after=store_after,
            hit_window=parse_seconds(hit_window) if hit_window is not None else None,
            jobs=jobs or len(os.sched_getaffinity(0)),
            block_tokens=block_tokens,
        )
        report = with_trace(report, found.model, question, links, wanted)
    if plot is not None and report.trace is not None:
        from vllm_tiered_kv.cli.plot import draw_curve

        draw_curve(report.trace.curve, report.trace.facts.endless_hit_rate, plot)
    _show(report, as_json=as_json)


def _show(report: PlanReport, *, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    from vllm_tiered_kv.cli.plan_tables import print_plan

    print_plan(report)


def _check_plot(plot: Path, trace: Path | None) -> None:
    from vllm_tiered_kv.cli.plot import check_plot

    if trace is None:
        raise SizingError("--plot draws what a trace's replay says: give --trace")
    check_plot(plot)


def _need_parameters(parameters: Parameters | None) -> Parameters:
    if parameters is None:
        raise SizingError("how long computing takes follows from the parameters: give --params")
    return parameters


def _gpu(name: str | None, peak_flops: str | None, memory: str | None) -> Gpu:
    """Of a GPU that is described by its peak, nothing else is known but what is given."""
    if peak_flops is None:
        found = find_gpu(name or DEFAULT_GPU)
    else:
        peak = parse_number(peak_flops)
        known = find_gpu(name).memory if name is not None else 0
        found = Gpu(f"{peak / 1e12:g} TFLOP/s", known, peak, peak, "--peak-flops")
    if memory is not None:
        found = msgspec.structs.replace(found, memory=parse_size(memory))
    return found


def _assumed() -> list[tuple[str, float]]:
    return list(DEFAULT_RATES.items())


def _links(given: list[str] | None) -> dict[str, Link]:
    """Raises: SizingError: one is not ``NAME=RATE[,LATENCY]``."""
    links = {}
    for text in chain.from_iterable(map(_NEXT_NAME.split, given or ())):
        name, value = parse_named(text)
        rate, _, latency = value.partition(",")
        seconds = parse_seconds(latency) if latency else LATENCY
        links[name] = Link(name, parse_rate(rate), seconds, "--speed")
    return links


def _measured_links(copy: float, read: float) -> dict[str, Link]:
    return {
        "cpu": Link("cpu", copy, LATENCY, "measured: copies in memory, not a GPU's link"),
        "disk": Link("disk", read, LATENCY, "measured: reads with checksums"),
    }


def _load(
    hit_window: str | None,
    request_rate: float | None,
    new_tokens: str | None,
    lengths: tuple[int, ...],
    trace: Path | None,
) -> Load | None:
    if hit_window is None:
        return None
    if request_rate is None:
        if trace is None:
            raise SizingError("--hit-window needs --request-rate, or a --trace to take it from")
        return None
    tokens = parse_tokens(new_tokens) if new_tokens is not None else sum(lengths) // len(lengths)
    return Load(parse_seconds(hit_window), request_rate, tokens)
