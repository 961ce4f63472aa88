# SPDX-License-Identifier: Apache-2.0
"""What the dashboard shows of requests, and what a reader should conclude."""

from __future__ import annotations

from tools.dashboard.grafana import Panel, Query, Row, Style
from tools.dashboard.promql import quantile, rate, ratio, total

PROMPT = rate("prompt_tokens_total")
TTFT = "tiered_kv_time_to_first_token_seconds"
HIT = 'source!~"none|device|failed"'


def _seconds(what: str, kind: str) -> str:
    return rate("tiered_kv_gate_seconds_total", where=f'what="{what}",kind="{kind}"')


def _by_source(q: float) -> tuple[Query, ...]:
    return (Query(quantile(q, TTFT, "source"), "{{source}}"),)


OVERVIEW = Row(
    "At a glance",
    (
        Panel(
            "Prompt tokens not computed",
            "Share of all prompt tokens that came from the device's cache or from a tier. The "
            "more, the less the accelerator works for a prompt. Low from the start: prompts do "
            "not repeat, or not within a chunk. Low after a restart: the CPU tier is filling "
            "again.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate(
                            "prompt_tokens_by_source_total",
                            where='source=~"local_cache_hit|external_kv_transfer"',
                        ),
                        PROMPT,
                    )
                ),
            ),
            Style.NUMBER,
            most=1,
            width=4,
            height=5,
        ),
        Panel(
            "Prompt tokens from our tiers",
            "The part of it that the CPU and disk tiers gave, counted when it had arrived. This "
            "is what the tiers are there for; nothing here means that the device's own cache is "
            "enough, or that the tiers are too small, too slow or in trouble: see the rows below.",
            "percentunit",
            (Query(ratio(rate("tiered_kv_hit_tokens_total"), PROMPT)),),
            Style.NUMBER,
            most=1,
            width=4,
            height=5,
        ),
        Panel(
            "First token after a load, median",
            "Time to the first token of requests whose prompt was loaded, in part at least. "
            "Compare it with the next number only beside the prompts' lengths: what is loaded is "
            "longer.",
            "s",
            (Query(quantile(0.5, TTFT, where=HIT)),),
            Style.NUMBER,
            width=4,
            height=5,
        ),
        Panel(
            "First token without one, median",
            "The same of requests of which nothing was found anywhere: what all would wait for at "
            "these lengths without any cache.",
            "s",
            (Query(quantile(0.5, TTFT, where='source="none"')),),
            Style.NUMBER,
            width=4,
            height=5,
        ),
        Panel(
            "Loads by the prefills they replaced",
            "Seconds that loads took, by the seconds that computing the same tokens was predicted "
            "to take. Below 1 loads pay: 0.1 is ten times as fast. Above 1 they do not, and the "
            "gate should refuse them within some requests unless it is set to always.",
            "none",
            (Query(ratio(_seconds("load", "actual"), _seconds("replaced", "predicted"))),),
            Style.NUMBER,
            steps=((0.7, "yellow"), (1.0, "red")),
            width=4,
            height=5,
        ),
        Panel(
            "Tiers left alone",
            "How many engines leave a tier alone now because of trouble, or since a reset has "
            "closed it. Not 0: the log line 'the disk tier is degraded' and the failures below "
            "say why. Requests are served all the same.",
            "none",
            (Query(f"{total('tiered_kv_degraded')} or vector(0)"),),
            Style.NUMBER,
            steps=((1, "red"),),
            width=4,
            height=5,
        ),
    ),
)

HITS = Row(
    "Hits",
    (
        Panel(
            "Hit rate by tier",
            "Share of prompt tokens by where they came from; what is missing to 100% was "
            "computed. device is vLLM's own cache, counted when a request is admitted. A tier's "
            "share that falls while the traffic stays: the tier was emptied, is too small, or is "
            "in trouble.",
            "percentunit",
            (
                Query(
                    ratio(
                        rate("prompt_tokens_cached_by_source_total", where='source="device"'),
                        PROMPT,
                    ),
                    "device",
                ),
                Query(
                    ratio(rate("tiered_kv_hit_tokens_total", "tier"), PROMPT, "tier"), "{{tier}}"
                ),
            ),
            Style.STACKED,
            most=1,
        ),
        Panel(
            "Look-ups by result",
            "What requests were answered. refused: stored, and slower to load than to compute. "
            "skipped: the request did not want it, or its load had failed. wait is counted "
            "besides the others: the answer took several engine steps, for files or for somebody "
            "else's load.",
            "reqps",
            (Query(rate("tiered_kv_lookups_total", "result"), "{{result}}"),),
        ),
        Panel(
            "Requests by source",
            "By the furthest place that a part of the prompt came from. failed: a load did not "
            "arrive and its tokens were computed; there should be none.",
            "reqps",
            (Query(rate(f"{TTFT}_count", "source"), "{{source}}"),),
            Style.STACKED,
        ),
    ),
)

