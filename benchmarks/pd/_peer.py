# SPDX-License-Identifier: Apache-2.0
"""A process whose memory is read, and the handle on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import numpy.typing as npt

from vllm_tiered_kv.remote.transport import Endpoint, Options, Region, open_transport

Bytes = npt.NDArray[np.uint8]


def noise(nbytes: int) -> Bytes:
    """Touched memory, the same in every process: the place of every byte can be told."""
    words = np.arange(nbytes // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def region(memory: Bytes) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


class Peer:
    """Serves `nbytes` bytes of `noise` until the end of the `with` block."""

    def __init__(self, nbytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.pd._peer", str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.endpoint = self._read_endpoint()

    def _read_endpoint(self) -> Endpoint:
        for line in self._process.stdout or ():
            if line.startswith(b"{"):
                return msgspec.json.decode(line, type=Endpoint)
        raise RuntimeError("the peer did not start")

    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    memory = noise(int(sys.argv[1]))
    transport = open_transport([region(memory)], Options(reads=False))
    sys.stdout.buffer.write(msgspec.json.encode(transport.export()) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
