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
from tools.serving import Client, Completion

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

SLOW = {"gemma3n", "phi3", "blocks of 32"}
"""Each costs a server of its own; what they add is also tested from specs and layouts."""


def on_device(client: Client, tokens: list[int], **options: Any) -> Completion:
    """An answer whose prompt was found in the device's cache.

    vLLM leaves a recurrent state at a boundary once it has seen that requests share it: the
    third time at the latest.
    """
    assert client.complete(tokens, **options).cached_tokens < len(tokens)
    for _ in range(2):
        stored(client)
        found = client.complete(tokens, **options)
        if found.cached_tokens >= len(tokens) - 384:
            break
    assert found.cached_tokens > 0
    return found


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, family in FAMILIES.items()
    ],
)
def test_a_hit_equals_one_in_the_device_cache(servers: Pool, family: dict[str, Any]) -> None:
    client = servers.get(extra_config=CPU, **family)
    for length in (640, 1001, 1600):
        tokens = prompt(f"family {length}", length)
        found = on_device(client, tokens)
        assert flushed(client)
        again = client.complete(tokens)
        # In whole chunks, of 128 tokens or more.
        assert again.cached_tokens == found.cached_tokens // 128 * 128
        assert_same_output(found, again)
    metrics = client.metrics()
    assert metrics.value("vllm:tiered_kv_hit_tokens_total", tier="cpu") >= 384 + 768 + 1536
    assert metrics.value("vllm:tiered_kv_failures_total") == 0


def test_states_of_a_conversation_come_back(servers: Pool) -> None:
    """Each turn ends elsewhere, and states are left at other boundaries."""
    client = servers.get(extra_config=CPU, **FAMILIES["qwen3-next"])
    history = prompt("states", 900)
    for turn in range(3):
        found = on_device(client, history, max_tokens=90)
        assert flushed(client)
        again = client.complete(history, max_tokens=90)
        assert again.cached_tokens == found.cached_tokens
        assert_same_output(found, again)
        history = [*history, *again.token_ids, *prompt(f"states {turn}", 250)]
    assert again.cached_tokens >= 1152
