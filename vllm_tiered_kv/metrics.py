# SPDX-License-Identifier: Apache-2.0
"""What we count, and how it travels to vLLM's front end.

A metric is a declared name and one value per label, in order. Both halves count into
:class:`Tally`; the scheduler half hands what came together to vLLM, which carries it to the front
end, where ``exposition.py`` holds the Prometheus objects.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from vllm_tiered_kv.compat import KVConnectorStats

PREFIX = "vllm:tiered_kv_"
SEPARATOR = "|"


class Metric(msgspec.Struct, frozen=True):
    """One declared metric."""

    name: str
    labels: tuple[str, ...]
    doc: str
    series: tuple[tuple[str, ...], ...] = ()
    """Label values known from the start: they exist, at zero, before the first event."""
    buckets: tuple[float, ...] = ()
    """Upper bounds; a histogram has them."""

    def key(self, *values: str) -> str:
        """The flat name under which one of its time series travels."""
        return SEPARATOR.join((self.name, *values))


TIERS = ("cpu", "disk")
PEER = "peer"
"""Another engine's memory, of a prompt that it handed over."""
PEER_CPU = "peer_cpu"
"""Another engine's CPU tier."""
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
    "disk_ranks",
    "disk_read",
    "disk_remove",
    "disk_room",
    "disk_write",
    "foreign",
    "hung",
    "internal",
    "kv_events",
    "load_dropped",
    "load_failed",
    "load_late",
    "load_plan",
    "load_stale",
    "params",
    "pool",
    "remote_agent",
    "remote_connect",
    "remote_deadline",
    "remote_disconnected",
    "remote_engine",
    "remote_full",
    "remote_key",
    "remote_lease",
    "remote_leases",
    "remote_lends_nothing",
    "remote_limit",
    "remote_message",
    "remote_not_ready",
    "remote_pages",
    "remote_params",
    "remote_peer",
    "remote_proof",
    "remote_quarantine",
    "remote_quiet",
    "remote_range",
    "remote_rate",
    "remote_rebuilt",
    "remote_role",
    "remote_semantic",
    "remote_shutdown",
    "remote_slots",
    "remote_ticket",
    "remote_unanswered",
    "remote_verify",
    "remote_version",
    "report",
    "store",
)

