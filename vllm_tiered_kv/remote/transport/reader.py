# SPDX-License-Identifier: Apache-2.0
"""The threads that read: post pieces, see how far they are, and look after the agents.

In host memory NIXL copies inside the call that posts, without the GIL; elsewhere a piece is under
way after it and is asked about until it is done. A thread posts and asks for pieces of its own, so
each uses UCX's state for itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_tiered_kv.remote.transport.agent import Agent, AgentError, State
from vllm_tiered_kv.remote.transport.generation import Generation
from vllm_tiered_kv.remote.transport.ledger import Failure, Ticket
from vllm_tiered_kv.remote.transport.pieces import RangeError, plan_pieces
from vllm_tiered_kv.remote.transport.reading import Reading

IDLE_SECONDS = 5.0
SHORTEST_PAUSE = 50e-6
LONGEST_PAUSE = 5e-4
"""Seconds between two looks at pieces under way: longer and longer while nothing happens."""
STUCK_PAUSE = 0.05
"""The same, while there are none but those of jobs that ended."""
REBUILD_PAUSE = 5.0
"""Seconds between two attempts to make an agent."""

MakeAgent = Callable[[], Agent]


class Posted(NamedTuple):
    """A piece under way on this thread."""

    ticket: Ticket
    generation: Generation
    handle: int


class Reader:
    """One thread.

    Args:
        reading: what it shares with the others.
        name: the thread's.
        cpus: processors it may use; empty: where it is.
        device: the GPU that local memory is on; None where there is none.
        keeper: set on one thread: it also looks after the agents.
    """

    def __init__(
        self,
        reading: Reading,
        name: str,
        cpus: Iterable[int],
        device: int | None,
        keeper: Keeper | None = None,
    ) -> None:
        self._reading = reading
        self._cpus = frozenset(cpus)
        self._device = device
        self._keeper = keeper
        self._posted: list[Posted] = []
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        settle(self._cpus, self._device)
        pause = SHORTEST_PAUSE
        while True:
            version = self._reading.version
            try:
                moved = self._turn()
            except Exception as error:  # noqa: BLE001 - the thread never dies
                self._reading.count("remote_agent", f"reading failed: {error!r}")
                moved = False
            pause = SHORTEST_PAUSE if moved else min(2 * pause, LONGEST_PAUSE)
            if not self._reading.wait(version, 0.0 if moved else self._pause(pause)):
                return

    def _turn(self) -> bool:
        """One piece of everything there is to do; whether anything was."""
        moved = self._keeper.look() if self._keeper is not None else False
        moved |= self._plan()
        moved |= self._post()
        return self._check() or moved

    def _pause(self, pause: float) -> float:
        if self._reading.is_active(posted.ticket.job for posted in self._posted):
            return pause
        waits = self._keeper is not None and self._keeper.is_waiting()
        return STUCK_PAUSE if waits or self._posted else IDLE_SECONDS

    def _plan(self) -> bool:
        found = self._reading.next_unplanned()
        if found is None:
            return False
        job, remote = found
        read = job.read
        if read is None or remote is None:
            self._reading.planned(job, Failure("remote_peer", "the peer was disconnected"))
            return True
        try:
            options = self._reading.options
            local, threads = self._reading.local, max(1, options.threads)
            plan = plan_pieces(read, local, remote, options.piece_bytes, threads)
        except RangeError as error:
            self._reading.planned(job, Failure("remote_range", str(error)))
            return True
        except Exception as error:  # noqa: BLE001 - the job fails, whatever it is
            self._reading.planned(job, Failure("remote_range", f"no plan: {error!r}"))
            return True
        self._reading.planned(job, plan)
        return True

    def _post(self) -> bool:
        found = self._reading.begin(Counter(posted.ticket.peer for posted in self._posted))
        if found is None:
            return False
        ticket, generation = found
        try:
            self._post_piece(ticket, generation)
        except Exception as error:  # noqa: BLE001 - nothing is known of the piece any more
            failure = Failure("remote_agent", f"a read failed: {error!r}", certain=False)
            self._reading.ended(ticket, generation, failure)
        finally:
            self._reading.leave(generation)
        return True

    def _post_piece(self, ticket: Ticket, generation: Generation) -> None:
        agent = generation.agent
        try:
            handle = agent.prepare(ticket.peer, ticket.piece)
        except AgentError as error:
            self._reading.ended(ticket, generation, _failure(error, certain=True))
            return
        self._reading.posted(ticket, generation, handle)
        posted = Posted(ticket, generation, handle)
        try:
            state = agent.post(handle)
        except AgentError as error:
            self._failed(posted, error)
            return
        if state is State.DONE:
            self._done(posted)
        else:
            self._posted.append(posted)

    def _check(self) -> bool:
        """Look at every piece under way; whether one ended."""
        left = []
        for posted in self._posted:
            if not self._reading.enter(posted.generation):
                continue  # it ends with its agent
            try:
                if self._is_under_way(posted):
                    left.append(posted)
            finally:
                self._reading.leave(posted.generation)
        ended = len(left) < len(self._posted)
        self._posted = left
        return ended

    def _is_under_way(self, posted: Posted) -> bool:
        try:
            if posted.generation.agent.check(posted.handle) is State.UNDER_WAY:
                return True
        except AgentError as error:
            self._failed(posted, error)
            return False
        self._done(posted)
        return False

    def _done(self, posted: Posted) -> None:
        self._release(posted)
        self._reading.ended(posted.ticket, posted.generation, None)

    def _failed(self, posted: Posted, error: AgentError) -> None:
        if not error.deleted:
            self._release(posted)
        failure = _failure(error, certain=error.disconnected)
        self._reading.ended(posted.ticket, posted.generation, failure)

    def _release(self, posted: Posted) -> None:
        # What fails here has ended all the same; its handle goes with the agent.
        with contextlib.suppress(AgentError):
            posted.generation.agent.release(posted.handle)


class Keeper:
    """Makes agents, connects their peers, and ends agents that are stuck."""

    def __init__(self, reading: Reading, make_agent: MakeAgent) -> None:
        self._reading = reading
        self._make_agent = make_agent
        self._made = 0
        self._next_attempt = 0.0

    def first(self) -> None:
        """Make the first agent.

        Raises:
            AgentError: it can't be had.
        """
        self._made += 1
        self._reading.replace(Generation(self._made, self._make_agent()))

    def look(self) -> bool:
        """Do what is to be done; whether anything was."""
        moved = False
        for generation in self._reading.generations():
            if not self._reading.enter(generation):
                continue
            try:
                moved |= self._disconnect(generation)
                moved |= not generation.is_retired and self._connect(generation)
            finally:
                self._reading.leave(generation)
        self._renew()
        return self._destroy_old() or moved

    def is_waiting(self) -> bool:
        """Whether there is something to look after that nobody wakes us for."""
        return self._reading.has_quarantine() or any(
            generation.leaving or (generation.is_retired and not generation.is_undead)
            for generation in self._reading.generations()
        )

    def _disconnect(self, generation: Generation) -> bool:
        peer = self._reading.next_leaving(generation)
        if peer is None:
            return False
        try:
            generation.agent.disconnect(peer)
        except AgentError as error:
            self._reading.count("remote_agent", f"a peer could not be disconnected: {error}")
        self._reading.left(generation, peer)
        return True

    def _connect(self, generation: Generation) -> bool:
        found = self._reading.next_wanted(generation)
        if found is None:
            return False
        peer, endpoint = found
        if endpoint is None:
            self._reading.refused(generation, peer, "the peer was disconnected")
            return True
        try:
            generation.agent.connect(endpoint)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this peer's
            self._reading.refused(generation, peer, f"a peer's metadata was refused: {error!r}")
            return True
        self._reading.connected(generation, peer)
        return True

    def _renew(self) -> None:
        """Replace an agent that has been stuck for long."""
        now = self._reading.clock()
        if not self._reading.is_overdue() or now < self._next_attempt:
            return
        self._next_attempt = now + REBUILD_PAUSE
        try:
            self.first()
        except AgentError as error:
            self._reading.count("remote_agent", f"no new agent: {error}")
            return
        self._reading.count("remote_rebuilt", "a peer doesn't answer; the agent was made anew")

    def _destroy_old(self) -> bool:
        old = self._reading.take_old()
        return old is not None and self.destroy(old)

    def destroy(self, generation: Generation) -> bool:
        """End an agent that nobody calls any more; False if it lives on, with all that it reads."""
        handles = [handle for _, handle in generation.handles.values()]
        if not generation.agent.destroy(handles):
            generation.is_undead = True
            self._reading.count("remote_agent", "an agent did not end; what it reads may go on")
            return False
        self._reading.gone(generation)
        return True


def settle(cpus: frozenset[int], device: int | None) -> None:
    """Make the calling thread one of ours: where it runs, and on which GPU."""
    if cpus:
        with contextlib.suppress(OSError):  # a processor went: run as we are
            os.sched_setaffinity(0, cpus)
    if device is not None:
        import torch

        torch.cuda.set_device(device)


def _failure(error: AgentError, *, certain: bool) -> Failure:
    kind = "remote_disconnected" if error.disconnected else "remote_agent"
    return Failure(kind, f"a read failed: {error}", certain)
