# SPDX-License-Identifier: Apache-2.0
"""Several engines in one server, and other connectors beside ours."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.engine._server import (
    Models,
    Pool,
    assert_same_output,
    flushed,
    prompt,
    tiered,
)
from tests.engine.test_cpu_tier import CPU, arrived, cold, counter
from tools.serving import Client, Metrics
from tools.serving.process import ENVIRONMENT

SLOT = 128 * 3 * 2 * 2 * 64 * 4


# -- data parallelism --------------------------------------------------------------


@contextlib.contextmanager
def pinned(client: Client, engine: int) -> Iterator[None]:
    """Every request goes to one of a data-parallel server's engines."""
    client._http.headers["X-data-parallel-rank"] = str(engine)
    yield
    del client._http.headers["X-data-parallel-rank"]


def hits(metrics: Metrics) -> list[float]:
    return [counter(metrics, "hit_tokens_total", tier="cpu", engine=str(e)) for e in (0, 1)]


@pytest.mark.slow
def test_data_parallelism(servers: Pool) -> None:
    """Each engine has a tier, a side channel and metrics of its own."""
    client = servers.get(
        extra_config={"cpu": {"capacity": "64MiB"}},
        args=["--data-parallel-size=2", "--api-server-count=1"],
        env={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )
    tokens = prompt("data parallel", 1000)
    want = cold(client, tokens)
    with pinned(client, 0):
        assert_same_output(want, client.complete(tokens))
        assert flushed(client)
    for engine, expected in ((1, [0, 0]), (0, [896, 0]), (1, [896, 896])):
        with pinned(client, engine):
            assert_same_output(want, client.complete(tokens))
            assert flushed(client)
        assert hits(client.metrics()) == expected
    for _ in range(4):  # wherever vLLM sends it
        assert_same_output(want, client.complete(tokens))
    metrics = client.metrics()
    for engine in ("0", "1"):
        capacity = counter(metrics, "capacity_bytes", tier="cpu", engine=engine)
        assert capacity == (64 << 20) // SLOT * SLOT  # the whole of it, in each
        assert counter(metrics, "failures_total", kind="internal", engine=engine) == 0
        with pinned(client, int(engine)):
            assert flushed(client)
    assert client.reset_prefix_cache(external=True)
    before = sum(hits(client.metrics()))
    for engine in (0, 1):
        with pinned(client, engine):
            assert_same_output(want, client.complete(tokens))
    assert sum(hits(client.metrics())) == before


# -- vLLM's MultiConnector ------------------------------------------------------------


def several(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def on_disk(folder: Path) -> dict[str, Any]:
    """A connector of vLLM's; it tells prompts apart by their tokens alone."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def empty(folder: Path) -> bool:
    """Remove what the other connector has kept; whether there was anything."""
    found = list(folder.iterdir())
    for path in found:
        shutil.rmtree(path)
    return bool(found)


@pytest.mark.parametrize(
    "ours_first", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["first", "second"]
)
def test_beside_another_connector(servers: Pool, tmp_path: Path, ours_first: bool) -> None:
    both = [tiered(CPU), on_disk(tmp_path)]
    if not ours_first:
        both.reverse()
    with servers.private(kv_transfer_config=several(*both)) as running:
        client = running.client
        tokens = prompt("beside", 1000)
        want = cold(client, tokens)
        assert empty(tmp_path)
        assert_same_output(want, client.complete(tokens))
        assert flushed(client)
        again, from_cpu = arrived(client, lambda: client.complete(tokens))
        assert_same_output(want, again)
        assert again.cached_tokens == 896
        assert from_cpu == (896 if ours_first else 0)  # the first child with a hit is asked

        # Alone, each of them brings it back.
        assert client.reset_prefix_cache(external=True)
        other, from_cpu = arrived(client, lambda: client.complete(tokens))
        assert_same_output(want, other)
        assert (other.cached_tokens, from_cpu) == (896, 0)
        assert empty(tmp_path)
        assert flushed(client)
        ours, from_cpu = arrived(client, lambda: client.complete(tokens))
        assert_same_output(want, ours)
        assert (ours.cached_tokens, from_cpu) == (896, 896)

        metrics = client.metrics()
        assert counter(metrics, "capacity_bytes", tier="cpu") > 0
        assert counter(metrics, "chunks_total", event="stored", tier="cpu") > 0
        assert metrics.value("vllm:external_prefix_cache_hits_total") == 3 * 896
        for kind in ("internal", "foreign", "report", "load_plan"):
            assert counter(metrics, "failures_total", kind=kind) == 0


def test_one_process_for_all(models: Models) -> None:
    """The ``uni`` executor: engine and worker share an interpreter, its lock and its exit."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine._one_process", str(models.path("llama-tiny"))],
        env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["executor"] == "UniProcExecutor"
    assert [result[when]["cached"] for when in ("cold", "first", "again")] == [0, 0, 640]
    want, *answers = (SimpleNamespace(**result[when]) for when in ("cold", "first", "again"))
    for answer in answers:
        assert_same_output(want, answer)
