# SPDX-License-Identifier: Apache-2.0
"""A process that reads from a peer, over and over, until it is killed."""

from __future__ import annotations

import sys

import msgspec

from tests.remote._peer import Peer
from tools.child import Child, with_transports
from vllm_tiered_kv.remote.transport import Endpoint, Outcome


class Victim(Child):
    """Its first read has begun when this is there."""

    def __init__(self, peer: Peer, transports: str) -> None:
        super().__init__("tests.remote._victim", env=with_transports(transports))
        self.stdin.write(msgspec.json.encode(peer.endpoint) + b"\n")
        self.stdin.flush()
        self.wait_for(b"begun\n")

    def wait_for(self, line: bytes) -> None:
        """Until it has said this; the test's time-out bounds it."""
        for said in self.stdout:
            if said == line:
                return
        raise RuntimeError("the reader ended")


def main() -> None:
    from tests.remote._reader import UNTOUCHED, Reader

    endpoint = msgspec.json.decode(sys.stdin.buffer.readline(), type=Endpoint)
    nbytes = endpoint.regions[0].nbytes
    reader = Reader(nbytes)
    reader.transport.connect(endpoint)
    job = reader.start(endpoint, [(0, 0, nbytes)])
    reader.until(lambda: bool((reader.memory[:: 4 << 20] != UNTOUCHED).any()))
    print("begun", flush=True)
    while True:
        (result,) = reader.wait(job)
        if result.outcome is not Outcome.DONE:
            raise RuntimeError(result.reason)
        print("read", flush=True)
        job = reader.start(endpoint, [(0, 0, nbytes)])


if __name__ == "__main__":
    main()
