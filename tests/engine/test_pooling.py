# SPDX-License-Identifier: Apache-2.0
"""Embeddings as output: served where a prompt may go on from a prefix, refused elsewhere."""

from __future__ import annotations

import pytest

from tests.engine._server import BLOCK_TOKENS, Pool, prompt
from tests.engine.test_cpu_tier import CPU, hit_tokens
from tools.serving import Client, ServerFailed

pytestmark = pytest.mark.slow


def embed(client: Client, tokens: list[int], salt: str | None = None) -> list[float]:
    body = {"model": client.models()[0], "input": tokens, "encoding_format": "float"}
    if salt is not None:
        body["cache_salt"] = salt
    response = client._http.post("/v1/embeddings", json=body)
    response.raise_for_status()
    return list(response.json()["data"][0]["embedding"])


def test_the_last_tokens_embedding(servers: Pool) -> None:
    client = servers.get(extra_config=CPU, args=["--runner=pooling", "--convert=embed"])
    tokens = prompt("pooled", 600)
    want = embed(client, tokens, salt="fresh")
    assert embed(client, prompt("another", 600)) != pytest.approx(want, abs=1e-2)
    assert embed(client, tokens) == pytest.approx(want, abs=1e-4)
    embed(client, [9, 8, 9])  # nothing wakes an idle engine: it learns of stores with a request
    assert client.reset_prefix_cache()
    before = hit_tokens(client.metrics())
    assert embed(client, tokens) == pytest.approx(want, abs=1e-4)
    assert hit_tokens(client.metrics()) - before == 600 // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_mean_over_the_prompt_is_refused(servers: Pool) -> None:
    args = ["--runner=pooling", "--convert=embed", '--pooler-config={"seq_pooling_type":"MEAN"}']
    with pytest.raises(ServerFailed, match="needs the whole prompt in one pass"):
        servers.get(extra_config=CPU, args=args)
