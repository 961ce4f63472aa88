# SPDX-License-Identifier: Apache-2.0
"""A module of ours that runs in a process of its own, and tells what it has by a line of JSON."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from typing_extensions import Self


class Child:
    """It is killed at the end of the ``with`` block.

    Args:
        module: what is run, and its arguments.
        env: its environment; None for this process's.
        stderr: as for :class:`subprocess.Popen`.
    """

    def __init__(
        self, *module: str, env: Mapping[str, str] | None = None, stderr: int | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=env,
            bufsize=0,  # what is there can be waited for
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipes")  # cannot be: both were asked for
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    def line(self, seconds: float) -> bytes:
        """What it says first that is JSON; libraries say other things there.

        Raises:
            RuntimeError: it ended, or said nothing of the kind in time.
        """
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self.stdout], [], [], left)[0]:
                break
            line = self.stdout.readline()
            if line.startswith(b"{"):
                return line
            if not line:
                break
        self.close()
        raise RuntimeError("the process did not start")

    def stop(self) -> None:
        """It stands still from now on."""
        self._process.send_signal(signal.SIGSTOP)
        # The signal is on its way until the kernel says that all threads stand still.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def cpu_seconds(self) -> float:
        """Processor time used so far."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.kill()
        self.stdin.close()
        self.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def with_transports(transports: str) -> dict[str, str]:
    """This environment, with UCX kept to these transports; empty for all there are."""
    environment = dict(os.environ)
    environment.pop("UCX_TLS", None)
    if transports:
        environment["UCX_TLS"] = transports
    return environment
