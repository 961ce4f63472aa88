# SPDX-License-Identifier: Apache-2.0
"""vLLM with LMCache's connector, LMCache's server, and this project's adapter below it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine._server import Models, assert_same_output, prompt
from tests.lmcache.test_adapter import plugin, wait_for
from tests.soak._footprint import processes
from tools.serving import Client, Server, ServeSpec
from tools.serving.lmcache import (
    ENVIRONMENT,
    LMCacheServer,
    connector,
    remove_shared_memory,
)
from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import HEADER_BYTES
from vllm_tiered_kv.tiers.disk.scan import scan_root
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus
from vllm_tiered_kv.tiers.disk.walk import Found

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHUNK = 256
"""Tokens of one of LMCache's objects."""


class Stack:
    """Both servers, and a client of the engine."""

    def __init__(self, lmcache: LMCacheServer, client: Client) -> None:
        self.lmcache = lmcache
        self.client = client


class Starter:
    """Starts both servers over one folder."""

    def __init__(self, peers: Path, model: Path, work: Path) -> None:
        self.peers, self.model, self.work = peers, model, work
        self.root = work / "kv"
        self._started = 0

    @contextlib.contextmanager
    def stack(self, dtype: str = "float32") -> Iterator[Stack]:
        self._started += 1
        logs = [self.work / f"{name}-{self._started}.log" for name in ("lmcache", "vllm")]
        adapters = [plugin(self.root)]
        with LMCacheServer(logs[0], l2_adapters=adapters, python=self.peers) as lmcache:
            spec = ServeSpec.make(
                self.model,
                [
                    f"--dtype={dtype}",
                    "--enforce-eager",
                    "--enable-prompt-tokens-details",
                    "--max-model-len=4096",
                ],
                env={**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"},
                kv_transfer_config=connector(lmcache.port),
            )
            with (
                Server(spec, logs[1], python=self.peers) as server,
                Client(server.url) as client,
            ):
                wait_for(lmcache, "scanned", True)
                pids = [int(process.name) for process in processes(server.pid)]
                try:
                    yield Stack(lmcache, client)
                finally:
                    server.stop()
                    remove_shared_memory(pids)


@pytest.fixture
def starter(peers: Path, ours: None, models_folder: Path, tmp_path: Path) -> Starter:
    return Starter(peers, Models(models_folder).path("llama-tiny"), tmp_path)


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def wait_for_files(root: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while len(files(root)) < count:
        assert time.monotonic() < deadline, files(root)
        time.sleep(0.05)


def whole(root: Path) -> int:
    """How many files are whole; all of them have to be."""
    found = [item for item in scan_root(Files(), root) if isinstance(item, Found)]
    for file in found:
        folder = RankFolder(root, file.namespace, file.rank, files=Files(), mode=IoMode.BUFFERED)
        nbytes = file.size - HEADER_BYTES
        got = folder.read(file.key, file.group, aligned_buffer(nbytes), nbytes)
        folder.close()
        assert got.status is ReadStatus.OK
    return len(found)


def overwrite(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    file.write_bytes(data)


def test_restarts_and_damage(starter: Starter) -> None:
    root = starter.root
    tokens = prompt("lmcache", 3 * CHUNK + 100)
    with starter.stack() as stack:
        cold = stack.client.complete(tokens, max_tokens=8)
        assert cold.cached_tokens == 0
        wait_for_files(root, 3)
        wait_for(stack.lmcache, "stored", 3)

    with starter.stack() as stack:
        warm = stack.client.complete(tokens, max_tokens=8)
        assert_same_output(cold, warm)
        assert warm.cached_tokens == 3 * CHUNK
        assert wait_for(stack.lmcache, "loaded", 3)["damaged"] == 0
    assert whole(root) == 3

    first, second, _ = files(root)
    overwrite(first)
    os.truncate(second, 5000)
    with starter.stack() as stack:
        answer = stack.client.complete(tokens, max_tokens=8)
        assert_same_output(cold, answer)
        assert answer.cached_tokens < 3 * CHUNK
        wait_for(stack.lmcache, "damaged", 2)
        wait_for(stack.lmcache, "stored", 2)  # anew
        assert stack.lmcache.get("/healthcheck") == {"status": "healthy"}
    assert whole(root) == 3

    with starter.stack() as stack:
        answer = stack.client.complete(tokens, max_tokens=8)
        assert_same_output(cold, answer)
        assert answer.cached_tokens == 3 * CHUNK

    # The same model served in another type: LMCache's key is the same, the bytes mean another.
    with starter.stack("bfloat16") as stack:
        answer = stack.client.complete(tokens, max_tokens=8)
        assert answer.cached_tokens == 0
        wait_for(stack.lmcache, "stored", 3)
        assert len({file.parents[2] for file in files(root)}) == 2
