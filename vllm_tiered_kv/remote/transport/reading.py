# SPDX-License-Identifier: Apache-2.0
"""What the threads that read and the threads that ask share: one lock around all of it.

Nothing here calls NIXL, and nothing waits for long: the engine's thread comes here.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.remote.transport import MAX_JOBS, Endpoint, Options, Read, ReadResult
from vllm_tiered_kv.remote.transport.generation import Generation
from vllm_tiered_kv.remote.transport.ledger import Failure, Job, Ledger, Ticket
from vllm_tiered_kv.remote.transport.pieces import Piece
from vllm_tiered_kv.remote.transport.regions import RegionError, RegionTable

logger = get_logger(__name__)

MAX_PEERS = 1024


class Reading:
    """The jobs, the peers and the agents of one rank.

    Args:
        options: how much may be under way, and when an agent has been stuck for too long.
        local: the memory that may be written.
        clock: monotonic seconds.
        notify: called without the lock when there is something to poll.
    """

    def __init__(
        self,
        options: Options,
        local: RegionTable,
        clock: Callable[[], float],
        notify: Callable[[], Any] | None,
    ) -> None:
        self.options = options
        self.local = local
        self.clock = clock
        self._notify = notify
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._version = 0
        self._ledger = Ledger(MAX_JOBS)
        self._endpoints: dict[str, Endpoint] = {}
        self._tables: dict[str, RegionTable] = {}
        self._refused: dict[str, str] = {}
        """Peers whose metadata couldn't be loaded, and why."""
        self.current: Generation | None = None
        """The agent for what comes; None while there is none."""
        self.old: Generation | None = None
        """The one before it, as long as it isn't destroyed."""
        self._count_lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._trouble = OncePerKind(logger)
        self.is_closing = False

    def _stir(self) -> None:
        self._version += 1
        self._wake.notify_all()

    @property
    def version(self) -> int:
        """Another number whenever a thread might find something to do."""
        return self._version

    @contextlib.contextmanager
    def locked(self) -> Iterator[Ledger]:
        """The lock, and the ledger; tells of what came up meanwhile."""
        with self._lock:
            news = self._ledger.news
            yield self._ledger
            has_news = self._ledger.news > news
        if self._notify is not None and has_news:
            try:
                self._notify()
            except Exception as error:  # noqa: BLE001 - theirs; ours go on
                self.count("remote_agent", f"notify failed: {error}")

    # -- for those who ask ------------------------------------------------------------------

    def connect(self, endpoint: Endpoint) -> None:
        peer = endpoint.incarnation
        try:
            table = RegionTable(endpoint.regions)
        except RegionError as error:
            self.count("remote_connect", f"a peer's memory makes no sense: {error}")
            return
        with self.locked():
            known = peer in self._endpoints
            has_room = known or len(self._endpoints) < MAX_PEERS
            if has_room and not self.is_closing and (not known or peer in self._refused):
                self._endpoints[peer] = endpoint
                self._tables[peer] = table
                self._refused.pop(peer, None)
                if self.current is not None:
                    self.current.want(peer)
                self._stir()
        if not has_room:
            self.count("remote_connect", f"{MAX_PEERS} peers are connected")

    def disconnect(self, peer: str) -> None:
        with self.locked() as ledger:
            self._endpoints.pop(peer, None)
            self._tables.pop(peer, None)
            self._refused.pop(peer, None)
            ledger.give_up_peer(peer, "remote_peer", "the peer was disconnected", self.clock())
            for generation in self.generations():
                generation.park(peer)
            self._stir()

    def start(self, read: Read) -> None:
        with self.locked() as ledger:
            failure = self._obstacle(ledger, read)
            if failure is not None:
                ledger.refuse(read.job, failure)
                return
            ledger.add(read, self.clock())
            if self.current is not None:
                self.current.want(read.peer)
            self._stir()

    def cancel(self, jobs: Sequence[int]) -> None:
        with self.locked() as ledger:
            for job in jobs:
                ledger.give_up(job, "", "called off", self.clock())

    def take_results(self) -> list[ReadResult]:
        with self._lock:
            # Also here: no thread of ours may be free to see it.
            self._ledger.give_up_late(self.clock())
            results = self._ledger.take_results()
        for result in results:
            if result.kind:
                self.count(result.kind, result.reason)
        return results

    def take_settled(self) -> list[int]:
        with self._lock:
            return self._ledger.take_settled()

    def take_counts(self) -> Mapping[str, int]:
        with self._count_lock:
            counts, self._counts = self._counts, Counter()
        return counts

    def count(self, kind: str, message: str) -> None:
        """Count a failure, and log the first of its kind."""
        with self._count_lock:
            self._counts[kind] += 1
        self._trouble.warn(kind, message)

    def close(self) -> None:
        """End every job; threads go."""
        with self.locked() as ledger:
            self.is_closing = True
            ledger.give_up_all("remote_shutdown", "the transport was closed", self.clock())
            self._stir()

    def _obstacle(self, ledger: Ledger, read: Read) -> Failure | None:
        if self.is_closing:
            return Failure("remote_shutdown", "the transport is closed")
        if self.current is None:
            return Failure("remote_agent", "this rank doesn't read")
        if read.peer not in self._endpoints:
            return Failure("remote_peer", "a read of a peer that isn't connected")
        if read.peer in self._refused:
            return Failure("remote_connect", self._refused[read.peer])
        if ledger.is_stuck(read.peer):
            # It would only take more memory into quarantine.
            return Failure("remote_peer", "a peer hasn't answered an earlier read")
        return None

    # -- for the threads that read ------------------------------------------------------------

    def next_unplanned(self) -> tuple[Job, RegionTable | None] | None:
        """A job to cut, and its peer's memory."""
        with self.locked() as ledger:
            job = ledger.next_unplanned()
            return None if job is None else (job, self._tables.get(job.peer))

    def planned(self, job: Job, plan: Sequence[Piece] | Failure) -> None:
        with self.locked() as ledger:
            ledger.planned(job, plan, self.clock())
            self._stir()

    def begin(self, own: Mapping[str, int]) -> tuple[Ticket, Generation] | None:
        """A piece to post, and the agent, entered; `own`: pieces a peer on this thread."""
        with self.locked() as ledger:
            ledger.give_up_late(self.clock())
            generation = self.current
            if generation is None or self.is_closing or not generation.enter():
                return None

            def may_begin(job: Job) -> int | None:
                if job.peer not in generation.connected:
                    return None
                if own.get(job.peer, 0) >= self.options.max_pieces or not _is_reached(job):
                    return None
                return generation.number

            ticket = ledger.begin(may_begin)
            if ticket is None:
                generation.leave()
                return None
            return ticket, generation

    def posted(self, ticket: Ticket, generation: Generation, handle: int) -> None:
        """A piece has a handle from now on."""
        with self._lock:
            generation.handles[ticket.number] = (ticket.peer, handle)

    def ended(self, ticket: Ticket, generation: Generation, failure: Failure | None) -> None:
        """A piece ended, and its handle is released or lost."""
        with self.locked() as ledger:
            generation.handles.pop(ticket.number, None)
            ledger.ended(ticket, failure, self.clock())
            if failure is not None and failure.kind == "remote_disconnected":
                generation.drop(ticket.peer)  # its connection is of no more use
                ledger.fail_peer(ticket.peer, failure, self.clock())
            self._stir()

    def enter(self, generation: Generation) -> bool:
        with self._lock:
            return not self.is_closing and generation.enter()

    def leave(self, generation: Generation) -> None:
        with self._lock:
            generation.leave()

    def is_active(self, jobs: Iterable[int]) -> bool:
        """Whether one of these jobs, or one with pieces to begin, may move soon."""
        with self._lock:
            return self._ledger.has_queued or any(map(self._ledger.is_running, jobs))

    def has_quarantine(self) -> bool:
        with self._lock:
            return self._ledger.quarantined_bytes() > 0

    def wait(self, version: int, seconds: float) -> bool:
        """Until something changed since `version`, at most this long; False when closing."""
        with self.locked() as ledger:
            ledger.give_up_late(self.clock())
            left = ledger.next_deadline - self.clock()
        with self._lock:
            if seconds > 0 and not self.is_closing and self._version == version:
                self._wake.wait(min(seconds, max(0.0, left)))
            return not self.is_closing

    # -- for the one that looks after the agents ------------------------------------------------

    def generations(self) -> list[Generation]:
        return [each for each in (self.current, self.old) if each is not None]

    def next_leaving(self, generation: Generation) -> str | None:
        with self._lock:
            return generation.next_leaving()

    def left(self, generation: Generation, peer: str) -> None:
        """A peer is disconnected."""
        with self._lock:
            generation.leaving.discard(peer)
            self._stir()

    def next_wanted(self, generation: Generation) -> tuple[str, Endpoint | None] | None:
        """A peer to connect; without an endpoint if it was forgotten meanwhile."""
        with self._lock:
            peer = generation.next_wanted()
            return None if peer is None else (peer, self._endpoints.get(peer))

    def connected(self, generation: Generation, peer: str) -> None:
        with self.locked():
            generation.wanted.discard(peer)
            generation.connected.add(peer)
            if peer not in self._endpoints:
                generation.park(peer)
            self._stir()

    def refused(self, generation: Generation, peer: str, reason: str) -> None:
        """A peer's metadata couldn't be loaded."""
        with self.locked() as ledger:
            generation.wanted.discard(peer)
            if peer in self._endpoints:
                self._refused[peer] = reason
            ledger.fail_peer(peer, Failure("remote_connect", reason), self.clock())

    def is_overdue(self) -> bool:
        """Whether what is in quarantine asks for a new agent, and there may be one."""
        with self._lock:
            if self.old is not None or self.current is None:
                return False
            since = self._ledger.quarantined_since()
            if since + self.options.quarantine_seconds <= self.clock():
                return True
            room = self.options.quarantine_share * self.local.nbytes
            return self._ledger.quarantined_bytes() > room

    def replace(self, generation: Generation | None) -> None:
        """Reads that come use this agent; the one there was retires."""
        with self.locked():
            if self.current is not None:
                self.current.is_retired = True
                self.old = self.current
            self.current = generation
            if generation is not None:
                generation.wanted.update(self._endpoints)
                generation.wanted.difference_update(self._refused)
            self._stir()

    def take_old(self) -> Generation | None:
        """The retired agent if it may be destroyed now: nobody calls it any more."""
        with self._lock:
            old = self.old
            if old is None or old.is_undead or self._ledger.runs_on(old.number):
                return None
            return old if old.close() else None

    def gone(self, generation: Generation) -> None:
        """An agent was destroyed."""
        with self.locked() as ledger:
            failure = Failure("remote_rebuilt", "the agent that read was replaced")
            ledger.agent_gone(generation.number, failure, self.clock())
            generation.handles.clear()
            if self.old is generation:
                self.old = None
            if self.current is generation:
                self.current = None
            self._stir()


def _is_reached(job: Job) -> bool:
    """Whether the work that a job must come after is done."""
    if job.after is None:
        return True
    try:
        if not job.after.query():
            return False
    except RuntimeError:
        return False  # the device failed; the deadline ends it
    job.after = None
    return True
