# SPDX-License-Identifier: Apache-2.0
"""A process with memory that others read, and the handle on it."""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_tiered_kv.remote.transport import Endpoint, Options, Region, open_transport

Bytes = npt.NDArray[np.uint8]

START_SECONDS = 60.0


@functools.lru_cache(maxsize=4)
def contents(seed: int, nbytes: int) -> Bytes:
    """Random bytes, the same for everybody who knows the seed."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def region(memory: Bytes) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


class Peer:
    """A peer process; `transports` is its `UCX_TLS`, empty for all there are."""

    def __init__(self, seed: int, nbytes: int, transports: str = "") -> None:
        environment = dict(os.environ)
        environment.pop("UCX_TLS", None)
        if transports:
            environment["UCX_TLS"] = transports
        command = [sys.executable, "-m", "tests.remote._peer", str(seed), str(nbytes)]
        self.bytes = contents(seed, nbytes)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self.endpoint = msgspec.json.decode(self._line(), type=Endpoint)
        (self.region,) = self.endpoint.regions

    def stop(self) -> None:
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
        if self._process.poll() is None:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _line(self) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        while True:
            ready, _, _ = select.select([pipe], [], [], START_SECONDS)
            line = pipe.readline() if ready else b""
            if not line:
                self.close()
                raise RuntimeError("the peer did not start")
            if line.startswith(b"{"):
                return line


def main() -> None:
    seed, nbytes = int(sys.argv[1]), int(sys.argv[2])
    memory = contents(seed, nbytes)
    transport = open_transport([region(memory)], Options(reads=False))
    sys.stdout.buffer.write(msgspec.json.encode(transport.export()) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test is gone


if __name__ == "__main__":
    main()
