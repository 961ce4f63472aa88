# SPDX-License-Identifier: Apache-2.0
"""A transport within this process that a test can hold, fail and let land late.

It copies real bytes between the engines' pages; NIXL's own is tested in ``tests/remote``.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from vllm_tiered_kv.remote.transport import (
    Endpoint,
    Memory,
    Options,
    Outcome,
    Read,
    ReadResult,
    Region,
)


class NearTransport:
    """See :class:`vllm_tiered_kv.remote.transport.Transport`."""

    def __init__(
        self, regions: Sequence[Region], options: Options, notify: Callable[[], Any] | None = None
    ) -> None:
        self._regions = tuple(regions)
        self._serves = options.serves
        self._name = uuid.uuid4().hex
        self._known: set[str] = set()
        self._results: list[ReadResult] = []
        self._settled: list[int] = []
        self.is_held = False
        self.is_broken = False
        """Reads fail."""
        self.damages = False
        """What arrives is not what was sent: one bit of it."""
        self.held: list[Read] = []
        """Begun, and not ended."""
        self.lost: list[Read] = []
        """Given up, and may still write."""
        self.nbytes = 0
        self.reads = 0
        self.gone: set[str] = set()
        """Peers that are not there any more."""
        self.is_closed = False

    def export(self) -> Endpoint | None:
        return Endpoint(self._name, b"near", self._regions) if self._serves else None

    def connect(self, endpoint: Endpoint) -> None:
        self._known.add(endpoint.incarnation)

    def disconnect(self, incarnation: str) -> None:
        self._known.discard(incarnation)

    def start_read(self, read: Read) -> None:
        self.reads += 1
        if self.is_broken or read.peer not in self._known:
            self._fail(read)
        elif self.is_held:
            self.held.append(read)
        else:
            self._end(read)

    def cancel(self, jobs: Sequence[int]) -> None:
        """Nothing here takes long but what is held by the test."""

    def poll(self) -> list[ReadResult]:
        results, self._results = self._results, []
        return results

    def settled(self) -> list[int]:
        settled, self._settled = self._settled, []
        return settled

    def take_counts(self) -> dict[str, int]:
        return {}

    def close(self, timeout: float) -> bool:
        self.is_closed = True
        return not self.lost

    # -- what a test does --------------------------------------------------------------

    def release(self) -> None:
        """What is held arrives."""
        self.is_held = False
        held, self.held = self.held, []
        for read in held:
            self._end(read)

    def give_up(self) -> None:
        """What is held is past its deadline, and goes on."""
        held, self.held = self.held, []
        self.lost += held
        for read in held:
            self._results.append(
                ReadResult(
                    read.job,
                    Outcome.GIVEN_UP,
                    Memory.QUARANTINED,
                    kind="remote_deadline",
                    reason="late",
                )
            )

    def land(self) -> None:
        """The bytes of what was given up come after all, and then no more."""
        lost, self.lost = self.lost, []
        for read in lost:
            if read.peer not in self.gone:
                self._copy(read)
            self._settled.append(read.job)

    def _fail(self, read: Read) -> None:
        self._results.append(
            ReadResult(read.job, Outcome.FAILED, kind="remote_disconnected", reason="broken")
        )

    def _end(self, read: Read) -> None:
        if read.peer in self.gone:
            self._fail(read)
            return
        self._copy(read)
        nbytes = int(read.nbytes.sum())
        self.nbytes += nbytes
        self._results.append(ReadResult(read.job, Outcome.DONE, nbytes=nbytes))

    def _copy(self, read: Read) -> None:
        for here, there, nbytes in zip(read.local, read.remote, read.nbytes, strict=True):
            ctypes.memmove(int(here), int(there), int(nbytes))
        if self.damages:
            ctypes.c_ubyte.from_address(int(read.local[-1])).value ^= 1
