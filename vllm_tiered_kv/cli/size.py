# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv size``: how many bytes a model's KV takes, and what fits where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from vllm_tiered_kv.cli import options as o
from vllm_tiered_kv.cli.output import console, print_json, print_notes, print_table
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.gpus import Gpu, find_gpu
from vllm_tiered_kv.sizing.size_report import Question, SizeReport, size_report
from vllm_tiered_kv.sizing.units import (
    parse_named,
    parse_size,
    show_bytes,
    show_capacity,
    show_tokens,
)

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_CAPACITIES = {"cpu": 256 << 30, "disk": 4 << 40}


def size(
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
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.", min=1, max=1024)] = 1,
    gpu: Annotated[str | None, typer.Option(help="A GPU, for the requests that fit: h100.")] = None,
    memory: o.Memory = None,
    utilisation: o.Utilisation = 0.92,
    context: Annotated[
        list[str] | None,
        typer.Option(help="Lengths of requests: 32K,128K.", show_default="4K to 1M"),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="A tier's bytes, NAME=SIZE.", show_default="cpu=256GiB, disk=4TiB"),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """How many bytes a model's KV takes, and what fits the GPUs and the tiers."""
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
    question = Question(
        contexts=o.contexts_of(context),
        capacities=capacities_of(capacity),
        tp=tp,
        gpu=gpu_of(gpu, memory),
        utilisation=utilisation,
    )
    report = size_report(found.name, found.model, question, found.parameters, found.weights)
    if as_json:
        print_json(report)
    else:
        _print(console(), report)


def capacities_of(given: list[str] | None) -> dict[str, int]:
    """Raises: SizingError: one is not ``NAME=SIZE``."""
    if not given:
        return dict(DEFAULT_CAPACITIES)
    named = [parse_named(part) for text in given for part in text.split(",")]
    return {name: parse_size(value) for name, value in named}


def gpu_of(name: str | None, memory: str | None) -> Gpu | None:
    """A GPU by name, by its memory, or both.

    Raises:
        SizingError: it is not known.
    """
    if name is None and memory is None:
        return None
    found = find_gpu(name) if name is not None else Gpu("a GPU", 0, 0.0, None, "options")
    if memory is not None:
        found = msgspec.structs.replace(found, memory=parse_size(memory))
    if not found.memory:
        raise SizingError("the GPU's memory is missing; give --memory")
    return found


def _print(to: Console, report: SizeReport) -> None:
    _print_tokens(to, report)
    _print_contexts(to, report)
    _print_tiers(to, report)
    print_notes(to, report.notes)


def _print_tokens(to: Console, report: SizeReport) -> None:
    rows = []
    for row in report.layers:
        dims = ""
        if row.kv_heads is not None:
            values = f" + {row.value_dim}" if row.value_dim else ""
            dims = f"{row.kv_heads} x ({row.key_dim}{values})"
        of_layers = row.state_bytes or (row.window or 0) * row.bytes_per_token
        reach = f", last {row.window:,} tokens" if row.window is not None else ""
        rows.append(
            (
                f"{row.layers} x {row.what}{reach}",
                dims,
                f"{row.bytes_per_token:,}" if row.window is None else "",
                f"{of_layers:,}" if of_layers else "",
            )
        )
    fixed = f"{report.fixed_bytes:,}" if report.fixed_bytes else ""
    rows.append(("together", "", f"{report.bytes_per_token:,}", fixed))
    if report.tensor_parallel > 1:
        for what, place in (
            (f"on each of {report.tensor_parallel} GPUs", report.per_gpu),
            ("on all of them, and in the tiers", report.all_gpus),
        ):
            extra = place.window_bytes + place.state_bytes
            rows.append((what, "", f"{place.bytes_per_token:,}", f"{extra:,}" if extra else ""))
    title = f"{report.model}: KV in {report.kv_dtype} ({report.kv_dtype_source})"
    print_table(
        to, title, ("layers", "heads x (key + value)", "bytes a token", "fixed bytes"), rows
    )
    if report.parameters is not None:
        count = report.parameters
        active = f", {count.active / 1e9:.3g}e9 a token" if count.active != count.total else ""
        to.print(f"{count.total / 1e9:.4g}e9 parameters{active} ({count.source})", markup=False)
    if report.weights is not None:
        weights = report.weights
        to.print(f"{show_bytes(weights.nbytes)} of weights: {weights.source}", markup=False)


def _print_contexts(to: Console, report: SizeReport) -> None:
    header = ["tokens", "bytes", ""]
    device = report.device
    if device is not None:
        header.append("requests that fit")
    rows = []
    for row in report.contexts:
        cells = [show_tokens(row.tokens), f"{row.bytes:,}", show_bytes(row.bytes)]
        if device is not None:
            cells.append(f"{row.requests:,}" if row.requests is not None else "")
        rows.append(cells)
    title = "A request"
    if device is not None:
        gpus = f"{report.tensor_parallel} x {device.gpu}"
        title += (
            f", and how many fit {gpus} ({show_bytes(device.memory)} x {device.utilisation:g} - "
            f"{show_bytes(device.weights_per_gpu)} of weights = "
            f"{show_bytes(device.free_per_gpu)} each)"
        )
    print_table(to, title, header, rows)


def _print_tiers(to: Console, report: SizeReport) -> None:
    if not report.tiers:
        return
    header = ["tier", "capacity", "tokens"]
    header += [f"of {show_tokens(row.tokens)}" for row in report.contexts]
    rows = [
        (
            tier.name,
            show_capacity(tier.capacity),
            f"{tier.tokens:,}",
            *(f"{held.conversations:,}" for held in tier.holds),
        )
        for tier in report.tiers
    ]
    per_token = f"{report.tier_bytes_per_token:,} bytes a token"
    print_table(to, f"Tokens and conversations that a tier holds ({per_token})", header, rows)
