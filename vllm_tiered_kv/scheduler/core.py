# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half's parts share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.gate import GateMode
from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.scheduler.adapters import AdapterTable
from vllm_tiered_kv.scheduler.disk import DiskPlanner
from vllm_tiered_kv.scheduler.events import EventConverter, TierEvents
from vllm_tiered_kv.scheduler.index import ChunkIndex, chunk_policy
from vllm_tiered_kv.scheduler.jobs import JobLedger

if TYPE_CHECKING:
    from vllm_tiered_kv.tiers.disk.agent import DiskAgent

logger = get_logger(__name__)

TIER = "cpu"
MAX_ANNOUNCED = 1 << 20
"""Chunks on disk that subscribers to KV events are told of at once; each takes memory here."""


class SchedulerSettings(msgspec.Struct, frozen=True):
    """What the scheduler half is built from; all of it known at start."""

    geometry: Geometry
    num_slots: int
    """Slots on each rank."""
    world_size: int
    load_deadline: float
    """Seconds a load may wait before its first copy, or for another request's load."""
    store_generated: bool
    trust_after_reset: bool
    """What was stored before a connector reset may still be offered."""
    shares_device_prefixes: bool
    """vLLM's own prefix caching is on: what one request loads, others find."""
    admission: Admission | None = None
    """Which chunks are written to disk; None: all."""
    step_tokens: int = 0
    """Tokens of all requests that can be scheduled and not yet settled."""
    draft_tokens: int = 0
    """Draft tokens of one request in one step."""
    withdraws: bool = False
    """vLLM may take a request out of the step it is planning: it schedules by priority."""
    eviction: Eviction = Eviction.LRU
    """What the CPU tier evicts first."""
    gate: GateMode = GateMode.MEASURED
    """What decides whether a stored prefix is loaded."""
    token_budget: int = 8192
    """Tokens of a request that fit in one step if it is alone."""
    shared_token_budget: int | None = None
    """The same beside others; None: as many."""
    event_groups: tuple[compat.EventGroup, ...] | None = None
    """How KV events name each KV cache group's kind; None: KV events are off."""
    recomputes: bool = True
    """vLLM computes what a load did not bring; else a load that is given up fails its request."""


class Core:
    """Index, jobs, counters and epoch. Scheduler thread only."""

    def __init__(
        self,
        settings: SchedulerSettings,
        clock: Callable[[], float] = time.monotonic,
        agent: DiskAgent | None = None,
    ) -> None:
        self.settings = settings
        self.geometry = settings.geometry
        self.events = self._events(compat.CPU_MEDIUM, settings.num_slots)
        """What is published of the CPU tier; None where KV events are off."""
        self.index = ChunkIndex(
            settings.num_slots,
            len(settings.geometry.groups),
            self.events.log if self.events is not None else None,
            chunk_policy(settings.eviction),
            settings.geometry.chunk_tokens,
        )
        self.ledger = JobLedger(settings.world_size)
        self.adapters = AdapterTable(settings.world_size)
        self.tally = metrics.Tally()
        self.disk: DiskPlanner | None = None
        """The disk tier; None without one."""
        if agent is not None:
            chunk_bytes = sum(agent.settings.file_bytes) * agent.settings.ranks
            max_chunks = min(MAX_ANNOUNCED, agent.settings.capacity // chunk_bytes)
            self.disk = DiskPlanner(
                agent,
                self.index,
                settings.geometry,
                settings.num_slots,
                self.ledger.number,
                self.tally,
                settings.load_deadline,
                settings.admission or Admission(),
                self._events(compat.DISK_MEDIUM, max_chunks),
            )
        self.clock = clock
        self.epoch = 0
        """Counts connector resets; what is older than the last is never offered."""
        self.null_block = 0
        self._trouble = OncePerKind(logger)

    def _events(self, medium: compat.EventMedium, max_chunks: int) -> TierEvents | None:
        if self.settings.event_groups is None:
            return None
        converter = EventConverter(self.geometry, self.settings.event_groups)
        return TierEvents(converter, medium, max_chunks, self.fail, self.bug)

    def fail(self, kind: str, message: str) -> None:
        """Count a failure and say it once."""
        self.tally.add(metrics.FAILURES.key(kind))
        self._trouble.warn(kind, message)

    def bug(self, where: str) -> None:
        """Note an exception that is our own mistake; call it while handling one.

        An exception in a hook would end the engine and every request in it. What it costs
        instead is a look-up or a store.
        """
        self.tally.add(metrics.FAILURES.key("internal"))
        self._trouble.error("internal", f"unexpected error in {where}; going on without")

    def count_chunks(self, event: str, count: int = 1) -> None:
        self.tally.add(metrics.CHUNKS.key(event, TIER), count)

    def count_copy(self, direction: str, nbytes: int, seconds: float) -> None:
        self.tally.add(metrics.BYTES.key(direction, TIER), nbytes)
        self.tally.add(metrics.SECONDS.key(direction, TIER), seconds)
