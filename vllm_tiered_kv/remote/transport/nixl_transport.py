# SPDX-License-Identifier: Apache-2.0
"""The transport over NIXL: an agent that peers read from, and one that reads.

They are apart so that the one that reads can be destroyed, the only way to end a read that hangs,
without failing a peer that reads from here; and so that a rank that only reads costs nothing while
idle: NIXL's progress thread is needed by the side that is read from alone.

Run with host memory on one machine, over CMA and over tcp. The paths for GPU memory (descriptors of
kind VRAM with their device, the fence before a read, threads that belong to the device) have not
been run on one.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from vllm_tiered_kv.remote.transport import (
    Endpoint,
    MemoryKind,
    Options,
    Read,
    ReadResult,
    Region,
    TransportError,
)
from vllm_tiered_kv.remote.transport.agent import Agent, AgentError, load_bindings
from vllm_tiered_kv.remote.transport.environment import prepare
from vllm_tiered_kv.remote.transport.reader import Keeper, Reader, settle
from vllm_tiered_kv.remote.transport.reading import Reading
from vllm_tiered_kv.remote.transport.regions import RegionError, RegionTable
from vllm_tiered_kv.worker.cpus import copy_cpus

OPEN_SECONDS = 60.0
"""NIXL and its plug-ins are loaded, and memory is registered: usually within a second ..."""
PIN_RATE = 256 << 20
"""... but over RDMA it is pinned, so many bytes a second at least."""

Result = TypeVar("Result")


class NixlTransport:
    """See `Transport`. Opens at once; about 50 MiB of memory an agent.

    Raises:
        TransportError: NIXL isn't installed, an agent can't be had, or the regions make no sense.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        options: Options,
        *,
        notify: Callable[[], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            self._local = RegionTable(regions)
        except RegionError as error:
            raise TransportError(f"remote: {error}") from error
        self._options = options
        self._cpus = copy_cpus()
        self._device = _device(regions)
        self._reading = Reading(options, self._local, clock, notify)
        self._keeper = Keeper(self._reading, self._reading_agent)
        self._server: Agent | None = None
        self._endpoint: Endpoint | None = None
        self._readers: list[Reader] = []
        self._close_lock = threading.Lock()
        self._is_closed = False
        try:
            self._in_thread(self._open, OPEN_SECONDS + self._local.nbytes / PIN_RATE)
        except AgentError as error:
            raise TransportError(f"remote: NIXL gives no agent: {error}") from error

    def export(self) -> Endpoint | None:
        return self._endpoint

    def connect(self, endpoint: Endpoint) -> None:
        self._reading.connect(endpoint)

    def disconnect(self, incarnation: str) -> None:
        self._reading.disconnect(incarnation)

    def start_read(self, read: Read) -> None:
        self._reading.start(read)

    def cancel(self, jobs: Sequence[int]) -> None:
        self._reading.cancel(jobs)

    def poll(self) -> list[ReadResult]:
        return self._reading.take_results()

    def settled(self) -> list[int]:
        return self._reading.take_settled()

    def take_counts(self) -> dict[str, int]:
        return dict(self._reading.take_counts())

    def close(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        self._reading.close()
        with self._close_lock:
            if self._is_closed:
                return True
            for reader in self._readers:
                reader.thread.join(max(0.0, deadline - time.monotonic()))
            if any(reader.thread.is_alive() for reader in self._readers):
                return False
            try:
                left = max(0.1, deadline - time.monotonic())
                self._is_closed = self._in_thread(self._destroy, left)
            except TransportError:
                return False
            return self._is_closed

    # -- on threads of ours, whose processors NIXL's threads inherit ----------------------------

    def _open(self) -> None:
        settle(self._cpus, self._device)
        prepare(self._options.host)
        self._bindings = load_bindings()
        if self._options.serves:
            self._server = self._agent(progress=True, workers=1)
            metadata = self._server.metadata()
            self._endpoint = Endpoint(self._server.name, metadata, self._local.regions)
        if not self._options.reads:
            return
        self._keeper.first()
        for i in range(max(1, self._options.threads)):
            keeper = self._keeper if i == 0 else None
            name = f"tiered-kv-remote-{i}"
            reader = Reader(self._reading, name, self._cpus, self._device, keeper)
            self._readers.append(reader)
            reader.thread.start()

    def _reading_agent(self) -> Agent:
        return self._agent(progress=False, workers=max(1, self._options.threads))

    def _agent(self, *, progress: bool, workers: int) -> Agent:
        return Agent(
            self._bindings,
            uuid.uuid4().hex,
            progress=progress,
            workers=workers,
            regions=self._local.regions,
        )

    def _destroy(self) -> bool:
        settle(frozenset(), self._device)
        ended = True
        for generation in self._reading.generations():
            ended &= not generation.is_undead and self._keeper.destroy(generation)
        server, self._server = self._server, None
        self._endpoint = None
        return (server is None or server.destroy(())) and ended

    def _in_thread(self, work: Callable[[], Result], timeout: float) -> Result:
        """Do something on a thread of ours.

        Raises:
            TransportError: it takes longer than `timeout` seconds; it goes on.
        """
        outcome: list[Result] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                outcome.append(work())
            except Exception as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=run, name="tiered-kv-remote-agent", daemon=True)
        thread.start()
        thread.join(timeout)
        if errors:
            raise errors[0]
        if not outcome:
            raise TransportError(f"remote: NIXL has not answered in {timeout:.0f} s")
        return outcome[0]


def _device(regions: Sequence[Region]) -> int | None:
    """The GPU whose memory is registered."""
    return next((r.device for r in regions if r.kind is MemoryKind.VRAM), None)
