# SPDX-License-Identifier: Apache-2.0
"""A ``vllm serve`` process of one's own, on a free loopback port."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from vllm_tiered_kv.bench.group import ProcessGroup

_VLLM_CLI = "vllm.entrypoints.cli.main"
# What vLLM's logger prints at level ERROR, but no line of a stack trace.
_ERROR = re.compile(r" ERROR [^\]]*\] (?!Traceback )(\S.*)")

# Nothing leaves the machine: no hub look-ups, no usage reports.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_LOGGING_COLOR": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM compiles a few small functions even when eager: half a minute, and a C++ compiler.
    "TORCHDYNAMO_DISABLE": "1",
    # Engines with a thread on each processor share them: while threads spin for one another that
    # are not running, a prefill was seen to take a hundred times as long.
    "OMP_WAIT_POLICY": "PASSIVE",
}


class ServerFailed(RuntimeError):
    """The server did not become healthy; the message has its errors and its log's last lines."""


class ServeSpec(msgspec.Struct, frozen=True):
    """What to serve and how."""

    model: str
    """A model folder."""
    args: tuple[str, ...] = ()
    """Further arguments of ``vllm serve``."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables, over the caller's and the defaults here."""
    kv_transfer_config: str | None = None
    """JSON for ``--kv-transfer-config``; None for no connector."""

    @classmethod
    def make(
        cls,
        model: Path | str,
        args: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        kv_transfer_config: Mapping[str, Any] | None = None,
    ) -> ServeSpec:
        """A spec from ordinary containers; equal specs compare and hash equal."""
        config = kv_transfer_config
        return cls(
            model=str(model),
            args=tuple(args),
            env=tuple(sorted((env or {}).items())),
            kv_transfer_config=json.dumps(config, sort_keys=True) if config is not None else None,
        )


class Server:
    """A running server; leaving the ``with`` block ends it and every process it started.

    Args:
        spec: what to serve.
        log: file for everything it prints, replaced if there.
        timeout_s: time it may take to become healthy.
        python: an interpreter of the environment that vLLM is in, if it is not this one's.

    Raises:
        ServerFailed: it ended or was not healthy in time. Nothing is left running.
    """

    def __init__(
        self, spec: ServeSpec, log: Path, *, timeout_s: float = 240.0, python: Path | None = None
    ) -> None:
        self.spec = spec
        self._python = python
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**ENVIRONMENT, **dict(spec.env)}
        self._group = ProcessGroup(self._command(), log, environment)
        try:
            self._wait_healthy(timeout_s)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._group.pid

    def alive(self) -> bool:
        return self._group.status is None

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        return self._group.tail(lines)

    def errors(self, limit: int = 15) -> list[str]:
        """The first distinct errors in the log, without stack traces."""
        found: dict[str, None] = {}
        try:
            with self.log.open(encoding="utf-8", errors="replace") as file:
                for line in file:
                    match = _ERROR.search(line)
                    if match is not None and len(found) < limit:
                        found[match[1]] = None
        except OSError:
            return []
        return list(found)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """All its processes stand still within this block."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        """All its processes stand still until :meth:`resume`, or until it is ended."""
        self._group.pause()

    def resume(self) -> None:
        self._group.resume()

    def stop(self, grace_s: float = 20.0) -> None:
        """End the server: a polite signal, then a kill of its whole process group."""
        self._group.stop(grace_s)

    def _command(self) -> list[str]:
        script = Path(sys.executable).with_name("vllm")
        if self._python is not None:
            command = [str(self._python.absolute()), "-m", _VLLM_CLI]
        else:
            command = [str(script)] if script.exists() else [sys.executable, "-m", _VLLM_CLI]
        command += ["serve", self.spec.model, "--host", "127.0.0.1", "--port", str(self.port)]
        command += self.spec.args
        if self.spec.kv_transfer_config is not None:
            command += ["--kv-transfer-config", self.spec.kv_transfer_config]
        return command

    def _wait_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with httpx.Client(base_url=self.url, timeout=5.0, trust_env=False) as http:
            while time.monotonic() < deadline:
                if not self.alive():
                    raise self._failure(f"the server exited with {self._group.status}")
                with contextlib.suppress(httpx.HTTPError):
                    if http.get("/health").status_code == 200:
                        return
                time.sleep(0.2)
        raise self._failure(f"the server was not healthy after {timeout_s:.0f} s")

    def _failure(self, what: str) -> ServerFailed:
        # vLLM's processes each log a stack trace; the cause is far above the last lines.
        parts = [what, *self.errors(), f"--- the end of {self.log}:", self.tail()]
        return ServerFailed("\n".join(parts))


def compute_cpus() -> str:
    """For ``VLLM_CPU_OMP_THREADS_BIND``, the same for all servers that are compared.

    All processors but one, which is left to the other processes: what vLLM does by itself
    without a connector. With any connector it leaves one more, and then servers with and
    without one compute on different numbers of threads.
    """
    cpus = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, cpus[:-1] or cpus))


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def free_ports(count: int) -> int:
    """The first of so many loopback ports in a row that nothing listens on now."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as taken, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + count):
                taken.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
