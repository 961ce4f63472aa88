# SPDX-License-Identifier: Apache-2.0
"""A process with memory that others read, and the handle on it."""

from __future__ import annotations

import functools
import sys

import msgspec
import numpy as np
import numpy.typing as npt

from tools.child import Child, with_transports
from vllm_tiered_kv.remote.transport import Endpoint, Options, Region, open_transport

Bytes = npt.NDArray[np.uint8]

START_SECONDS = 60.0


@functools.lru_cache(maxsize=4)
def contents(seed: int, nbytes: int) -> Bytes:
    """Random bytes, the same for everybody who knows the seed."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def region(memory: Bytes) -> Region:
    return Region(memory.ctypes.data, memory.nbytes)


class Peer(Child):
    """A peer process; `transports` is its `UCX_TLS`, empty for all there are."""

    def __init__(self, seed: int, nbytes: int, transports: str = "") -> None:
        environment = with_transports(transports)
        super().__init__("tests.remote._peer", str(seed), str(nbytes), env=environment)
        self.bytes = contents(seed, nbytes)
        self.endpoint = msgspec.json.decode(self.line(START_SECONDS), type=Endpoint)
        (self.region,) = self.endpoint.regions


def main() -> None:
    seed, nbytes = int(sys.argv[1]), int(sys.argv[2])
    memory = contents(seed, nbytes)
    transport = open_transport([region(memory)], Options(reads=False))
    sys.stdout.buffer.write(msgspec.json.encode(transport.export()) + b"\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test is gone


if __name__ == "__main__":
    main()