LOOKUPS = Metric(
    "lookups",
    ("result",),
    "Look-ups of requests: hit, miss, skipped, refused (what is stored would be slower than "
    "computing); and wait, besides one of these, where the request was asked to come back.",
    tuple((result,) for result in RESULTS),
)
HIT_TOKENS = Metric(
    "hit_tokens",
    ("tier",),
    "Tokens loaded from the tier, counted when they have arrived in device blocks.",
    tuple((tier,) for tier in (*TIERS, PEER, PEER_CPU)),
)
BYTES = Metric(
    "bytes",
    ("direction", "tier"),
    "Bytes moved, over all ranks: cpu, between device and host memory; disk, between host memory "
    "and files; peer, what another engine handed over; peer_cpu, from another engine's CPU tier "
    "into this one's.",
    (*itertools.product(DIRECTIONS, TIERS), ("load", PEER), ("load", PEER_CPU)),
)
SECONDS = Metric(
    "seconds",
    ("direction", "tier"),
    "Seconds that moving these bytes took, each time of the slowest rank. Copies overlap: bytes by "
    "seconds is the speed of one of them, not of the tier.",
    (*itertools.product(DIRECTIONS, TIERS), ("load", PEER), ("load", PEER_CPU)),
)
CHUNKS = Metric(
    "chunks",
    ("event", "tier"),
    "Chunks: stored, loaded, evicted, dropped (not stored), failed.",
    (*itertools.product(EVENTS, TIERS), ("loaded", PEER_CPU), ("failed", PEER_CPU)),
)
FAILURES = Metric(
    "failures", ("kind",), "What went wrong, by kind.", tuple((kind,) for kind in KINDS)
)
HANDOFFS = Metric(
    "handoffs",
    ("event",),
    "Prompts handed over: offered (by this engine); early, those of them that are read from slots, "
    "so that their device blocks were free at once; pulled (by this engine), failed (pulls).",
    (("offered",), ("early",), ("pulled",), ("failed",)),
)
HOOK_SECONDS = Metric(
    "hook_seconds",
    ("half", "hook", "clock"),
    "Seconds in our hooks on the engine's threads: of processor time (cpu), and with what "
    "other threads took meanwhile (wall). Only with TIERED_KV_PROFILE=1.",
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
    "gate_probes",
    ("tier",),
    "Background reads that measure a tier nobody uses.",
    (("disk",), (PEER_CPU,)),
)
GATE_GIVEN_UP = Metric(
    "gate_given_up",
    ("tier",),
    "Loads (cpu), and waits for files (disk) and for other engines' chunks (peer_cpu), whose rest "
    "was given up because a tier fell behind.",
    tuple((tier,) for tier in (*TIERS, PEER_CPU)),
)
GATE = (GATE_DECISIONS, GATE_SECONDS, GATE_REGRET, GATE_PROBES, GATE_GIVEN_UP)
SOURCES = ("none", "device", *TIERS, PEER_CPU, PEER, "failed")
FIRST_TOKEN = Metric(
    "time_to_first_token_seconds",
    ("source",),
    "Seconds from a request's arrival at the scheduler to its first token, without the front end's "
    "share, by the furthest place that a part of its prompt came from when it began to run: none "
    "(all of it computed), device (a prefix cache that is not ours), cpu, disk, peer_cpu (another "
    "engine's CPU tier), peer (handed over by another engine); failed: a load did not arrive.",
    tuple((source,) for source in SOURCES),
    (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
)
PROMPT_TOKENS = Metric(
    "prompt_tokens",
    ("source",),
    "Prompt tokens of the requests in time_to_first_token_seconds, all of each prompt, by the same "
    "source: what comes from a tier is longer than what does not.",
    tuple((source,) for source in SOURCES),
)
COUNTERS = (
    LOOKUPS,
    HIT_TOKENS,
    BYTES,
    SECONDS,
    CHUNKS,
    FAILURES,
    HANDOFFS,
    HOOK_SECONDS,
    PROMPT_TOKENS,
    *GATE,
)
HISTOGRAMS = (FIRST_TOKEN,)

CAPACITY = Metric("capacity_bytes", ("tier",), "Size of the tier, over all ranks.")
USAGE = Metric(
    "usage_bytes",
    ("tier",),
    "Bytes in use: cpu, those that hold chunks; disk, those of the whole folder, of all who write "
    "there.",
)
IN_FLIGHT = Metric(
    "jobs_in_flight",
    ("direction",),
    "Jobs not yet finished: store, load (device), write, read (disk), peer_read (chunks from other "
    "engines), sum (chunks whose checksums are to be made, before they are lent); and slots that "
    "others may be reading here (lent), hand-overs that are not free yet (lease), reads that were "
    "given up and may still write (quarantine).",
)
DEGRADED = Metric(
    "degraded",
    ("tier",),
    "1 while a tier is left alone because of trouble, and after a reset has closed it; else 0.",
)
GAUGES = (CAPACITY, USAGE, IN_FLIGHT, DEGRADED)


class Tally:
    """Increments and observations since they were last taken."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._observed: dict[str, list[float]] = {}

    def add(self, key: str, value: float = 1) -> None:
        self._counts[key] = self._counts.get(key, 0) + value

    def observe(self, key: str, value: float) -> None:
        """For a histogram. At most a few a request: they are kept one by one until taken."""
        self._observed.setdefault(key, []).append(value)

    def take(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return counts

    def take_observed(self) -> dict[str, list[float]]:
        observed, self._observed = self._observed, {}
        return observed

    def __bool__(self) -> bool:
        return bool(self._counts or self._observed)


class TieredStats(KVConnectorStats):  # type: ignore[misc]
    """Counters (increments), gauges (latest values) and observations of one interval.

    ``data`` is ``{"counters": {key: increment}, "gauges": {key: value}, "observed": {key:
    [value, ...]}}``: plain enough for any serialiser between the engine and the front end.
    """

    data: dict[str, Any]

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}, "observed": {}}

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        counters = dict(self._part("counters"))
        for key, value in other.data.get("counters", {}).items():
            counters[key] = counters.get(key, 0) + value
        gauges = {**self._part("gauges"), **other.data.get("gauges", {})}
        observed = dict(self._part("observed"))
        for key, values in other.data.get("observed", {}).items():
            observed[key] = [*observed.get(key, ()), *values]
        return TieredStats(data={"counters": counters, "gauges": gauges, "observed": observed})

    def reduce(self) -> dict[str, int | float]:
        """The one-line summary in vLLM's periodic log."""
        summary: dict[str, int | float] = {
            _words(key): round(value, 3)
            for key, value in sorted(self._part("counters").items())
            if not key.startswith(HOOK_SECONDS.name)
        }
        for key, values in sorted(self._part("observed").items()):
            summary[f"{_words(key)}_count"] = len(values)
            summary[f"{_words(key)}_mean"] = round(sum(values) / max(1, len(values)), 3)
        summary.update((_words(key), value) for key, value in sorted(self._part("gauges").items()))
        return summary

    def _part(self, name: str) -> dict[str, Any]:
        part: dict[str, Any] = self.data.get(name, {})
        return part


def _words(key: str) -> str:
    return key.replace(SEPARATOR, "_")
