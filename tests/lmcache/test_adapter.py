# SPDX-License-Identifier: Apache-2.0
"""The L2 adapter beside the LMCache it is written for: its classes, its benchmark, its server."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.lmcache.conftest import peers_environment
from tools.serving import ServerFailed
from tools.serving.lmcache import LMCacheServer


def plugin(root: Path, **params: Any) -> dict[str, Any]:
    return {
        "type": "plugin",
        "module_path": "vllm_tiered_kv.integrations.lmcache",
        "class_name": "TieredKVL2Adapter",
        "adapter_params": {"path": str(root), "capacity": "256MiB", "min_free": 1, **params},
    }


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=peers_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )


def test_lmcaches_own_classes(peers: Path, tmp_path: Path) -> None:
    done = run([str(peers), "-m", "tests.lmcache._checks", str(tmp_path)])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("passed ") > 10
    assert "kind 'internal'" not in done.stdout


def test_lmcaches_benchmark(peers: Path, tmp_path: Path) -> None:
    command = [str(peers.with_name("lmcache")), "bench", "l2", "--no-skip-verify"]
    command += ["--num-keys", "16", "--in-flight", "2", "--data-size-kb", "1000", "--rounds", "2"]
    command += ["--lookup-max-hit-rate", "1.0", "--l2-adapter", json.dumps(plugin(tmp_path))]
    done = run(command)
    assert done.returncode == 0, done.stdout
    assert "All 32 keys data verified OK" in done.stdout
    assert re.findall(r"^Total success: +(\d+)$", done.stdout, re.MULTILINE) == ["64"] * 3


def wait_for(server: LMCacheServer, key: str, value: object) -> Mapping[str, Any]:
    deadline = time.monotonic() + 60
    while (status := server.l2_status())[key] != value:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def test_lmcaches_server(peers: Path, ours: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    adapters = [plugin(tmp_path / "kv"), plugin(tmp_path / "log" / "under a file")]
    with LMCacheServer(log, l2_adapters=adapters, python=peers) as server:
        status = wait_for(server, "scanned", True)
        assert status["is_healthy"]
        assert not status["degraded"]
        assert server.get("/healthcheck") == {"status": "healthy"}
        assert server.get("/cache/objects?tier=l2")["entries"] == []
    assert "the folder is in trouble" in log.read_text()  # of the second one
    assert "Traceback" not in log.read_text()
    assert not server.alive()


def test_a_wrong_option_ends_the_start(peers: Path, ours: None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with pytest.raises(ServerFailed):
        LMCacheServer(log, l2_adapters=[plugin(tmp_path, capcity="1GiB")], python=peers)
    assert "capcity: unknown key (value '1GiB')" in log.read_text()
    assert "the nearest valid key is 'capacity'" in log.read_text()
