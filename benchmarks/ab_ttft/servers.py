# SPDX-License-Identifier: Apache-2.0
"""The processes of an arm, from start to end."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ab_ttft.arms import (
    WITH_LMCACHE,
    Arm,
    Setup,
    connector,
    files_folder,
    interpreter,
    l2_adapter,
)
from benchmarks.ab_ttft.client import Answer, BenchmarkFailed, Connection
from benchmarks.ab_ttft.cpu import CpuClock
from tools.serving import Metrics, Server, ServeSpec, compute_cpus
from tools.serving.process import free_port

_BLOCK_TOKENS = 128
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)

_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    "TIERED_KV_PROFILE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
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
        ServerFailed: vLLM did not become healthy.
        BenchmarkFailed: LMCache's server did not.
    """
    setup.work.mkdir(parents=True, exist_ok=True)
    log = setup.work / f"{arm.value}.log"
    with contextlib.ExitStack() as stack:
        sessions: list[int] = []
        processes: list[int] = []
        port = 0
        if arm in WITH_LMCACHE:
            stack.callback(_remove_shared_memory, processes)
            port = free_port()
            sessions.append(stack.enter_context(_lmcache_server(arm, setup, port)))
        spec = ServeSpec.make(
            setup.model,
            setup.serve_args,
            env=_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": compute_cpus()},
            kv_transfer_config=connector(arm, setup, port),
        )
        server = stack.enter_context(_VenvServer(spec, log, interpreter(arm)))
        clock = CpuClock([*sessions, server.pid])
        processes += clock.processes
        connection = Connection(server.port)
        stack.callback(connection.close)
        yield Engine(arm, setup, connection, clock, server)


class _VenvServer(Server):
    """``vllm serve`` of the environment that ``python`` belongs to."""

    def __init__(self, spec: ServeSpec, log: Path, python: Path) -> None:
        self._python = python
        super().__init__(spec, log)

    def _command(self) -> list[str]:
        command = super()._command()
        arguments = command[command.index("serve") :]
        return [str(self._python), "-m", "vllm.entrypoints.cli.main", *arguments]


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


@contextlib.contextmanager
def _lmcache_server(arm: Arm, setup: Setup, port: int) -> Iterator[int]:
    """LMCache's server on ``port``; yields its process id, which is its session's too."""
    http_port = free_port()
    size = str(setup.capacity_gib)
    command = [
        *(str(interpreter(arm).with_name("lmcache")), "server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http_port)),
        *("--l1-size-gb", size, "--l1-init-size-gb", size, "--eviction-policy", "LRU"),
    ]
    if (adapter := l2_adapter(arm, setup)) is not None:
        command += ["--l2-adapter", adapter]
    log = setup.work / f"{arm.value}-server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
            preexec_fn=lambda: _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    try:
        _wait_for_lmcache(process, http_port, log)
        yield process.pid
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)


def _wait_for_lmcache(process: subprocess.Popen[bytes], http_port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        probe = Connection(http_port, timeout_s=5.0)
        with contextlib.suppress(OSError, http.client.HTTPException, BenchmarkFailed):
            probe.get("/healthcheck")
            return
        probe.close()
        time.sleep(0.2)
    raise BenchmarkFailed(f"LMCache's server did not start; see {log}")


def _remove_shared_memory(processes: list[int]) -> None:
    # It outlives a worker that is ended with SIGTERM, and fills memory run by run.
    for pid in processes:
        for left in Path("/dev/shm").glob(f"lmcache_kv_{pid}_*"):
            left.unlink(missing_ok=True)
