# SPDX-License-Identifier: Apache-2.0
"""All replays of a trace that ``plan`` reports, by several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec

from vllm_tiered_kv.config import memory_limit
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.replay import Request
from vllm_tiered_kv.sizing.traces import (
    TierOutcome,
    Tiers,
    Times,
    TraceFacts,
    curve_point,
    load_trace,
    replay_tiers,
    trace_facts,
)

SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Capacities of the curve, as shares of the trace's distinct blocks."""

MAX_JOBS = 64
BLOCK_MEMORY = 1000
"""Bytes that a replay takes for each block of its trace, at most."""


class CurvePoint(msgspec.Struct, frozen=True):
    """A hit rate in a CPU tier alone."""

    policy: str
    """One of the policies, or the optimum of who knows the future."""
    capacity: int
    """Bytes."""
    share: float
    """Of the bytes of all distinct blocks."""
    hit_rate: float


class TraceReport(msgspec.Struct, frozen=True):
    """All of it."""

    facts: TraceFacts
    outcomes: tuple[TierOutcome, ...]
    curve: tuple[CurvePoint, ...]


class _Loaded:
    """A trace in a process that replays it."""

    requests: tuple[Request, ...] = ()


class _Task(msgspec.Struct, frozen=True):
    """One replay: of tiers, or a point of the curve."""

    tiers: Tiers | None
    policy: Eviction | None = None
    blocks: int = 0


def replay_trace(
    path: Path,
    limit: int,
    tiers: Sequence[Tiers],
    times: Times,
    *,
    jobs: int,
    advance: Callable[[int, int], None] | None = None,
) -> TraceReport:
    """Replay a trace with each of ``tiers``, and each policy of theirs at growing capacities.

    Args:
        path: of the trace; each process reads it.
        limit: requests of it that are replayed.
        jobs: processes.
        advance: told how many replays of how many have ended.

    Raises:
        SizingError: the trace cannot be replayed, or a tier is too small.
    """
    requests = load_trace(path, limit, times.block_tokens)
    size = times.block_bytes
    facts = trace_facts(requests, size)
    policies: list[Eviction | None] = [each.policy for each in tiers]
    counts = [max(1, int(share * facts.distinct_blocks)) for share in SHARES]
    tasks = [_Task(each) for each in tiers]
    points = [(policy, blocks) for policy in [*policies, None] for blocks in counts]
    tasks += [_Task(None, policy, blocks) for policy, blocks in points]
    outcomes: list[TierOutcome] = []
    rates: list[float] = []
    with closing(_run(tasks, requests, (path, limit, times, facts.seconds), jobs)) as results:
        for result in results:
            if isinstance(result, TierOutcome):
                outcomes.append(result)
            else:
                rates.append(result)
            if advance is not None:
                advance(len(outcomes) + len(rates), len(tasks))
    curve = tuple(
        CurvePoint(
            policy=policy.value if policy is not None else "knows the future",
            capacity=blocks * size,
            share=blocks / facts.distinct_blocks,
            hit_rate=rate,
        )
        for (policy, blocks), rate in zip(points, rates, strict=True)
    )
    return TraceReport(facts, tuple(outcomes), curve)


def _run(
    tasks: Sequence[_Task],
    requests: tuple[Request, ...],
    start: tuple[Path, int, Times, float],
    jobs: int,
) -> Generator[TierOutcome | float, None, None]:
    """Results in the order of the tasks. Close the generator to end the processes."""
    blocks = sum(len(request.hash_ids) for request in requests)
    jobs = min(jobs, len(tasks), MAX_JOBS, memory_limit() // (2 * blocks * BLOCK_MEMORY))
    if jobs <= 1:
        _, _, times, seconds = start
        for task in tasks:
            yield _replay(task, requests, times, seconds)
        return
    context = multiprocessing.get_context("spawn")
    before = frozenset(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, context, _begin, start[:3]) as pool:
        futures = [pool.submit(_replay_here, task, *start[2:]) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            # A replay takes minutes, and an executor that is left waits for those under way.
            for process in frozenset(multiprocessing.active_children()) - before:
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(path: Path, limit: int, times: Times) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who is interrupted ends this process
    _Loaded.requests = load_trace(path, limit, times.block_tokens)


def _replay_here(task: _Task, times: Times, seconds: float) -> TierOutcome | float:
    return _replay(task, _Loaded.requests, times, seconds)


def _replay(
    task: _Task, requests: Sequence[Request], times: Times, seconds: float
) -> TierOutcome | float:
    if task.tiers is not None:
        return replay_tiers(requests, task.tiers, times, seconds)
    return curve_point(requests, task.policy, task.blocks, times.block_tokens)
