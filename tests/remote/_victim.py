# SPDX-License-Identifier: Apache-2.0
"""A process that reads from a peer, over and over, until it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType

import msgspec

from tests.remote._peer import Peer
from vllm_tiered_kv.remote.transport import Endpoint, Outcome


class Victim:
    """Its first read has begun when this is there."""

    def __init__(self, peer: Peer, transports: str) -> None:
        environment = dict(os.environ)
        environment.pop("UCX_TLS", None)
        if transports:
            environment["UCX_TLS"] = transports
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.remote._victim"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        pipes = self._process.stdin, self._process.stdout
        assert pipes[0] is not None
        assert pipes[1] is not None
        self._pipes = pipes[0], pipes[1]
        self._pipes[0].write(msgspec.json.encode(peer.endpoint) + b"\n")
        self._pipes[0].flush()
        self.wait_for(b"begun\n")

    def wait_for(self, line: bytes) -> None:
        """Until it has said this; the test's time-out bounds it."""
        for said in self._pipes[1]:
            if said == line:
                return
        raise RuntimeError("the reader ended")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> Victim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in self._pipes:
            pipe.close()


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
