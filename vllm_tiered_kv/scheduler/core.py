# SPDX-License-Identifier: Apache-2.0
"""What the scheduler half's parts share."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.scheduler.adapters import AdapterTable
from vllm_tiered_kv.scheduler.events import EventConverter, TierEvents
from vllm_tiered_kv.scheduler.index import ChunkIndex
from vllm_tiered_kv.scheduler.jobs import JobLedger

logger = get_logger(__name__)

TIER = "cpu"


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
    event_groups: tuple[compat.EventGroup, ...] | None = None
    """How KV events name each KV cache group's kind; None: KV events are off."""


class Core:
    """Index, jobs, counters and epoch. Scheduler thread only."""

    def __init__(
        self, settings: SchedulerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.geometry = settings.geometry
        self.events: TierEvents | None = None
        """What is published of the CPU tier; None where KV events are off."""
        if settings.event_groups is not None:
            self.events = TierEvents(
                EventConverter(settings.geometry, settings.event_groups),
                compat.CPU_MEDIUM,
                settings.num_slots,
                self.fail,
                self.bug,
            )
        self.index = ChunkIndex(
            settings.num_slots,
            len(settings.geometry.groups),
            self.events.log if self.events is not None else None,
        )
        self.ledger = JobLedger(settings.world_size)
        self.adapters = AdapterTable(settings.world_size)
        self.tally = metrics.Tally()
        self.clock = clock
        self.epoch = 0
        """Counts connector resets; what is older than the last is never offered."""
        self.null_block = 0
        self._trouble = OncePerKind(logger)

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
