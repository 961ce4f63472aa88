# SPDX-License-Identifier: Apache-2.0
"""All that ``plan`` says of fetching and computing, as ``--json`` prints it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.sizing.capacity import Device, note_of_weights, requests_that_fit
from vllm_tiered_kv.sizing.gpus import Gpu, Precision
from vllm_tiered_kv.sizing.hit_window import capacity_for
from vllm_tiered_kv.sizing.measure import Measured
from vllm_tiered_kv.sizing.parameters import Parameters
from vllm_tiered_kv.sizing.read import Model
from vllm_tiered_kv.sizing.timing import (
    Choice,
    Compute,
    Link,
    Work,
    break_even,
    fetch_seconds,
)
from vllm_tiered_kv.sizing.trace_report import TraceReport
from vllm_tiered_kv.sizing.weights import Weights


class Load(msgspec.Struct, frozen=True):
    """What comes in, for the capacity of a hit window."""

    hit_window: float
    """Seconds for which what was used is to be kept."""
    requests_per_second: float
    new_tokens: int
    """That a request adds to what is stored already."""


class PlanQuestion(msgspec.Struct, frozen=True):
    """What is asked about a model."""

    lengths: Sequence[int]
    """Of prompts, in tokens."""
    tps: Sequence[int]
    """Numbers of GPUs that share the model."""
    gpu: Gpu
    precision: Precision
    fraction: float
    """Of the peak that a prefill reaches."""
    links: Sequence[Link]
    work: Work
    utilisation: float = 0.92
    load: Load | None = None


class ComputeRow(msgspec.Struct, frozen=True):
    """The GPUs that compute."""

    gpus: int
    gpu: str
    precision: str
    peak_flops: float
    fraction: float
    flops: float
    """Operations a second of all of them."""


class FetchRow(msgspec.Struct, frozen=True):
    """One tier's way."""

    tier: str
    seconds: float
    speedup: float
    """Time to compute over time to fetch."""
    choice: Choice


class LengthRow(msgspec.Struct, frozen=True):
    """One length of prompt on some GPUs."""

    tokens: int
    gpus: int
    bytes: int
    compute_seconds: float
    fetch: tuple[FetchRow, ...]
    resident: int | None
    """Such prompts whose KV fits the GPUs; None where weights or memory are not known."""


class BreakEvenRow(msgspec.Struct, frozen=True):
    """From which length on fetching pays."""

    tier: str
    gpus: int
    tokens: int | None
    """None: it never does."""


class WindowRow(msgspec.Struct, frozen=True):
    """The capacity of a hit window."""

    hit_window: float
    requests_per_second: float
    new_tokens: int
    capacity: int


class TraceWindowRow(msgspec.Struct, frozen=True):
    """The same, from a trace: the most that it uses within the window."""

    hit_window: float
    capacity: int
    hit_rate: float
    """What is served if exactly that is kept, 0 to 1."""


class PlanReport(msgspec.Struct, frozen=True):
    """The answer."""

    model: str
    kv_dtype: str
    bytes_per_token: int
    fixed_bytes: int
    parameters: Parameters
    attention_counted: bool
    compute: tuple[ComputeRow, ...]
    links: tuple[Link, ...]
    measured: Measured | None
    lengths: tuple[LengthRow, ...]
    break_even: tuple[BreakEvenRow, ...]
    hit_window: WindowRow | None
    trace_window: TraceWindowRow | None
    trace: TraceReport | None
    notes: tuple[str, ...]


def plan_report(
    name: str,
    model: Model,
    question: PlanQuestion,
    parameters: Parameters,
    weights: Weights | None,
) -> PlanReport:
    """Answer a question; what was measured and replayed is filled in by who did it.

    Raises:
        SizingError: the layers cannot be divided over the GPUs.
    """
    one = model.shape.one_copy()
    peak, precision = question.gpu.peak(question.precision)
    computes = {tp: Compute(peak, question.fraction, tp) for tp in question.tps}
    window = None
    if question.load is not None:
        load = question.load
        stored = model.shape.on_all_ranks(question.tps[0])
        needed = capacity_for(stored, load.hit_window, load.requests_per_second, load.new_tokens)
        window = WindowRow(load.hit_window, load.requests_per_second, load.new_tokens, needed)
    return PlanReport(
        model=name,
        kv_dtype=model.kv_dtype.value,
        bytes_per_token=one.bytes_per_token,
        fixed_bytes=one.fixed_bytes,
        parameters=parameters,
        attention_counted=bool(question.work.pairs),
        compute=tuple(
            ComputeRow(tp, question.gpu.name, precision.value, peak, each.fraction, each.flops)
            for tp, each in computes.items()
        ),
        links=tuple(question.links),
        measured=None,
        lengths=tuple(
            _length_row(model, question, compute, tokens, weights)
            for tokens in question.lengths
            for compute in computes.values()
        ),
        break_even=tuple(
            BreakEvenRow(
                link.name,
                tp,
                break_even(model.shape.on_all_ranks(tp), link, question.work, compute),
            )
            for link in question.links
            for tp, compute in computes.items()
        ),
        hit_window=window,
        trace_window=None,
        trace=None,
        notes=tuple(_notes(question, precision, weights)),
    )


def _length_row(
    model: Model, question: PlanQuestion, compute: Compute, tokens: int, weights: Weights | None
) -> LengthRow:
    footprint = model.shape.on_all_ranks(compute.gpus)
    seconds = question.work.seconds(tokens, compute)
    fetch = []
    for link in question.links:
        taken = fetch_seconds(footprint, link, tokens)
        choice = Choice.FETCH if taken <= seconds else Choice.COMPUTE
        fetch.append(FetchRow(link.name, taken, seconds / taken, choice))
    device = _device(question, weights, compute.gpus)
    resident = requests_that_fit(model.shape, device, tokens) if device is not None else None
    nbytes = footprint.request_bytes(tokens)
    return LengthRow(tokens, compute.gpus, nbytes, seconds, tuple(fetch), resident)


def _device(question: PlanQuestion, weights: Weights | None, tp: int) -> Device | None:
    if weights is None or not question.gpu.memory:
        return None
    return Device(question.gpu.memory, question.utilisation, weights.nbytes, tp)


def _notes(question: PlanQuestion, precision: Precision, weights: Weights | None) -> list[str]:
    notes = []
    devices = (_device(question, weights, tp) for tp in question.tps)
    notes += [
        note_of_weights(device) for device in devices if device is not None and not device.free
    ]
    if precision is Precision.FP8 and question.gpu.fp8_flops != question.gpu.bf16_flops:
        notes.append(
            "computing in FP8, the faster way, so that fetching is not flattered; with "
            "--precision bf16 it takes twice as long on most GPUs"
        )
    if not question.work.pairs:
        notes.append(
            "the operations of attention itself are left out; --attention adds them: at long "
            "prompts they are as many again"
        )
    return notes
