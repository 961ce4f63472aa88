# SPDX-License-Identifier: Apache-2.0
"""The disk tier of real engines: restarts, kills, damaged files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests import _dashboards as dashboards
from tests.engine._server import Pool, Running, assert_same_output, prompt
from tests.soak._footprint import processes
from tools.serving import Client, Completion, RequestFailed
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.scan import Found, scan_root
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus

CAPACITY = 64 << 20
SLOT = 384 << 10
"""Of ``llama-tiny``: a chunk of 128 tokens in float32, on one rank."""


def options(root: Path, cpu: str | None = "256MiB") -> dict[str, Any]:
    tiers: dict[str, Any] = {"disk": {"path": str(root), "capacity": CAPACITY, "min_free": 1}}
    return tiers | ({"cpu": {"capacity": cpu}} if cpu else {})


def wait_for_files(root: Path, count: int, timeout_s: float = 60.0) -> None:
    """Wait, without a request, until so many chunks are on disk."""
    deadline = time.monotonic() + timeout_s
    while (there := len(list(root.rglob("*.kv")))) < count:
        assert time.monotonic() < deadline, f"{there} files of {count}"
        time.sleep(0.05)


def of_disk(client: Client, name: str, **labels: str) -> float:
    return client.metrics().value(f"vllm:tiered_kv_{name}", **labels)


def cold(client: Client, tokens: list[int], **kw: Any) -> Completion:
    """Computed from nothing, and kept nowhere."""
    params = {"tiered_kv": {"load": False, "store": False}}
    return client.complete(tokens, cache_salt="cold", kv_transfer_params=params, **kw)


def verify(root: Path) -> int:
    """Every file is whole; how many there are."""
    files = [item for item in scan_root(Files(), root) if isinstance(item, Found)]
    into = memoryview(bytearray(SLOT))
    for file in files:
        folder = RankFolder(root, file.namespace, file.rank, files=Files(), mode=IoMode.BUFFERED)
        assert folder.read(file.key, file.group, into, SLOT).status is ReadStatus.OK
        folder.close()
    return len(files)


def kill(running: Running) -> None:
    """SIGKILL to all of a server's processes at once."""
    for process in processes(running.server.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)


def damage(file: Path) -> None:
    """Change one bit of the payload."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_killed_while_it_writes_and_then_a_hit(servers: Pool, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    kept, lost = prompt("kept", 1000), prompt("lost", 1000)
    with servers.private(extra_config=options(root)) as running:
        client = running.client
        want = [cold(client, kept, max_tokens=8), cold(client, lost, max_tokens=8)]
        for tokens in (kept, lost):
            client.complete(tokens, max_tokens=8)
        wait_for_files(root, 14)
        busy = threading.Thread(target=keep_busy, args=(client,))
        busy.start()
        wait_for_files(root, 30)
        kill(running)
        busy.join(60)
        assert not busy.is_alive()
    assert verify(root) >= 30
    assert sum(file.stat().st_size for file in root.rglob("*") if file.is_file()) <= CAPACITY

    with servers.private(extra_config=options(root)) as running:
        client = running.client
        wait_for_scan(running)
        warm = client.complete(kept, max_tokens=8)
        assert_same_output(want[0], warm)
        assert warm.cached_tokens == 896
        assert of_disk(client, "hit_tokens_total", tier="disk") == 896
        assert of_disk(client, "hit_tokens_total", tier="cpu") == 0
        client.reset_prefix_cache()
        assert client.complete(kept, max_tokens=8).cached_tokens == 896
        assert of_disk(client, "hit_tokens_total", tier="cpu") == 896  # it stayed there

        for file in root.rglob("*.kv"):
            damage(file)
        assert_same_output(want[1], client.complete(lost, max_tokens=8))
        assert of_disk(client, "failures_total", kind="disk_damaged") > 0
        assert of_disk(client, "failures_total", kind="internal") == 0
        assert of_disk(client, "degraded", tier="disk") == 0
        check_dashboards(client, tmp_path)


def check_dashboards(client: Client, folder: Path) -> None:
    """A server with both tiers has all that the dashboard and the alerts ask for."""
    metrics = client.metrics()
    assert dashboards.missing(dashboards.all_queries(), metrics) == []
    made_up = "sum by (tier) (vllm:tiered_kv_made_up + vllm:prompt_tokens_total)"
    lacks = ["vllm:prompt_tokens_total{tier}", "vllm:tiered_kv_made_up"]
    assert dashboards.missing([made_up, *dashboards.all_queries()], metrics) == lacks
    for source in ("none", "cpu", "disk"):
        assert of_disk(client, "time_to_first_token_seconds_count", source=source) > 0
        assert of_disk(client, "prompt_tokens_total", source=source) > 0
    if (promtool := dashboards.promtool()) is not None:
        queries = [*dashboards.panel_queries(), *dashboards.variable_queries()]
        assert dashboards.without_result(promtool, queries, metrics, folder) == ""


@pytest.mark.slow
def test_three_kills(servers: Pool, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    for attempt in range(3):
        with servers.private(extra_config=options(root)) as running:
            busy = threading.Thread(target=keep_busy, args=(running.client, attempt))
            busy.start()
            wait_for_files(root, 40 * (attempt + 1))
            time.sleep(random.Random(attempt).random())
            kill(running)
            busy.join(60)
        assert verify(root) >= 40 * (attempt + 1)
        assert sum(f.stat().st_size for f in root.rglob("*") if f.is_file()) <= CAPACITY
    with servers.private(extra_config=options(root)) as running:
        wait_for_scan(running)
        tokens = prompt("0 0", 700)
        want = cold(running.client, tokens, max_tokens=8)
        assert_same_output(want, running.client.complete(tokens, max_tokens=8))
        assert of_disk(running.client, "hit_tokens_total", tier="disk") > 0


@pytest.mark.slow
def test_two_ranks_and_a_damaged_file_of_one(servers: Pool, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    tokens = prompt("two ranks", 1000)
    ranks = {
        "args": ["--tensor-parallel-size=2"],
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},  # or vLLM wants a NUMA node for each
    }
    with servers.private(extra_config=options(root), **ranks) as running:
        want = cold(running.client, tokens, max_tokens=8)
        running.client.complete(tokens, max_tokens=8)
        wait_for_files(root, 14)
    with servers.private(extra_config=options(root), **ranks) as running:
        client = running.client
        wait_for_scan(running)
        (rank,) = root.glob("*/r1")
        damage(sorted(rank.rglob("*.kv"))[3])
        answer = client.complete(tokens, max_tokens=8)
        assert_same_output(want, answer)
        assert answer.cached_tokens < 896
        assert of_disk(client, "failures_total", kind="disk_damaged") == 1


def keep_busy(client: Client, seed: int = 0) -> None:
    """Prompts that nobody has seen, until the server is gone."""
    with contextlib.suppress(RequestFailed):
        for i in range(10_000):
            client.complete(prompt(f"{seed} {i}", 700), max_tokens=1)


def wait_for_scan(running: Running) -> None:
    """Wait until the engine knows what is in its folder, so that its first request finds it."""
    deadline = time.monotonic() + 60
    while "tiered-kv: the disk tier is ready" not in running.server.tail(2000):
        assert time.monotonic() < deadline, "the folder was not scanned"
        time.sleep(0.05)
