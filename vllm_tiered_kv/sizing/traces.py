# SPDX-License-Identifier: Apache-2.0
"""What tiers would have served of a trace of requests, in hits, bytes written and time saved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.replay import (
    BLOCK_TOKENS,
    Request,
    Settings,
    TraceError,
    belady,
    endless,
    read_trace,
    replay,
)
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.layers import Footprint
from vllm_tiered_kv.sizing.timing import Compute, Link, Work

DAY = 86_400.0
MAX_BLOCKS = 5_000_000
"""Of all requests that are replayed: some GB of memory a process."""


class Times(msgspec.Struct, frozen=True):
    """What a hit costs and what it saves."""

    footprint: Footprint
    """Of all GPUs' copies together."""
    cpu: Link
    disk: Link | None
    """What comes from disk goes through host memory, too."""
    work: Work
    compute: Compute
    block_tokens: int = BLOCK_TOKENS
    """Of the trace's blocks."""

    @property
    def block_bytes(self) -> int:
        """Of one block of the trace in a tier. Recurrent states are left out."""
        return self.block_tokens * self.footprint.tier_bytes_per_token

    def load_seconds(self, cpu_tokens: int, disk_tokens: int) -> float:
        """Of a run of tokens, windows and states included as far as they are needed."""
        tokens = cpu_tokens + disk_tokens
        if not tokens:
            return 0.0
        nbytes = self.footprint.request_bytes(tokens)
        seconds = self.cpu.seconds(nbytes)
        if disk_tokens and self.disk is not None:
            seconds += self.disk.seconds(nbytes * disk_tokens / tokens)
        return seconds

    def compute_seconds(self, tokens: int, before: int = 0) -> float:
        """To compute what follows ``before`` tokens up to ``tokens``."""
        flops = self.work.flops(tokens) - self.work.flops(before)
        return flops / self.compute.flops


class Tiers(msgspec.Struct, frozen=True):
    """What is replayed."""

    cpu_bytes: int
    disk_bytes: int
    """0: no disk."""
    policy: Eviction
    store_after: int = 1
    min_tokens: int = 0


class TierOutcome(msgspec.Struct, frozen=True):
    """Of one policy in both tiers."""

    policy: Eviction
    cpu_hit_rate: float
    """Of all blocks, 0 to 1."""
    disk_hit_rate: float
    bytes_written: int
    """To disk."""
    bytes_written_per_day: float
    """At the trace's own pace; 0 where it takes no time."""
    ttft: float
    """Seconds without tiers, all requests together, queueing left aside."""
    ttft_saved: float
    """Seconds less, where every hit is loaded; below 0 where that costs more than it saves."""
    ttft_saved_where_it_pays: float
    """Seconds less, where only that is loaded which comes faster than it is computed."""


class TraceFacts(msgspec.Struct, frozen=True):
    """What there is to know of a trace before it is replayed."""

    requests: int
    blocks: int
    distinct_blocks: int
    distinct_bytes: int
    seconds: float
    endless_hit_rate: float
    """What a tier without a limit serves."""


def load_trace(path: Path, limit: int, block_tokens: int = BLOCK_TOKENS) -> tuple[Request, ...]:
    """The first ``limit`` requests.

    Raises:
        SizingError: there are none, there are more than memory should hold, or a line is not a
            request.
    """
    requests: list[Request] = []
    blocks = 0
    try:
        for request in itertools.islice(read_trace(path, block_tokens), limit):
            blocks += len(request.hash_ids)
            if blocks > MAX_BLOCKS:
                raise SizingError(
                    f"{path} has more than {MAX_BLOCKS:,} blocks: replay less of it, "
                    f"--max-requests {len(requests)}"
                )
            requests.append(request)
    except TraceError as error:
        raise SizingError(str(error)) from None
    except OSError as error:
        raise SizingError(f"{path} cannot be read: {error.strerror or error}") from None
    if not blocks:
        raise SizingError(f"{path} holds no requests with blocks")
    return tuple(requests)


def trace_facts(requests: Sequence[Request], block_bytes: int) -> TraceFacts:
    """What there is to know of them, in blocks of ``block_bytes``."""
    blocks = sum(len(request.hash_ids) for request in requests)
    distinct = len({block for request in requests for block in request.hash_ids})
    times = [request.timestamp for request in requests]
    return TraceFacts(
        requests=len(requests),
        blocks=blocks,
        distinct_blocks=distinct,
        distinct_bytes=distinct * block_bytes,
        seconds=(max(times) - min(times)) / 1e3,
        endless_hit_rate=endless(requests) / blocks,
    )


def replay_tiers(
    requests: Sequence[Request], tiers: Tiers, times: Times, seconds: float
) -> TierOutcome:
    """One policy in both tiers.

    Args:
        seconds: that the trace takes.

    Raises:
        SizingError: the CPU tier holds no block.
    """
    size = times.block_bytes
    if tiers.cpu_bytes < size:
        raise SizingError(
            f"a CPU tier of {tiers.cpu_bytes} bytes does not hold one block of {size} bytes"
        )
    total = always = gated = 0.0

    def observe(request: Request, cpu: int, disk: int) -> None:
        nonlocal total, always, gated
        # The last block may not be full, and the last token is always computed.
        most = max(0, request.input_length - 1)
        tokens = min((cpu + disk) * times.block_tokens, most)
        from_cpu = min(cpu * times.block_tokens, tokens)
        total += times.compute_seconds(request.input_length)
        saved = times.compute_seconds(tokens) - times.load_seconds(from_cpu, tokens - from_cpu)
        always += saved
        gated += max(0.0, saved)

    outcome = replay(
        requests,
        Settings(
            cpu_blocks=tiers.cpu_bytes // size,
            cpu_eviction=tiers.policy,
            disk_bytes=tiers.disk_bytes,
            disk_eviction=tiers.policy,
            min_tokens=tiers.min_tokens,
            store_after=tiers.store_after,
            block_tokens=times.block_tokens,
            block_bytes=size,
        ),
        observe,
    )
    return TierOutcome(
        policy=tiers.policy,
        cpu_hit_rate=outcome.cpu_hits / outcome.blocks,
        disk_hit_rate=outcome.disk_hits / outcome.blocks,
        bytes_written=outcome.disk_written,
        bytes_written_per_day=outcome.disk_written / seconds * DAY if seconds else 0.0,
        ttft=total,
        ttft_saved=always,
        ttft_saved_where_it_pays=gated,
    )


def curve_point(
    requests: Sequence[Request], policy: Eviction | None, blocks: int, block_tokens: int
) -> float:
    """Hit rate in a CPU tier of ``blocks`` blocks; policy None: of who knows the future."""
    if policy is None:
        total = sum(len(request.hash_ids) for request in requests)
        return belady(requests, blocks) / total
    return replay(requests, Settings(blocks, policy, block_tokens=block_tokens)).hit_rate
