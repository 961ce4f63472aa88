# SPDX-License-Identifier: Apache-2.0
"""What servers count of prompt tokens and of where their KV came from.

vLLM's names: ``vllm/v1/metrics/loggers.py`` (0.32). Ours: ``vllm_tiered_kv/metrics.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

PROMPT_TOKENS = "prompt tokens"
BY_SOURCE = "vLLM's source"
MAX_RESPONSE = 1 << 26
_TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class Source(msgspec.Struct, frozen=True):
    """A counter of tokens that were not computed."""

    tier: str
    metric: str
    label: str = ""
    """Whose values stand for tiers of their own."""


SOURCES = (
    Source("device", "vllm:prefix_cache_hits_total"),
    Source("connector", "vllm:external_prefix_cache_hits_total"),
    Source(BY_SOURCE, "vllm:prompt_tokens_cached_by_source_total", "source"),
    Source("tiered-kv", "vllm:tiered_kv_hit_tokens_total", "tier"),
)
_PROMPTS = "vllm:prompt_tokens_total"

Counters = Mapping[str, float]
"""Tokens by name: :data:`PROMPT_TOKENS`, and the tiers that the server reports."""


def counters(text: str) -> dict[str, float]:
    """What one scrape says; a name is missing where the server has no such metric.

    Raises:
        ValueError: it is not Prometheus' text format.
    """
    found: dict[str, float] = {}
    names = {source.metric: source for source in SOURCES}
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name == _PROMPTS:
                tier = PROMPT_TOKENS
            elif name in names:
                source = names[name]
                tier = source.tier
                if source.label:
                    tier = f"{tier}: {labels.get(source.label, '')}"
            else:
                continue
            found[tier] = found.get(tier, 0.0) + value
    return found


def together(scrapes: Iterable[Counters]) -> dict[str, float]:
    """The sums of several servers."""
    found: dict[str, float] = {}
    for each in scrapes:
        for name, value in each.items():
            found[name] = found.get(name, 0.0) + value
    return found


def increase(before: Counters, after: Counters) -> dict[str, float]:
    """What was counted between; without counters that went backwards, as after a restart."""
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if value >= before.get(name, 0.0)
    }


async def scrape(session: aiohttp.ClientSession, urls: Sequence[str]) -> dict[str, float] | None:
    """The sums over these URLs; None where one of them does not answer."""
    found = await asyncio.gather(*(_scrape_one(session, url) for url in urls))
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        return None
    return together(known)


async def read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """The whole of a response.

    Raises:
        aiohttp.ClientPayloadError: it has no end within :data:`MAX_RESPONSE` bytes.
    """
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_RESPONSE:
            raise aiohttp.ClientPayloadError(f"more than {MAX_RESPONSE} bytes")
    return bytes(content)


async def _scrape_one(session: aiohttp.ClientSession, url: str) -> dict[str, float] | None:
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            if response.status != 200:
                return None
            return counters((await read_bounded(response)).decode())
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError):
        return None
