# SPDX-License-Identifier: Apache-2.0
"""A process whose memory is read, and the handle on it."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import numpy.typing as npt

from tools.child import Child
from vllm_tiered_kv.remote.transport import Endpoint, Options, Region, open_transport

Bytes = npt.NDArray[np.uint8]
START_SECONDS = 60.0


def noise(nbytes: int) -> Bytes:
    """Touched memory, the same in every process: the place of every byte can be told."""
    words = np.arange(nbytes // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def region(memory: Bytes) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


class Peer(Child):
    """Serves `nbytes` bytes of `noise` until the end of the `with` block."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("benchmarks.pd._peer", str(nbytes))
        self.endpoint = msgspec.json.decode(self.line(START_SECONDS), type=Endpoint)


def main() -> None:
    memory = noise(int(sys.argv[1]))
    transport = open_transport([region(memory)], Options(reads=False))
    sys.stdout.buffer.write(msgspec.json.encode(transport.export()) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
