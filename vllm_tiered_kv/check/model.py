# SPDX-License-Identifier: Apache-2.0
"""What the tiers hold of a model: pure."""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.check.findings import Finding, error, ok, refused, warning
from vllm_tiered_kv.config import ConfigError, Options, check_capacity, format_size
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind, plan_geometry
from vllm_tiered_kv.remote.start import NO_STATES, NO_WINDOWS_LENT
from vllm_tiered_kv.sizing.capacity import conversations_that_fit, tokens_that_fit
from vllm_tiered_kv.sizing.layers import Reach
from vllm_tiered_kv.sizing.read import Model
from vllm_tiered_kv.sizing.units import show_tokens
from vllm_tiered_kv.tiers.disk.settings import check_room

DEFAULT_BLOCK = 16
"""Tokens of a block, where vLLM is not told: on GPUs; its CPU platform takes 128."""
_ASSUMED = " (vLLM's default on GPUs, on CPUs 128: give --block-size)"
REQUEST = 32 << 10
"""Tokens of a long request."""


class Served(msgspec.Struct, frozen=True):
    """How a model is to be served."""

    name: str
    model: Model
    tp: int = 1
    block_tokens: int | None = None
    """None: not given."""


class TierRow(msgspec.Struct, frozen=True):
    """What one tier holds."""

    name: str
    capacity: int
    tokens: int
    requests: int
    """Of `request_tokens` of the report."""


class ModelReport(msgspec.Struct, frozen=True):
    """What the options come to with a model."""

    name: str
    kv_dtype: str
    tensor_parallel: int
    bytes_per_token: int
    """In the tiers, all ranks' copies together."""
    chunk_tokens: int | None
    """None: vLLM decides at start how layers that differ are grouped."""
    chunk_bytes: int | None
    """Of all ranks."""
    request_tokens: int
    tiers: tuple[TierRow, ...]


def judge(options: Options, served: Served) -> tuple[ModelReport, list[Finding]]:
    """What the tiers hold, and what is to be said of it.

    Raises:
        SizingError: the layers cannot be divided over that many GPUs.
    """
    shape = served.model.shape
    footprint = shape.on_all_ranks(served.tp)
    geometry, findings = _cut(options, served)
    limit = served.model.config.max_position_embeddings or REQUEST
    request = min(REQUEST, limit)
    capacities = {
        name: int(tier.capacity)
        for name, tier in (("cpu", options.cpu), ("disk", options.disk))
        if tier is not None
    }
    tiers = tuple(
        TierRow(
            name,
            capacity,
            tokens_that_fit(footprint, capacity),
            conversations_that_fit(footprint, capacity, request),
        )
        for name, capacity in capacities.items()
    )
    findings += [_tier(tier, request) for tier in tiers]
    if (
        options.cpu is not None
        and options.disk is not None
        and (options.disk.capacity <= options.cpu.capacity)
    ):
        says = "holds no more than the CPU tier: of use after a restart, and for other engines"
        findings.append(warning("disk.capacity", says))
    if geometry is not None:
        findings += _least(options, geometry, served.tp)
    per_token = f"{footprint.tier_bytes_per_token:,} bytes a token in {served.model.kv_dtype.value}"
    findings.insert(0, ok("model", f"{served.name}: {per_token}, all ranks together"))
    report = ModelReport(
        name=served.name,
        kv_dtype=served.model.kv_dtype.value,
        tensor_parallel=served.tp,
        bytes_per_token=footprint.tier_bytes_per_token,
        chunk_tokens=geometry.chunk_tokens if geometry is not None else None,
        chunk_bytes=geometry.part_bytes(0) * served.tp if geometry is not None else None,
        request_tokens=request,
        tiers=tiers,
    )
    return report, [*_refusals(options, served), *findings]


def _refusals(options: Options, served: Served) -> list[Finding]:
    shape = served.model.shape
    if any(group.reach is Reach.CHUNK for group in shape.attention):
        says = "has chunked local attention, which is not supported: the engine does not start"
        return [error("model", f"{served.name} {says}")]
    if not shape.attention:
        return [error("model", f"{served.name} has recurrent layers alone: nothing to keep")]
    if options.remote is None or _is_plain(served.model):
        return []
    if shape.states:
        return [refused(NO_STATES)]
    if options.remote.peers is not None:
        return [refused(NO_WINDOWS_LENT)]
    return []


def _is_plain(model: Model) -> bool:
    """Whether all layers keep every token, so that they are one KV cache group."""
    shape = model.shape
    return not shape.states and all(group.reach is Reach.FULL for group in shape.attention)


def _cut(options: Options, served: Served) -> tuple[Geometry | None, list[Finding]]:
    """The chunks; None where it is not known how vLLM groups the layers."""
    if not _is_plain(served.model):
        return None, []
    block = served.block_tokens or DEFAULT_BLOCK
    per_rank = served.model.shape.on_rank(served.tp).bytes_per_token
    group = GroupGeometry(GroupKind.FULL, block, block * per_rank)
    assumed = "" if served.block_tokens is not None else _ASSUMED
    try:
        geometry = plan_geometry(
            [group], scheduler_tokens=block, hash_tokens=block, chunk_tokens=options.chunk_tokens
        )
    except ConfigError as wrong:
        if served.block_tokens is not None:
            return None, [refused(str(wrong))]
        what, _, says = str(wrong).partition(": ")
        return None, [warning(what, f"{says}{assumed}")]
    nbytes = format_size(geometry.part_bytes(0) * served.tp)
    says = f"a chunk is {geometry.chunk_tokens} tokens, {nbytes} over all ranks"
    return geometry, [ok("chunk_tokens", f"{says}, with blocks of {block} tokens{assumed}")]


def _tier(tier: TierRow, request: int) -> Finding:
    what, size = f"{tier.name}.capacity", format_size(tier.capacity)
    tokens = show_tokens(request)
    if not tier.requests:
        says = f"{size} hold {tier.tokens:,} tokens, less than one request of {tokens}"
        return warning(what, says)
    requests = "one request" if tier.requests == 1 else f"{tier.requests:,} requests"
    return ok(what, f"{size} hold {tier.tokens:,} tokens, {requests} of {tokens}")


def _least(options: Options, geometry: Geometry, ranks: int) -> list[Finding]:
    """What an engine refuses: a tier that does not hold a chunk."""
    findings = []
    if options.cpu is not None:
        floor = geometry.slot_bytes * ranks
        try:
            check_capacity("cpu.capacity", options.cpu.capacity, floor=floor, limit=1 << 60)
        except ConfigError as wrong:
            findings.append(refused(str(wrong)))
    if options.disk is not None:
        try:
            check_room(options.disk, [geometry.part_bytes(0)], ranks)
        except ConfigError as wrong:
            findings.append(refused(str(wrong)))
    return findings
