# SPDX-License-Identifier: Apache-2.0
"""This process's memory and its transport, and waiting for what comes of reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np

from tests.remote._peer import Bytes, Peer, region
from vllm_tiered_kv.remote.transport import (
    Endpoint,
    Fence,
    Options,
    Read,
    ReadResult,
    open_transport,
)

PATIENCE = 60.0
"""Seconds until a test gives up; nothing depends on how long it takes."""
UNTOUCHED = 0
"""Peers' bytes are never 0."""


class Reader:
    """Memory of `nbytes` bytes, all `UNTOUCHED`, that reads write to."""

    def __init__(self, nbytes: int, options: Options | None = None) -> None:
        self.memory: Bytes = np.zeros(nbytes, dtype=np.uint8)
        self.memory[:] = UNTOUCHED  # touched, so that no page is missing
        self.transport = open_transport([region(self.memory)], options or Options(serves=False))
        self._jobs = itertools.count(1)
        self.results: dict[int, ReadResult] = {}
        self.settled: set[int] = set()

    def start(
        self,
        peer: Peer | Endpoint,
        runs: Sequence[tuple[int, int, int]],
        seconds: float = PATIENCE,
        after: Fence | None = None,
    ) -> int:
        """Begin to read `(here, there, nbytes)`, offsets into both memories."""
        job = next(self._jobs)
        local, remote, nbytes = (np.array(c, dtype=np.int64) for c in zip(*runs, strict=True))
        endpoint = peer.endpoint if isinstance(peer, Peer) else peer
        read = Read(
            job,
            endpoint.incarnation,
            local + self.memory.ctypes.data,
            remote + endpoint.regions[0].base,
            nbytes,
            time.monotonic() + seconds,
            after,
        )
        self.transport.start_read(read)
        return job

    def collect(self) -> None:
        """Take what there is; every job ends once and settles at most once."""
        for result in self.transport.poll():
            assert result.job not in self.results
            self.results[result.job] = result
        for job in self.transport.settled():
            assert job in self.results
            assert job not in self.settled
            self.settled.add(job)

    def wait(self, *jobs: int) -> list[ReadResult]:
        """Until these jobs have ended."""
        self.until(lambda: all(job in self.results for job in jobs))
        return [self.results[job] for job in jobs]

    def wait_settled(self, *jobs: int) -> None:
        self.until(lambda: self.settled.issuperset(jobs))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it does not come about"
            time.sleep(0.001)
            self.collect()

    def watch(self, seconds: float) -> None:
        """Go on for a while in which nothing in particular happens."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
            self.collect()

    def close(self) -> bool:
        return self.transport.close(30.0)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def shuffled(pages: int, page: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Runs of one page each, in no order on either side."""
    rng = np.random.default_rng(seed)
    here, there = rng.permutation(pages) * page, rng.permutation(pages) * page
    return [(int(a), int(b), page) for a, b in zip(here, there, strict=True)]


def expected(reader: Reader, peer: Peer, runs: Sequence[tuple[int, int, int]]) -> Bytes:
    """The reader's memory when these runs, and nothing else, have arrived."""
    memory = np.full_like(reader.memory, UNTOUCHED)
    for here, there, nbytes in runs:
        memory[here : here + nbytes] = peer.bytes[there : there + nbytes]
    return memory
