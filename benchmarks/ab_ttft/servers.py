# SPDX-License-Identifier: Apache-2.0
"""The processes of an arm, from start to end."""

from __future__ import annotations

import contextlib
import http.client
import shutil
from collections.abc import Iterator

from benchmarks.ab_ttft.arms import (
    WITH_LMCACHE,
    Arm,
    Setup,
    connector,
    files_folder,
    interpreter,
    l2_adapters,
)
from benchmarks.ab_ttft.client import Answer, BenchmarkFailed, Connection
from benchmarks.ab_ttft.cpu import CpuClock
from tools.serving import Metrics, Server, ServeSpec, compute_cpus
from tools.serving.lmcache import ENVIRONMENT, LMCacheServer, remove_shared_memory

_BLOCK_TOKENS = 128

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    "TIERED_KV_PROFILE": "1",
    **ENVIRONMENT,
}


class Engine:
    """A running arm: one server and what measures it."""

    def __init__(
        self, arm: Arm, setup: Setup, connection: Connection, clock: CpuClock, server: Server
    ) -> None:
        self.arm = arm
        self.clock = clock
        self._setup = setup
        self._connection = connection
        self._server = server

    def complete(self, body: bytes) -> Answer:
        try:
            return self._connection.complete(body)
        except (OSError, http.client.HTTPException) as error:
            raise BenchmarkFailed(
                f"{self.arm.label}: {error!r}; {self._server.log}:\n{self._server.tail()}"
            ) from error

    def connect(self) -> Connection:
        """A further connection, for a client of its own; the caller closes it."""
        return Connection(self._server.port)

    def reset_device_cache(self) -> None:
        self._connection.reset_device_cache()

    def metrics(self) -> Metrics:
        return self._connection.metrics()

    def discard_files(self) -> None:
        """Drop what the arm wrote to disk, before it is written back while another is timed."""
        folder = files_folder(self.arm, self._setup)
        if folder is not None:
            for entry in folder.iterdir():
                shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def empty_folder(arm: Arm, setup: Setup) -> Iterator[None]:
    """The folder for the arm's files, if it keeps any: new, and gone after the block."""
    folder = files_folder(arm, setup)
    if folder is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running(arm: Arm, setup: Setup) -> Iterator[Engine]:
    """Start an arm; leaving the block ends every process of it, and leaves its files.

    Raises:
        ServerFailed: vLLM did not become healthy, or LMCache's server did not.
    """
    setup.work.mkdir(parents=True, exist_ok=True)
    log = setup.work / f"{arm.value}.log"
    with contextlib.ExitStack() as stack:
        sessions: list[int] = []
        processes: list[int] = []
        port = 0
        if arm in WITH_LMCACHE:
            stack.callback(remove_shared_memory, processes)
            lmcache = LMCacheServer(
                setup.work / f"{arm.value}-server.log",
                gib=setup.capacity_gib,
                l2_adapters=l2_adapters(arm, setup),
            )
            stack.enter_context(lmcache)
            sessions.append(lmcache.pid)
            port = lmcache.port
        spec = ServeSpec.make(
            setup.model,
            setup.serve_args,
            env=_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": compute_cpus()},
            kv_transfer_config=connector(arm, setup, port),
        )
        server = stack.enter_context(Server(spec, log, python=interpreter(arm)))
        clock = CpuClock([*sessions, server.pid])
        processes += clock.processes
        connection = Connection(server.port)
        stack.callback(connection.close)
        yield Engine(arm, setup, connection, clock, server)


def serve_args(longest: int, held: int, step: int | None = None) -> tuple[str, ...]:
    """Arguments of ``vllm serve``.

    Args:
        longest: tokens of the longest prompt with its answer.
        held: tokens that the device cache holds together, at least.
        step: the most tokens of a step; by default a prompt is one step.
    """
    length = (longest // _BLOCK_TOKENS + 2) * _BLOCK_TOKENS
    device_blocks = 2 * (held + length) // _BLOCK_TOKENS
    return (
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        *("--block-size", str(_BLOCK_TOKENS)),
        *("--max-model-len", str(length)),
        *("--max-num-batched-tokens", str(step or length)),
        *("--num-gpu-blocks-override", str(device_blocks)),
    )