FIRST_TOKENS = Row(
    "Time to the first token",
    (
        Panel(
            "Median by source",
            "From a request's arrival at the scheduler to its first token, the wait in the queue "
            "included. cpu and disk below none: hits help, and by more than it looks, since their "
            "prompts are longer. cpu or disk above none: see the lengths first, then the gate's "
            "row.",
            "s",
            _by_source(0.5),
            width=12,
        ),
        Panel(
            "95th percentile by source",
            "The same for the slowest twentieth. disk far above its median: reads queue up, or "
            "the disk stalls; compare with the jobs in flight.",
            "s",
            _by_source(0.95),
            width=12,
        ),
        Panel(
            "Prompt length by source",
            "Mean tokens of the prompts in the two panels to the left. Times of two sources "
            "compare only where these are alike.",
            "none",
            (
                Query(
                    ratio(
                        rate("tiered_kv_prompt_tokens_total", "source"),
                        rate(f"{TTFT}_count", "source"),
                    ),
                    "{{source}}",
                ),
            ),
            width=12,
        ),
        Panel(
            "What clients wait for",
            "vLLM's own time to first token over all requests, with the front end's share, and "
            "the part of it that requests wait in the queue. Where the queue is most of it, more "
            "hits help twice: each also makes room for others.",
            "s",
            (
                Query(quantile(0.5, "time_to_first_token_seconds"), "median"),
                Query(quantile(0.95, "time_to_first_token_seconds"), "95%"),
                Query(quantile(0.95, "request_queue_time_seconds"), "95% in the queue"),
            ),
            width=12,
        ),
    ),
)

GATE = Row(
    "The gate",
    (
        Panel(
            "Decisions",
            "What was done with prefixes that could be loaded, and why. none (predicted): "
            "computing is faster. learning: too little has been measured yet. exploring: loaded "
            "to see whether a refused tier is fast again. forced: the option or the request says "
            "always.",
            "reqps",
            (
                Query(
                    rate("tiered_kv_gate_decisions_total", "choice, reason"),
                    "{{choice}} ({{reason}})",
                ),
            ),
            Style.STACKED,
        ),
        Panel(
            "Loads and what they replaced",
            "Seconds a second. What lies between the prefills replaced and the loads is time that "
            "requests did not wait, and all of the prefills is accelerator time for others. Loads "
            "far from their prediction: the tier has changed, or is shared with something.",
            "s",
            (
                Query(_seconds("load", "actual"), "loads"),
                Query(_seconds("load", "predicted"), "loads, predicted"),
                Query(_seconds("replaced", "predicted"), "prefills replaced, predicted"),
            ),
        ),
        Panel(
            "Prefills chosen instead of a load",
            "Seconds a second until the first token of requests that computed what was stored. "
            "The two lines should lie together; if they do not, the gate knows prefills badly, as "
            "while the load on the engine changes.",
            "s",
            (
                Query(_seconds("recompute", "actual"), "taken"),
                Query(_seconds("recompute", "predicted"), "predicted"),
            ),
        ),
        Panel(
            "Regret",
            "Seconds a second that choices cost beyond what the other way was predicted to take. "
            "Some is noise. all that grows: loads turned out slow. none that grows: a refused "
            "tier is fast again, and will be used again soon.",
            "s",
            (Query(rate("tiered_kv_gate_regret_seconds_total", "choice"), "{{choice}}"),),
            width=12,
        ),
        Panel(
            "Probes, and waits given up",
            "Background reads that see whether a refused tier is fast again, and waits for files "
            "that were ended since computing had become faster. Many given up: the disk stalls.",
            "ops",
            (
                Query(rate("tiered_kv_gate_probes_total", "tier"), "probes of {{tier}}"),
                Query(rate("tiered_kv_gate_given_up_total", "tier"), "given up on {{tier}}"),
            ),
            width=12,
        ),
    ),
)
