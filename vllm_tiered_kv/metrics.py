# SPDX-License-Identifier: Apache-2.0
"""What we count, and how it reaches vLLM's ``/metrics``.

A counter or gauge is a declared name and one value per label, in order. Both halves count
into :class:`Tally`; the scheduler half hands the increments to vLLM, which carries them to
the front end, where :class:`PromMetrics` holds the Prometheus objects.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from vllm_tiered_kv.compat import KVConnectorPromMetrics, KVConnectorStats

PREFIX = "vllm:tiered_kv_"
_SEPARATOR = "|"


class Metric(msgspec.Struct, frozen=True):
    """One declared metric."""

    name: str
    labels: tuple[str, ...]
    doc: str
    series: tuple[tuple[str, ...], ...] = ()
    """Label values known from the start: they exist, at zero, before the first event."""

    def key(self, *values: str) -> str:
        """The flat name under which one of its time series travels."""
        return _SEPARATOR.join((self.name, *values))


TIERS = ("cpu", "disk")
DIRECTIONS = ("store", "load")
EVENTS = ("stored", "loaded", "evicted", "dropped", "failed")
RESULTS = ("hit", "miss", "wait", "skipped", "refused")
KINDS = (
    "adapter",
    "adapter_limit",
    "copy_load",
    "copy_store",
    "disk_damaged",
    "disk_folder",
    "disk_hung",
    "disk_missing",
    "disk_read",
    "disk_remove",
    "disk_write",
    "foreign",
    "hung",
    "internal",
    "kv_events",
    "load_dropped",
    "load_failed",
    "load_plan",
    "load_stale",
    "params",
    "pool",
    "report",
    "store",
)

LOOKUPS = Metric(
    "lookups",
    ("result",),
    "Look-ups of requests: hit, miss, wait, skipped, refused.",
    tuple((result,) for result in RESULTS),
)
HIT_TOKENS = Metric(
    "hit_tokens",
    ("tier",),
    "Tokens that arrived in device blocks.",
    tuple((tier,) for tier in TIERS),
)
BYTES = Metric(
    "bytes",
    ("direction", "tier"),
    "Bytes copied, over all ranks.",
    tuple(itertools.product(DIRECTIONS, TIERS)),
)
SECONDS = Metric(
    "seconds",
    ("direction", "tier"),
    "Seconds the copies took, of the slowest rank.",
    tuple(itertools.product(DIRECTIONS, TIERS)),
)
CHUNKS = Metric(
    "chunks",
    ("event", "tier"),
    "Chunks: stored, loaded, evicted, dropped (not stored), failed.",
    tuple(itertools.product(EVENTS, TIERS)),
)
FAILURES = Metric(
    "failures", ("kind",), "What went wrong, by kind.", tuple((kind,) for kind in KINDS)
)
HOOK_SECONDS = Metric(
    "hook_seconds",
    ("half", "hook", "clock"),
    "Seconds in our hooks on the engine's threads: of processor time (cpu), and with what "
    "other threads took meanwhile (wall).",
)
GATE_CHOICES = (
    ("all", "predicted"),
    ("all", "learning"),
    ("all", "forced"),
    ("part", "predicted"),
    ("part", "exploring"),
    ("none", "predicted"),
)
GATE_DECISIONS = Metric(
    "gate_decisions",
    ("choice", "reason"),
    "What was done with prefixes that could be loaded: all, part, none; and why.",
    GATE_CHOICES,
)
GATE_SECONDS = Metric(
    "gate_seconds",
    ("what", "kind"),
    "Seconds, predicted and actual, of loads, and of prefills chosen instead of one (recompute); "
    "and, predicted, of the prefills that loads replaced.",
    (
        ("load", "predicted"),
        ("load", "actual"),
        ("replaced", "predicted"),
        ("recompute", "predicted"),
        ("recompute", "actual"),
    ),
)
GATE_REGRET = Metric(
    "gate_regret_seconds",
    ("choice",),
    "Seconds to the first token beyond what the other choice was predicted to take.",
    (("all",), ("part",), ("none",)),
)
GATE_PROBES = Metric(
    "gate_probes", ("tier",), "Background reads that measure a tier nobody uses.", (("disk",),)
)
GATE_GIVEN_UP = Metric(
    "gate_given_up", ("tier",), "Waits that were ended because a tier fell behind.", (("disk",),)
)
GATE = (GATE_DECISIONS, GATE_SECONDS, GATE_REGRET, GATE_PROBES, GATE_GIVEN_UP)
COUNTERS = (LOOKUPS, HIT_TOKENS, BYTES, SECONDS, CHUNKS, FAILURES, HOOK_SECONDS, *GATE)

CAPACITY = Metric("capacity_bytes", ("tier",), "Size of the tier, over all ranks.")
USAGE = Metric("usage_bytes", ("tier",), "Bytes of the tier that hold chunks.")
IN_FLIGHT = Metric(
    "jobs_in_flight",
    ("direction",),
    "Jobs not yet finished: store, load (device), write, read (disk).",
)
DEGRADED = Metric("degraded", ("tier",), "1 while a tier is left alone because of trouble.")
GAUGES = (CAPACITY, USAGE, IN_FLIGHT, DEGRADED)


class Tally:
    """Increments since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, key: str, value: float = 1) -> None:
        self._counts[key] = self._counts.get(key, 0) + value

    def take(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return counts

    def __bool__(self) -> bool:
        return bool(self._counts)


class TieredStats(KVConnectorStats):  # type: ignore[misc]
    """Counters (increments) and gauges (latest values) of one interval.

    ``data`` is ``{"counters": {key: increment}, "gauges": {key: value}}``: plain enough for
    any serialiser between the engine and the front end.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}}

    def is_empty(self) -> bool:
        return not self.data.get("counters") and not self.data.get("gauges")

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters = dict(self.data.get("counters", {}))
        for key, value in other.data.get("counters", {}).items():
            counters[key] = counters.get(key, 0) + value
        gauges = {**self.data.get("gauges", {}), **other.data.get("gauges", {})}
        return TieredStats(data={"counters": counters, "gauges": gauges})

    def reduce(self) -> dict[str, int | float]:
        """The one-line summary in vLLM's periodic log."""
        counters = self.data.get("counters", {})
        summary = {
            key.replace(_SEPARATOR, "_"): round(value, 3)
            for key, value in sorted(counters.items())
            if not key.startswith(HOOK_SECONDS.name)
        }
        return {**summary, **{k.replace(_SEPARATOR, "_"): v for k, v in self._gauges()}}

    def _gauges(self) -> Iterable[tuple[str, float]]:
        return sorted(self.data.get("gauges", {}).items())


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus side, in the front end."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for counter in COUNTERS:
            self._metrics[counter.name] = self._counter_cls(
                name=PREFIX + counter.name,
                documentation=counter.doc,
                labelnames=[*labelnames, *counter.labels],
            )
        for gauge in GAUGES:
            self._metrics[gauge.name] = self._gauge_cls(
                name=PREFIX + gauge.name,
                documentation=gauge.doc,
                multiprocess_mode="mostrecent",
                labelnames=[*labelnames, *gauge.labels],
            )
        self._series: dict[tuple[int, str], Any] = {}
        for counter in COUNTERS:
            for values in counter.series:
                for engine_idx in per_engine_labelvalues:
                    self._find(engine_idx, counter.key(*values))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.get("counters", {}).items():
            if (series := self._find(engine_idx, key)) is not None and value >= 0:
                series.inc(value)
        for key, value in transfer_stats_data.get("gauges", {}).items():
            if (series := self._find(engine_idx, key)) is not None:
                series.set(value)

    def _find(self, engine_idx: int, key: str) -> Any | None:
        series = self._series.get((engine_idx, key))
        if series is not None:
            return series
        name, *values = key.split(_SEPARATOR)
        metric = self._metrics.get(name)
        engine = self.per_engine_labelvalues.get(engine_idx)
        if metric is None or engine is None:
            return None
        series = metric.labels(*engine, *values)
        self._series[engine_idx, key] = series
        return series
