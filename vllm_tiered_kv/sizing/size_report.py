# SPDX-License-Identifier: Apache-2.0
"""All that ``size`` says of a model, as ``--json`` prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from vllm_tiered_kv.sizing.capacity import (
    Device,
    conversations_that_fit,
    note_of_weights,
    requests_that_fit,
    tokens_that_fit,
)
from vllm_tiered_kv.sizing.gpus import Gpu
from vllm_tiered_kv.sizing.layers import Footprint, Reach, Shape
from vllm_tiered_kv.sizing.parameters import Parameters
from vllm_tiered_kv.sizing.read import Model
from vllm_tiered_kv.sizing.weights import Weights


class Question(msgspec.Struct, frozen=True):
    """What is asked about a model."""

    contexts: Sequence[int]
    """Tokens."""
    capacities: Mapping[str, int]
    """Bytes of each tier."""
    tp: int = 1
    gpu: Gpu | None = None
    utilisation: float = 0.92


class LayerRow(msgspec.Struct, frozen=True):
    """Layers that are alike; bytes are of one copy."""

    what: str
    layers: int
    bytes_per_token: int
    """0 for states."""
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    window: int | None = None
    """Tokens; None: all."""
    state_bytes: int | None = None


class PlaceRow(msgspec.Struct, frozen=True):
    """Bytes in one place: one GPU, or all of them."""

    bytes_per_token: int
    window_bytes: int
    state_bytes: int


class ContextRow(msgspec.Struct, frozen=True):
    """One length of request."""

    tokens: int
    bytes: int
    """On all GPUs together, to go on from the end."""
    requests: int | None
    """That fit the GPUs at once; None where no GPU is named or the weights are not known."""


class Held(msgspec.Struct, frozen=True):
    """Conversations of one length."""

    tokens: int
    conversations: int


class TierRow(msgspec.Struct, frozen=True):
    """What one tier holds."""

    name: str
    capacity: int
    tokens: int
    holds: tuple[Held, ...]


class DeviceRow(msgspec.Struct, frozen=True):
    """The GPUs."""

    gpu: str
    memory: int
    utilisation: float
    weights_per_gpu: int
    free_per_gpu: int
    """For KV, at most."""


class SizeReport(msgspec.Struct, frozen=True):
    """The answer."""

    model: str
    model_type: str | None
    kv_dtype: str
    kv_dtype_source: str
    tensor_parallel: int
    bytes_per_token: int
    """Of the layers that keep every token, one copy."""
    window_bytes: int
    """Of full windows, one copy."""
    state_bytes: int
    """Of recurrent layers, one copy."""
    fixed_bytes: int
    """Both."""
    tier_bytes_per_token: int
    """What a token takes in the tiers: windows' layers and all GPUs' copies included."""
    per_gpu: PlaceRow
    all_gpus: PlaceRow
    layers: tuple[LayerRow, ...]
    parameters: Parameters | None
    weights: Weights | None
    device: DeviceRow | None
    contexts: tuple[ContextRow, ...]
    tiers: tuple[TierRow, ...]
    notes: tuple[str, ...]


def size_report(
    name: str,
    model: Model,
    question: Question,
    parameters: Parameters | None,
    weights: Weights | None,
) -> SizeReport:
    """Answer a question.

    Raises:
        SizingError: the layers cannot be divided over the GPUs.
    """
    shape, tp = model.shape, question.tp
    one, all_ranks = shape.one_copy(), shape.on_all_ranks(tp)
    device = _device(question, weights)
    return SizeReport(
        model=name,
        model_type=model.config.model_type,
        kv_dtype=model.kv_dtype.value,
        kv_dtype_source=model.kv_dtype_source,
        tensor_parallel=tp,
        bytes_per_token=one.bytes_per_token,
        window_bytes=one.window_bytes,
        state_bytes=one.state_bytes,
        fixed_bytes=one.fixed_bytes,
        tier_bytes_per_token=all_ranks.tier_bytes_per_token,
        per_gpu=_place(shape.on_rank(tp)),
        all_gpus=_place(all_ranks),
        layers=_layer_rows(shape),
        parameters=parameters,
        weights=weights,
        device=_device_row(device, question.gpu) if device is not None and question.gpu else None,
        contexts=tuple(
            ContextRow(
                tokens,
                all_ranks.request_bytes(tokens),
                requests_that_fit(shape, device, tokens) if device is not None else None,
            )
            for tokens in question.contexts
        ),
        tiers=tuple(
            TierRow(
                tier,
                capacity,
                tokens_that_fit(all_ranks, capacity),
                tuple(
                    Held(tokens, conversations_that_fit(all_ranks, capacity, tokens))
                    for tokens in question.contexts
                ),
            )
            for tier, capacity in question.capacities.items()
        ),
        notes=tuple(_notes(model, question, device)),
    )


def _device(question: Question, weights: Weights | None) -> Device | None:
    if question.gpu is None or weights is None:
        return None
    return Device(question.gpu.memory, question.utilisation, weights.nbytes, question.tp)


def _device_row(device: Device, gpu: Gpu) -> DeviceRow:
    share = -(-device.weights // device.tp)
    return DeviceRow(gpu.name, gpu.memory, device.utilisation, share, device.free)


def _place(footprint: Footprint) -> PlaceRow:
    return PlaceRow(footprint.bytes_per_token, footprint.window_bytes, footprint.state_bytes)


def _layer_rows(shape: Shape) -> tuple[LayerRow, ...]:
    rows = [
        LayerRow(
            what=group.what if group.reach is Reach.FULL else f"{group.reach.value} {group.what}",
            layers=group.count,
            bytes_per_token=group.kv_heads * group.head_bytes,
            kv_heads=group.kv_heads,
            key_dim=group.key_dim,
            value_dim=group.value_dim,
            window=group.window if group.reach is not Reach.FULL else None,
        )
        for group in shape.attention
    ]
    rows += [
        LayerRow(group.what, group.count, 0, state_bytes=group.bytes_on_rank(1))
        for group in shape.states
    ]
    return tuple(rows)


def _notes(model: Model, question: Question, device: Device | None) -> list[str]:
    notes = []
    shape = model.shape
    reaches = {group.reach for group in shape.attention}
    copied = [g for g in shape.attention if g.heads_on_rank(question.tp) * question.tp > g.kv_heads]
    if copied:
        notes.append(
            f"{min(g.kv_heads for g in copied)} KV heads on {question.tp} GPUs: each keeps a copy, "
            "and so do the tiers"
        )
    if Reach.WINDOW in reaches or Reach.CHUNK in reaches:
        notes.append(
            "on the GPUs a window keeps its last tokens (vLLM: and up to a block and a step's "
            "tokens more); in a tier each token takes the windows' layers too"
        )
    if Reach.CHUNK in reaches:
        notes.append("chunked attention is not served by the connector; figures are vLLM's alone")
    if shape.states:
        notes.append(
            "one recurrent state a request or conversation is counted; vLLM holds two while it "
            "computes, and a tier one for each point where a prefix was left"
        )
    if question.gpu is not None and device is None:
        notes.append("the weights' size is not known, so no requests: give --weights or --params")
    elif device is not None and not device.free:
        notes.append(note_of_weights(device))
    elif device is not None:
        notes.append("activations and CUDA graphs take some of what is counted as free")
    return notes
