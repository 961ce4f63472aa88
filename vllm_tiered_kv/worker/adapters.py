# SPDX-License-Identifier: Apache-2.0
"""Which LoRA weights this rank computes with, step by step.

A request names an adapter by number, name and path; what is loaded under that number may be
exchanged in place, or pushed out and read again from files that have changed. So each adapter
somebody asked for is looked at twice a step. Whenever another object is found in its place its
**generation** grows, and the object's content is digested on a thread. A job says with which
generation its blocks were computed; with any other it is dropped.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping

from vllm_tiered_kv.identity.adapter import Opaque, Registered, adapter_digest
from vllm_tiered_kv.identity.hashing import Cancelled
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.protocol import AdapterReport, AdapterState, AdapterUse

logger = get_logger(__name__)

MAX_WATCHED = 4096
IDLE_SECONDS = 5.0


class _Watched:
    """One adapter. Engine thread only."""

    __slots__ = ("generation", "present", "told")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.present: weakref.ref[object] | None = None
        """The object last seen; an adapter that is gone is not kept alive for us."""
        self.told: AdapterState | None = None


class AdapterWatch:
    """Watches the adapters of one rank.

    Args:
        rank: this rank's place in a job's generations.
        registered: what is loaded; None where that cannot be seen: nothing is vouched for.
    """

    def __init__(self, rank: int, registered: Registered | None) -> None:
        self._rank = rank
        self.registered = registered
        self._watched: dict[int, _Watched] = {}
        self._generation = 0
        """The highest of all that are watched no more: none is ever given twice, or a job that was
        planned before would fit what comes after."""
        self._there: set[int] = set()
        """Adapters that are loaded, or whose absence has not been told yet."""
        self._reports: list[AdapterReport] = []
        self._wake = threading.Condition()
        self._queue: dict[int, tuple[int, object]] = {}  # the newest of each adapter
        self._digested: list[AdapterReport] = []
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, watch: Iterable[int], unwatch: Iterable[int]) -> None:
        """Begin and end to watch adapters, as a step's plan says."""
        for adapter in unwatch:
            if (gone := self._watched.pop(adapter, None)) is not None:
                self._generation = max(self._generation, gone.generation)
            self._there.discard(adapter)
            with self._wake:
                self._queue.pop(adapter, None)
        for adapter in watch:
            if len(self._watched) < MAX_WATCHED:
                self._watched.setdefault(adapter, _Watched(self._generation))
                self._there.add(adapter)

    def observe(self) -> None:
        """Look whether another object has taken an adapter's place; before and after a step."""
        if not self._watched:
            return
        try:
            loaded = self.registered() if self.registered is not None else None
            if loaded is not None:
                self._compare(loaded)
                return
        except Exception:
            logger.exception("tiered-kv: LoRA adapters cannot be told apart any more")
        self.registered = None
        for adapter, watched in self._watched.items():
            watched.present = None
            self._tell(adapter, watched, AdapterState.OPAQUE)

    def _compare(self, loaded: Mapping[int, object]) -> None:
        # Only what is in memory or was: a step costs nothing for all others ever asked for.
        self._there.update(adapter for adapter in loaded if adapter in self._watched)
        for adapter in tuple(self._there):
            watched, found = self._watched[adapter], loaded.get(adapter)
            if found is None:
                watched.present = None
                self._there.discard(adapter)
                with self._wake:
                    self._queue.pop(adapter, None)  # or it would be kept alive for us
                self._tell(adapter, watched, AdapterState.ABSENT)
            elif watched.present is None or watched.present() is not found:
                watched.generation += 1
                watched.present = weakref.ref(found)
                watched.told = None
                self._tell(adapter, watched, AdapterState.DIGESTING)
                self._digest(adapter, watched.generation, found)

    def holds(self, use: AdapterUse | None) -> bool:
        """Whether a job's adapter is still the one it was planned with."""
        if use is None:
            return True
        watched = self._watched.get(use.adapter)
        if watched is None or watched.present is None or self._rank >= len(use.generations):
            return False
        return watched.generation == use.generations[self._rank]

    def take(self) -> tuple[AdapterReport, ...]:
        """What the scheduler half has to know since the last call, in the order it happened."""
        with self._wake:
            digested, self._digested = self._digested, []
        reports, self._reports = self._reports, []
        for report in digested:
            watched = self._watched.get(report.adapter)
            if watched is None or watched.generation != report.generation:
                continue  # replaced meanwhile
            if watched.present is None:
                continue
            watched.told = report.state
            reports.append(report)
        return tuple(reports)

    def close(self, timeout: float) -> None:
        self._closing.set()
        with self._wake:
            self._wake.notify_all()
        if self._thread is not None:
            self._thread.join(timeout)

    def _tell(self, adapter: int, watched: _Watched, state: AdapterState) -> None:
        if watched.told is not state:
            watched.told = state
            self._reports.append(AdapterReport(adapter, watched.generation, state))

    def _digest(self, adapter: int, generation: int, found: object) -> None:
        with self._wake:
            self._queue[adapter] = (generation, found)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="tiered-kv-adapters", daemon=True
                )
                self._thread.start()
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closing.is_set():
                    self._wake.wait(IDLE_SECONDS)
                if self._closing.is_set():
                    return
                adapter, (generation, found) = self._queue.popitem()
            try:
                digest = adapter_digest(found, self._closing)
                report = AdapterReport(adapter, generation, AdapterState.KNOWN, digest)
            except Cancelled:
                return
            except Exception as error:  # noqa: BLE001 - without this thread no adapter is known
                if not isinstance(error, Opaque):
                    logger.warning("tiered-kv: a LoRA adapter has no digest: %r", error)
                report = AdapterReport(adapter, generation, AdapterState.OPAQUE)
            del found
            with self._wake:
                self._digested.append(report)
