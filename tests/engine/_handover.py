# SPDX-License-Identifier: Apache-2.0
"""Engines that hand KV over to each other, and what a router between them does."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.engine._hold import Held
from tests.engine._server import Running, assert_same_output, prompt
from tools.serving import Client, Completion

TO_PRODUCER = {"do_remote_decode": True, "do_remote_prefill": False}
LEASE = 5.0
IN_FLIGHT = "vllm:tiered_kv_jobs_in_flight"
_seeds = itertools.count()


def config(role: str, key: Path, *, engine_id: str | None = None, **remote: Any) -> dict[str, Any]:
    """``--kv-transfer-config`` of an engine that hands over or goes on."""
    listen = {"listen": "127.0.0.1:0", "key_file": str(key), "lease": LEASE, "deadline": 5.0}
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "gate": "always",
            "cpu": {"capacity": "64MiB"},
            "remote": {**listen, **remote},
        },
        **({"engine_id": engine_id} if engine_id is not None else {}),
    }


def held_config(role: str, key: Path, **remote: Any) -> dict[str, Any]:
    """The same with the connector of :mod:`tests.engine._held`."""
    return {
        **config(role, key, **remote),
        "kv_connector": "HeldKVConnector",
        "kv_connector_module_path": "tests.engine._held",
    }


class Pair:
    """A producer, a consumer, and what a router between them does."""

    def __init__(self, producer: Running, consumer: Running, held: Held) -> None:
        self.producer = producer
        self.consumer = consumer
        self.held = held
        """What stops the consumer's reads."""

    def prefill(self, tokens: list[int], **body: Any) -> dict[str, Any]:
        """What the producer answers, as a router passes it on."""
        return prefill(self.producer.client, tokens, **body)

    def pulled(self) -> float:
        return pulled(self.consumer.client)

    def failures(self) -> Counter[str]:
        return failures(self.consumer.client)


TRIES = 5
LATE = {"remote_unanswered", "remote_quiet", "remote_deadline", "remote_lease"}


def prefill(
    client: Client, tokens: list[int], *, headers: dict[str, str] | None = None, **body: Any
) -> dict[str, Any]:
    """What a producer answers, as a router passes it on.

    Raises:
        KeyError: it hands nothing over.
    """
    request = {
        "prompt": tokens,
        "max_tokens": 1,
        "temperature": 0.0,
        "kv_transfer_params": TO_PRODUCER,
        **body,
    }
    answer = httpx.post(
        f"{client.url}/v1/completions", json=request, headers=headers, timeout=60, trust_env=False
    )
    answer.raise_for_status()
    params: dict[str, Any] = answer.json()["kv_transfer_params"]
    if not params["do_remote_prefill"]:
        raise KeyError("kv_transfer_params")
    return params


def decode(
    client: Client, tokens: list[int], params: Any, count: int = 8, **body: Any
) -> Completion:
    """What a consumer says that goes on from a hand-over."""
    return client.complete(tokens, max_tokens=count, kv_transfer_params=params, **body)


def alone(client: Client, tokens: list[int], count: int = 8, **body: Any) -> Completion:
    """What an engine says that computes it all."""
    salt = f"alone {next(_seeds)}"
    return client.complete(tokens, max_tokens=count, cache_salt=salt, **body)


def fresh(tokens: int) -> list[int]:
    """A prompt that nobody has seen."""
    return prompt(f"handed over {next(_seeds)}", tokens)


def handed_over(
    producer: Client, consumer: Client, count: int, *, computed: int = 0, **body: Any
) -> list[int]:
    """All of a prompt is pulled, and the answer is the one of an engine that computes it.

    Engines that share two processors may keep each other from answering in time. Then the prompt
    is computed, which is right as well, and another one is tried.

    Args:
        count: tokens of the prompt.
        computed: those at its end that are never pulled.
        body: of all requests.

    Returns:
        The prompt.
    """
    for _ in range(TRIES):
        tokens, before, failed = fresh(count), pulled(consumer), failures(consumer)
        got = decode(consumer, tokens, prefill(producer, tokens, **body), **body)
        assert_same_output(alone(producer, tokens, **body), got)
        if pulled(consumer) - before == count - computed:
            return tokens
        late = failures(consumer) - failed
        assert late.keys() <= LATE, late
        time.sleep(2)  # until the producer is asked again
    raise AssertionError("no prompt was pulled")


def ready(client: Client) -> None:
    """Wait until an engine hands over, or can go on; ranks come with a first step."""
    client.complete([9, 8, 9], max_tokens=1)


def ready_to_hand_over(client: Client, **options: Any) -> None:
    ready(client)

    def is_ready() -> bool:
        try:
            prefill(client, fresh(5), **options)
        except (httpx.HTTPError, KeyError):
            return False
        return True

    wait(is_ready, "the producer is not ready")


def goes_on(producer: Client, consumer: Client) -> None:
    """Wait until the consumer pulls from this producer again; answers are right meanwhile."""

    def has_pulled() -> bool:
        tokens = fresh(260)
        before = pulled(consumer)
        got = decode(consumer, tokens, prefill(producer, tokens), 4)
        assert_same_output(alone(consumer, tokens, 4), got)
        return pulled(consumer) > before

    wait(has_pulled, "nothing is pulled any more")


# -- what is counted -------------------------------------------------------------------------


def pulled(client: Client) -> float:
    """Tokens that came from producers."""
    return client.metrics().value("vllm:tiered_kv_hit_tokens_total", tier="peer")


def failures(client: Client) -> Counter[str]:
    """Failures by kind; subtract an earlier one to see what came since."""
    found: Counter[str] = Counter()
    for sample in client.metrics():
        if sample.name == "vllm:tiered_kv_failures_total" and sample.value:
            found[sample.labels["kind"]] += int(sample.value)
    return found


def in_flight(client: Client, what: str) -> float:
    """Jobs now; nothing moves an idle engine's figures but requests."""
    client.complete([9, 8, 9], max_tokens=1)
    return client.metrics().value(IN_FLIGHT, direction=what)


def settled(*clients: Client) -> None:
    """Wait until no lease, pull, quarantine or request holds a block any more."""

    def is_settled(client: Client) -> bool:
        client.complete([9, 8, 9], max_tokens=1)
        metrics = client.metrics()
        jobs = sum(
            metrics.value(IN_FLIGHT, direction=what) for what in ("lease", "load", "quarantine")
        )
        return not jobs and not metrics.value("vllm:kv_cache_usage_perc")

    for client in clients:
        wait(lambda client=client: is_settled(client), f"blocks are held at {client.url}")
        assert client.reset_prefix_cache()


def wait(done: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


# -- what happens to requests and engines ----------------------------------------------------


@contextlib.contextmanager
def begun(
    client: Client, tokens: list[int], params: Any, **body: Any
) -> Iterator[http.client.HTTPConnection]:
    """A request on its way; whoever leaves ends the connection, and so aborts it."""
    url = urlsplit(client.url)
    request = {
        "prompt": tokens,
        "max_tokens": 16,
        "stream": True,
        "ignore_eos": True,
        "kv_transfer_params": params,
        **body,
    }
    connection = http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(request), headers)
    try:
        yield connection
    finally:
        connection.close()


def kill(running: Running) -> None:
    """End all processes of an engine at once; returns when they are gone."""
    processes = psutil.Process(running.server.pid).children(recursive=True)
    os.killpg(running.server.pid, signal.SIGKILL)
    psutil.wait_procs(processes, timeout=10)
