# SPDX-License-Identifier: Apache-2.0
"""What the dashboard shows of the tiers, and what a reader should conclude."""

from __future__ import annotations

from tools.dashboard.grafana import Panel, Query, Row
from tools.dashboard.promql import gain, rate, ratio, series, total

ENGINE = "instance, engine"

TIERS = Row(
    "Tiers",
    (
        Panel(
            "Usage",
            "Of each tier's capacity. A full tier is a good one: it evicts what was not used "
            "longest. Whether it is too small says the time to turn over. The disk stays below "
            "its high-water mark, and its usage is that of the whole folder, of all engines that "
            "share it.",
            "percentunit",
            (
                Query(
                    ratio(series("tiered_kv_usage_bytes"), series("tiered_kv_capacity_bytes")),
                    "{{tier}}, {{instance}} {{engine}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Time to turn over",
            "How long a tier of this size lasts at the rate at which it is written, which is "
            "about how long an unused chunk stays. If conversations pause for longer, their "
            "prompts are gone when they come back: more capacity, or write less (disk.min_tokens, "
            "store_after).",
            "s",
            (
                Query(
                    ratio(
                        total("tiered_kv_capacity_bytes", f"{ENGINE}, tier"),
                        rate("tiered_kv_bytes_total", f"{ENGINE}, tier", 'direction="store"'),
                    ),
                    "{{tier}}, {{instance}} {{engine}}",
                ),
            ),
        ),
        Panel(
            "Chunks",
            "What became of chunks. evicted about as many as stored: the tier is full, and that "
            "is its normal state. dropped: not stored, since a copy or the disk was too slow, or "
            "the block was needed. failed: see the failures.",
            "ops",
            (Query(rate("tiered_kv_chunks_total", "event, tier"), "{{tier}} {{event}}"),),
        ),
        Panel(
            "Throughput",
            "Bytes a second over all ranks: cpu, between device and host memory; disk, between "
            "host memory and files. Near what the hardware can do it is the limit; what it can "
            "do, 'vllm-tiered-kv plan --measure' says.",
            "Bps",
            (Query(rate("tiered_kv_bytes_total", "tier, direction"), "{{tier}} {{direction}}"),),
            width=12,
        ),
        Panel(
            "Speed of one copy",
            "Bytes by the seconds that moving them took. Copies overlap, so it is the speed that "
            "one request sees and not the tier's. It falls while the throughput stays: copies "
            "stand in each other's way. Both fall: the device is slow, or something else uses it.",
            "Bps",
            (
                Query(
                    ratio(
                        rate("tiered_kv_bytes_total", "tier, direction"),
                        rate("tiered_kv_seconds_total", "tier, direction"),
                    ),
                    "{{tier}} {{direction}}",
                ),
            ),
            width=12,
        ),
    ),
)

QUEUES = Row(
    "Queues",
    (
        Panel(
            "Jobs in flight",
            "store and load are copies from and to the device, write and read those of files. "
            "write that stays high: the disk is slower than the stores, and chunks will be "
            "dropped. read that stays high: hits wait. As of the last engine step: an idle engine "
            "shows old values.",
            "none",
            (Query(total("tiered_kv_jobs_in_flight", "direction"), "{{direction}}"),),
        ),
        Panel(
            "Requests",
            "Running, and waiting by vLLM's reason. deferred: asked to come back, as for files, "
            "for a load, or for a chunk that is being stored. Many deferred and few running: the "
            "tiers hold requests up.",
            "none",
            (
                Query(total("num_requests_running"), "running"),
                Query(total("num_requests_waiting_by_reason", "reason"), "waiting: {{reason}}"),
            ),
        ),
        Panel(
            "Loads by stage",
            "Requests by the stage of their load, as vLLM counts. in_progress is bounded by the "
            "connector (64 at once, and by the room on the device). completed_waiting that stays "
            "high: what was loaded holds device blocks and does not run.",
            "none",
            (Query(total("num_requests_kv_fetch_by_stage", "stage"), "{{stage}}"),),
        ),
    ),
)

TROUBLE = Row(
    "Trouble",
    (
        Panel(
            "Failures by kind",
            "What went wrong, in the time of a point. Each is a miss or a store less, never a "
            "failed request (with kv_load_failure_policy=recompute). docs/metrics.md lists the "
            "kinds, the log has the first of each. internal is our mistake: please report it.",
            "none",
            (Query(gain("tiered_kv_failures_total", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Stores that were lost",
            "Share of chunks that were to be kept in a tier and are not. cpu: copies fail, the "
            "tier got no memory, or the device is so full that blocks are handed out at once. "
            "disk: it is slower than the stores, or left alone.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate("tiered_kv_chunks_total", "tier", 'event=~"dropped|failed"'),
                        rate("tiered_kv_chunks_total", "tier", 'event=~"stored|dropped|failed"'),
                    ),
                    "{{tier}}",
                ),
            ),
            most=1,
        ),
        Panel(
            "Left alone",
            "1 while an engine leaves a tier alone: it pauses for a second after some failures, "
            "and for up to a minute if they go on. A reset of vLLM's cache with the connector "
            "closes the disk tier until the engine restarts, unless trust_after_reset is set.",
            "none",
            (
                Query(
                    total("tiered_kv_degraded", f"{ENGINE}, tier"),
                    "{{tier}}, {{instance}} {{engine}}",
                ),
            ),
            most=1,
        ),
    ),
)
