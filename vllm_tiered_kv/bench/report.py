# SPDX-License-Identifier: Apache-2.0
"""All that a comparison says, as ``report.json`` has it."""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.bench.agreement import Agreement
from vllm_tiered_kv.bench.config import Experiment
from vllm_tiered_kv.bench.stats import Estimate

VERSION = 1
SHARES = (0.5, 0.9, 0.99)
"""The percentiles that are reported."""


class Percentile(msgspec.Struct, frozen=True):
    """One percentile, in ms."""

    share: float
    estimate: Estimate
    few: bool
    """There are too few values to know it well."""


class Latency(msgspec.Struct, frozen=True):
    """How long something took."""

    metric: str
    """``ttft``, ``tpot``, ``itl`` or ``e2e``."""
    values: int
    percentiles: tuple[Percentile, ...]


class Rate(msgspec.Struct, frozen=True):
    """Something a second while the arm was measured, or a share."""

    metric: str
    estimate: Estimate


class Hits(msgspec.Struct, frozen=True):
    """Prompt tokens that one tier saved from being computed."""

    tier: str
    tokens: float | None
    """None: the server reports no such thing."""
    share: Estimate
    """Of all prompt tokens."""


class Failures(msgspec.Struct, frozen=True):
    """Requests that failed in one way."""

    kind: str
    count: int
    example: str


class ArmReport(msgspec.Struct, frozen=True):
    """One arm."""

    name: str
    url: str | None
    commands: tuple[tuple[str, ...], ...]
    """What was started."""
    requests: int
    answered: int
    failures: tuple[Failures, ...]
    prompt_tokens: int | None
    """By the server's account; None where it is missing for an answer."""
    output_tokens: int
    counted_by_chunks: int
    """Answers whose tokens had to be counted by the stream's parts."""
    seconds: float
    """That it was measured."""
    latencies: tuple[Latency, ...]
    rates: tuple[Rate, ...]
    hits: tuple[Hits, ...]


class Ratio(msgspec.Struct, frozen=True):
    """A figure of one arm over that of the first, paired block by block."""

    arm: str
    metric: str
    share: float | None
    """The percentile; None for a rate."""
    estimate: Estimate


class Machine(msgspec.Struct, frozen=True):
    """Where the client ran, and where servers did that it started."""

    processor: str
    cores: int
    memory_bytes: int
    python: str
    system: str
    load_average: float
    """Of the minute before; above 0.5 somebody else was at work."""


class Report(msgspec.Struct, frozen=True):
    """All of it."""

    version: int
    tool: str
    name: str
    started: str
    """UTC, ISO 8601."""
    seconds: float
    command: tuple[str, ...]
    """As it was typed."""
    machine: Machine
    experiment: Experiment
    blocks: int
    """That all arms have done."""
    arms: tuple[ArmReport, ...]
    ratios: tuple[Ratio, ...]
    agreements: tuple[Agreement, ...]
    notes: tuple[str, ...]
    ended_early: str | None
    """Why; None: all blocks were done."""
