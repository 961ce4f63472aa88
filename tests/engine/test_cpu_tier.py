# SPDX-License-Identifier: Apache-2.0
"""The CPU tier on real engines: what comes back equals what a cold run computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine._server import (
    BLOCK_TOKENS,
    Pool,
    assert_same_output,
    flushed,
    prompt,
)
from tools.serving import Client, Completion, Metrics, RequestFailed

CPU = {"cpu": {"capacity": "512MiB"}}
_salts = itertools.count()


def cold(client: Client, tokens: list[int], **options: Any) -> Completion:
    """The same request where nothing can be found."""
    return client.complete(tokens, cache_salt=f"cold {next(_salts)}", **options)


def counter(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.value(f"vllm:tiered_kv_{name}", **labels)


def hit_tokens(metrics: Metrics) -> float:
    return counter(metrics, "hit_tokens_total", tier="cpu")


def arrived(client: Client, act: Callable[[], Completion]) -> tuple[Completion, float]:
    """Runs ``act``; also returns the tokens that came from the CPU tier for it."""
    before = hit_tokens(client.metrics())
    done = act()
    return done, hit_tokens(client.metrics()) - before


@pytest.fixture
def client(servers: Pool) -> Client:
    return servers.get(extra_config=CPU)


def test_a_prompt_comes_back_after_it_left_the_device(client: Client) -> None:
    tokens = prompt("back", 1000)
    want = cold(client, tokens)
    first = client.complete(tokens)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 1000 // BLOCK_TOKENS * BLOCK_TOKENS
    assert again.cached_tokens == from_cpu
    assert_same_output(want, first)
    assert_same_output(want, again)


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 511, 512, 513])
def test_lengths_around_a_block(client: Client, length: int) -> None:
    tokens = prompt(f"length {length}", length)
    want = cold(client, tokens, max_tokens=4)
    client.complete(tokens, max_tokens=4)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens, max_tokens=4))
    assert from_cpu == length // BLOCK_TOKENS * BLOCK_TOKENS
    assert_same_output(want, again)


def test_one_generated_token(client: Client) -> None:
    tokens = prompt("one", 700)
    want = cold(client, tokens, max_tokens=1)
    client.complete(tokens, max_tokens=1)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens, max_tokens=1))
    assert from_cpu == 640
    assert_same_output(want, again)


def test_a_conversation_finds_its_own_answers(client: Client) -> None:
    history = prompt("turn 0", 150)
    for turn in range(4):
        want = cold(client, history, max_tokens=140)
        answer, from_cpu = arrived(client, lambda h=history: client.complete(h, max_tokens=140))
        assert_same_output(want, answer)
        if turn:
            # Everything up to the last generated token of the turn before, in whole chunks.
            assert from_cpu == (len(history) - 21) // BLOCK_TOKENS * BLOCK_TOKENS
        history = [*history, *answer.token_ids, *prompt(f"turn {turn + 1}", 20)]
        assert flushed(client)


def test_chunked_prefill(servers: Pool) -> None:
    client = servers.get(extra_config=CPU, args=["--max-num-batched-tokens=200"])
    tokens = prompt("chunked", 1500)
    want = cold(client, tokens)
    client.complete(tokens)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 1408
    assert_same_output(want, again)


def test_requests_that_share_a_prefix_at_once(client: Client) -> None:
    shared = prompt("shared", 1024)
    prompts = [[*shared, *prompt(f"own {i}", 30)] for i in range(6)]
    want = [cold(client, p, max_tokens=6) for p in prompts]
    client.complete(prompts[0])
    assert flushed(client)
    before = client.metrics()
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda p: client.complete(p, max_tokens=6), prompts))
    for w, g in zip(want, got, strict=True):
        assert_same_output(w, g)
    after = client.metrics()
    chunks = [counter(m, "chunks_total", event="loaded", tier="cpu") for m in (before, after)]
    assert chunks[1] - chunks[0] == 8  # one load for all


def test_several_samples_of_one_prompt(client: Client) -> None:
    tokens = prompt("samples", 600)
    body = {
        "prompt": tokens, "max_tokens": 4, "n": 3, "ignore_eos": True, "logprobs": 0,
        "temperature": 0.5, "top_k": 1,  # greedy, which vLLM refuses by name for n > 1
        "model": client.models()[0], "return_tokens_as_token_ids": True,
    }  # fmt: skip
    want = cold(client, tokens, max_tokens=4)
    for _ in range(2):
        response = client._http.post("/v1/completions", json=body)
        response.raise_for_status()
        for choice in response.json()["choices"]:
            ids = [int(t.removeprefix("token_id:")) for t in choice["logprobs"]["tokens"]]
            assert ids == list(want.token_ids)
        assert flushed(client)


def test_prompt_logprobs_are_those_of_a_cold_run(client: Client) -> None:
    tokens = prompt("scored", 400)
    client.complete(tokens)
    assert flushed(client)
    body = {
        "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0,
        "model": client.models()[0],
    }  # fmt: skip
    scores = []
    for salt in ("fresh", None):
        request = {**body, **({"cache_salt": salt} if salt else {})}
        response = client._http.post("/v1/completions", json=request)
        response.raise_for_status()
        rows = response.json()["choices"][0]["prompt_logprobs"][1:]
        scores.append([next(iter(row.values()))["logprob"] for row in rows])
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert flushed(client)


def test_salts_keep_requests_apart(client: Client) -> None:
    tokens = prompt("salted", 500)
    client.complete(tokens, cache_salt="a")
    assert flushed(client)
    _, other = arrived(client, lambda: client.complete(tokens, cache_salt="b"))
    assert flushed(client)
    _, same = arrived(client, lambda: client.complete(tokens, cache_salt="a"))
    assert (other, same) == (0, 384)


def test_a_request_may_keep_out(client: Client) -> None:
    tokens = prompt("private", 500)
    client.complete(tokens, kv_transfer_params={"tiered_kv": {"store": False}})
    assert flushed(client)
    _, unsaved = arrived(client, lambda: client.complete(tokens))
    assert flushed(client)
    refusing = {"tiered_kv": {"load": False}}
    _, unread = arrived(client, lambda: client.complete(tokens, kv_transfer_params=refusing))
    assert flushed(client)
    _, read = arrived(client, lambda: client.complete(tokens))
    assert (unsaved, unread, read) == (0, 0, 384)


def test_a_bad_request_parameter_is_counted_and_ignored(client: Client) -> None:
    before = counter(client.metrics(), "failures_total", kind="params")
    client.complete(prompt("bad", 50), kv_transfer_params={"tiered_kv": {"stoer": 1}})
    assert counter(client.metrics(), "failures_total", kind="params") == before + 1


def test_nothing_from_before_a_connector_reset_is_served(client: Client) -> None:
    tokens = prompt("reset", 500)
    client.complete(tokens)
    assert client.reset_prefix_cache(external=True)
    _, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 0
    assert flushed(client)
    _, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 384


def test_a_client_that_leaves_leaks_nothing(client: Client) -> None:
    tokens = prompt("leaver", 2000)
    client.complete(tokens)
    assert flushed(client)
    body = {
        "prompt": tokens, "max_tokens": 1500, "stream": True, "model": client.models()[0],
        "ignore_eos": True,
    }  # fmt: skip
    for lines in (0, 1, 5):
        with client._http.stream("POST", "/v1/completions", json=body) as response:
            for _ in zip(range(lines), response.iter_lines(), strict=False):
                pass
    client.wait_for_metrics(lambda m: m.value("vllm:num_requests_running") == 0)
    assert flushed(client)
    again, _ = arrived(client, lambda: client.complete(tokens))
    assert_same_output(cold(client, tokens), again)


def test_vllms_own_counters_agree(client: Client) -> None:
    tokens = prompt("counted", 640)
    client.complete(tokens)
    assert flushed(client)
    before = client.metrics()
    client.complete(tokens)
    after = client.metrics()

    def grew(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert grew("vllm:external_prefix_cache_hits_total") == 640
    assert grew("vllm:tiered_kv_hit_tokens_total", tier="cpu") == 640
    assert grew("vllm:tiered_kv_lookups_total", result="hit") == 1
    per_token = 3 * 2 * 2 * 64 * 4
    assert grew("vllm:tiered_kv_bytes_total", direction="load", tier="cpu") == 640 * per_token
    assert grew("vllm:tiered_kv_seconds_total", direction="load", tier="cpu") > 0
    slot = 128 * per_token
    assert after.value("vllm:tiered_kv_capacity_bytes", tier="cpu") == (512 << 20) // slot * slot
    assert after.value("vllm:tiered_kv_usage_bytes", tier="cpu") > 0
    assert after.value("vllm:tiered_kv_jobs_in_flight", direction="load") == 0


def test_a_device_too_small_for_its_requests(servers: Pool) -> None:
    """Preemption and eviction at every turn, with stores and loads under way."""
    client = servers.get(extra_config=CPU, blocks=12)
    # Three blocks each until token 384: of eleven, three requests start and not all can go on.
    prompts = [prompt(f"crowd {i}", 370) for i in range(5)]
    want = [cold(client, p, max_tokens=200) for p in prompts]
    for _ in range(2):
        with ThreadPoolExecutor(5) as pool:
            got = list(pool.map(lambda p: client.complete(p, max_tokens=200), prompts))
        for w, g in zip(want, got, strict=True):
            assert_same_output(w, g)
    assert hit_tokens(client.metrics()) > 0
    assert client.metrics().value("vllm:num_preemptions_total") > 0
    assert flushed(client)
    assert client.metrics().value("vllm:tiered_kv_failures_total", kind="internal") == 0


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_with_loads_and_stores_under_way(client: Client, mode: str) -> None:
    """vLLM pauses before weights change: it must not wait long, and nothing of before is served."""
    tokens = [prompt(f"pause {mode} {i}", 1500) for i in range(3)]
    for known in tokens[:2]:
        client.complete(known, max_tokens=1)
    assert flushed(client)
    before = client.metrics().value("vllm:tiered_kv_lookups_total")

    def ask(asked: list[int]) -> Completion | None:
        try:
            return client.complete(asked, max_tokens=300)
        except RequestFailed:
            return None  # aborted before its first token

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask, asked) for asked in tokens]
        # A count, since requests that run may all have ended when somebody looks.
        client.wait_for_metrics(lambda m: m.value("vllm:tiered_kv_lookups_total") >= before + 3)
        assert client.post("/pause", mode=mode) == {"status": "paused"}
        if mode == "wait":
            assert all(answer.result() for answer in answers)
        assert client.post("/resume")["status"] == "resumed"
    want = cold(client, tokens[0])
    after, from_cpu = arrived(client, lambda: client.complete(tokens[0]))
    assert from_cpu == 0
    assert_same_output(want, after)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens[0]))
    assert from_cpu == 1408
    assert_same_output(want, again)
    client.wait_for_metrics(lambda m: m.value("vllm:kv_cache_usage_perc") == 0)


def test_a_tier_smaller_than_one_request(servers: Pool) -> None:
    client = servers.get(extra_config={"cpu": {"capacity": "2MiB"}})  # five chunks
    tokens = prompt("small tier", 1500)
    want = cold(client, tokens, kv_transfer_params={"tiered_kv": {"store": False}})
    client.complete(tokens)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert 0 < from_cpu <= 5 * BLOCK_TOKENS
    assert_same_output(want, again)


def test_several_kv_cache_groups(servers: Pool) -> None:
    client = servers.get("gemma3-tiny", extra_config=CPU)
    for length in (255, 256, 640, 1001):
        tokens = prompt(f"gemma {length}", length)
        want = cold(client, tokens)
        client.complete(tokens)
        assert flushed(client)
        again, from_cpu = arrived(client, lambda t=tokens: client.complete(t))
        assert from_cpu > 0
        assert from_cpu >= length - 2 * BLOCK_TOKENS
        assert_same_output(want, again)


def test_a_sliding_window_alone(servers: Pool) -> None:
    client = servers.get("mistral-swa-tiny", extra_config=CPU)
    tokens = prompt("mistral", 1001)
    want = cold(client, tokens)
    client.complete(tokens)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 896
    assert_same_output(want, again)


def test_tensor_parallelism(servers: Pool) -> None:
    client = servers.get(
        extra_config=CPU,
        args=["--tensor-parallel-size=2"],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    tokens = prompt("parallel", 1000)
    want = cold(client, tokens)
    client.complete(tokens)
    assert flushed(client)
    again, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 896
    assert_same_output(want, again)
    per_token = 3 * 2 * 2 * 64 * 4  # over both ranks
    loaded = counter(client.metrics(), "bytes_total", direction="load", tier="cpu")
    assert loaded == 896 * per_token
    assert client.reset_prefix_cache(external=True)
