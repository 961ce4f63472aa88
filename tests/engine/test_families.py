# SPDX-License-Identifier: Apache-2.0
"""Model families on real engines: a hit in the CPU tier is worth what one on the device is.

The standard is vLLM's own prefix cache: as many tokens, and the same log-probabilities. (A cold
run is not, for every family: with latent attention the kernels that go on from a prefix round
otherwise than those that start from nothing, by up to 1.7 in these models.)
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine._server import Pool, assert_same_output, flushed, prompt, stored

CPU = {"cpu": {"capacity": "256MiB"}}

FAMILIES: dict[str, dict[str, Any]] = {
    # One latent vector a token.
    "deepseek-mla": {"variant": "deepseek-mla-tiny", "dtype": "bfloat16"},
    # States of linear attention beside full attention.
    "qwen3-next": {"variant": "qwen3-next-tiny", "dtype": "bfloat16"},
    # Layers that share the KV of others, two kinds of attention.
    "gemma3n": {"variant": "gemma3n-tiny"},
    "phi3": {"variant": "phi3-tiny"},
    "fp8 cache": {
        "variant": "llama-tiny",
        "dtype": "bfloat16",
        "args": ["--kv-cache-dtype=fp8"],
    },
    "blocks of 32": {"variant": "llama-tiny", "args": ["--block-size=32"]},
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_hit_equals_one_in_the_device_cache(servers: Pool, family: dict[str, Any]) -> None:
    client = servers.get(extra_config=CPU, **family)
    for length in (640, 1001, 1600):
        tokens = prompt(f"family {length}", length)
        first = client.complete(tokens)
        assert first.cached_tokens == 0
        stored(client)
        on_device = client.complete(tokens)
        assert on_device.cached_tokens > 0
        assert flushed(client)
        again = client.complete(tokens)
        assert again.cached_tokens == on_device.cached_tokens
        assert_same_output(on_device, again)
    arrived = client.metrics().value("vllm:tiered_kv_hit_tokens_total", tier="cpu")
    assert arrived > 2000
    for kind in ("internal", "load_failed", "load_dropped", "store"):
        assert client.metrics().value("vllm:tiered_kv_failures_total", kind=kind) == 0


def test_states_of_a_conversation_come_back(servers: Pool) -> None:
    """Each turn ends elsewhere, and states are left at other boundaries."""
    client = servers.get(extra_config=CPU, **FAMILIES["qwen3-next"])
    history = prompt("states", 900)
    hits = []
    for turn in range(4):
        stored(client)
        on_device = client.complete(history, max_tokens=200)
        assert flushed(client)
        again = client.complete(history, max_tokens=200)
        assert again.cached_tokens >= on_device.cached_tokens
        hits.append(again.cached_tokens)
        if again.cached_tokens == on_device.cached_tokens:
            assert_same_output(on_device, again)
        history = [*history, *again.token_ids, *prompt(f"states {turn}", 150)]
    assert hits == sorted(hits)
    assert hits[-1] >= 1152
