# SPDX-License-Identifier: Apache-2.0
"""The script that a user begins with."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.conftest import ROOT
from tests.engine._handover import alone, fresh, pulled
from tests.engine._server import Models, assert_same_output
from tools.serving import Client
from tools.serving.process import ENVIRONMENT, free_ports
from vllm_tiered_kv.bench.group import ProcessGroup

pytest.importorskip("nixl")

SCRIPT = ROOT / "examples" / "serve-pd.sh"
NAMES = ("PORT", "ROUTER_METRICS_PORT", "PREFILL_PORT", "DECODE_PORT")
ARGUMENTS = ("--dtype=float32", "--enforce-eager", "--max-model-len=4096")


def test_prefill_decode_and_router_serve_and_end_together(models: Models, tmp_path: Path) -> None:
    first = free_ports(len(NAMES))
    ports = {name: first + i for i, name in enumerate(NAMES)}
    key = tmp_path / "made" / "fleet.key"
    environment = {
        **ENVIRONMENT,
        **{name: str(port) for name, port in ports.items()},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "KEY": str(key),
    }
    words = [str(SCRIPT), str(models.path("llama-tiny")), "64MiB", *ARGUMENTS]
    with contextlib.ExitStack() as stack:
        group = ProcessGroup(words, tmp_path / "log", environment)
        stack.callback(group.stop, 20.0)
        front, decode = (
            stack.enter_context(contextlib.closing(Client(f"http://127.0.0.1:{ports[name]}")))
            for name in ("PORT", "DECODE_PORT")
        )
        _wait_ready(front.url, group)
        processes = psutil.Process(group.pid).children(recursive=True)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        handed = 0.0
        for _ in range(10):  # an engine's first requests are never handed over
            text, before = fresh(700), pulled(decode)
            got = front.complete(text, max_tokens=4)
            assert_same_output(alone(decode, text, 4), got)
            handed = pulled(decode) - before
            if handed:
                break
        assert handed == len(text), group.tail(100)
        group.leader.terminate()
        assert group.leader.wait(60) == 143
        assert not psutil.wait_procs(processes, timeout=60)[1]


def test_it_says_what_it_wants(tmp_path: Path) -> None:
    group = ProcessGroup([str(SCRIPT)], tmp_path / "log", {})
    assert group.leader.wait(30) == 2
    text = group.tail(100)
    assert "examples/serve-pd.sh MODEL [CAPACITY]" in text
    assert all(name in text for name in NAMES)
    assert "KEY=" in text
    assert "#" not in text


def _wait_ready(url: str, group: ProcessGroup) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and group.status is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/readiness", trust_env=False).status_code == 200:
                return
        time.sleep(0.2)
    raise AssertionError(group.tail(100))
