# SPDX-License-Identifier: Apache-2.0
"""What other engines hand over to this one: asked for early, pulled last, given back for certain.

Scheduler thread only. The device, host memory and disk are asked first; what they do not have, up
to the last token, is pulled from the producer's memory into the request's own blocks. A pull is the
one thing that may still write to device blocks when vLLM has been told that it is over, so these
blocks are held here until it is known that it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.protocol import PullJob, PullResult
from vllm_tiered_kv.remote.handoff import Handoff, PeerMemory, State
from vllm_tiered_kv.remote.params import Wish
from vllm_tiered_kv.remote.ticket import TicketError

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool
    from vllm_tiered_kv.remote.agent import RemoteAgent
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.requests import RequestState

LEASE_PATIENCE = 5.0
"""Seconds a look-up waits at most for a lease; what grants it is given up earlier."""
MAX_HELD_SHARE = 0.25
"""With more than this share of the device's blocks in quarantine nothing is pulled."""


class ActivePull:
    """A pull that vLLM waits for, or whose blocks may still be written.

    Args:
        handoff: whose memory is read.
        blocks: the device blocks it writes.
        tokens: that it brings.
    """

    __slots__ = ("blocks", "handoff", "nbytes", "seconds", "tokens", "writers")

    def __init__(self, handoff: Handoff, blocks: tuple[int, ...], tokens: int) -> None:
        self.handoff = handoff
        self.blocks = blocks
        self.tokens = tokens
        self.writers: set[int] = set()
        """Ranks on which it has been given up and may still write."""
        self.nbytes = 0
        self.seconds = 0.0

    def note(self, rank: int, result: PullResult) -> None:
        """One rank has ended it."""
        self.nbytes += result.nbytes
        self.seconds = max(self.seconds, result.seconds)
        if result.may_write:
            self.writers.add(rank)

    def is_good(self, now: float) -> bool:
        """Whether its lease held until the last byte had arrived: it still holds.

        Not by the ranks' clocks: a rank may be on another host.
        """
        return now <= self.handoff.valid_until


class Pulls:
    """Asks for hand-overs and pulls them.

    Args:
        core: what the scheduler half's parts share.
        agent: runs the control channel.
        deadline: seconds a read may take.
        verify: take nothing without checksums, and compare them.
    """

    def __init__(
        self, core: Core, agent: RemoteAgent, deadline: float, *, verify: bool = False
    ) -> None:
        self._core = core
        self._agent = agent
        self._deadline = deadline
        self._verify = verify
        self._pool: BlockPool | None = None
        self._known: dict[str, int] = {}
        """Engines whose memory the ranks know, and of which generation."""
        self._active: dict[int, ActivePull] = {}
        self._pulling: dict[tuple[str, int], int] = {}
        """By producer and lease, the pull under way that was begun last."""
        self._quarantined: dict[int, ActivePull] = {}
        self.held = 0
        """Blocks in quarantine."""
        self.peers: list[PeerMemory] = []
        """For the next plan."""
        self.gone: list[str] = []
        """For the next plan."""

    @property
    def quarantined(self) -> int:
        """Pulls that were given up and may still write."""
        return len(self._quarantined)

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    # -- look-up -----------------------------------------------------------------------

    def arrived(self, state: RequestState) -> None:
        """A request is new: ask for what was handed over to it."""
        if state.remote.wish is not Wish.RECEIVE or not self._agent.receives:
            return
        try:
            state.handoff = self._agent.open(state.remote.handoff)
        except TicketError as error:
            self._core.fail("remote_ticket", f"a hand-over is ignored: {error}")

    def beyond(self, state: RequestState, computed: int, local: int) -> tuple[int, int] | None:
        """The tokens that can be pulled beyond what the tiers have.

        Args:
            state: the request.
            computed: its tokens that the device holds.
            local: tokens beyond these that the tiers have.

        Returns:
            The first and the end; the same if there are none. None: ask again.
        """
        start = computed + local
        handoff = state.handoff
        if handoff is None:
            return start, start
        if handoff.state is State.ASKING:
            return None
        if handoff.state is State.OVER or not self._agent.receives or self._is_full:
            self.drop(state)
            return start, start
        if not self._fits(state, handoff):
            self._core.fail("remote_proof", "what was handed over is not of this prompt; ignored")
            self.drop(state)
            return start, start
        if self._verify and handoff.granted is not None and not handoff.granted.sums:
            self._core.fail(
                "remote_verify",
                "a hand-over without checksums is ignored: give the producer verify as well",
            )
            self.drop(state)
            return start, start
        end = handoff.ticket.tokens
        if start >= state.request.num_tokens - 1:
            return start, start  # the last token is computed in any case
        if _name(handoff) in self._pulling and self._will_be_there(state, start, end):
            return None
        return start, max(start, end)

    def patience(self, state: RequestState) -> float:
        """Seconds that the answer "ask again" may be given."""
        handoff = state.handoff
        if handoff is not None and handoff.state is State.GRANTED:
            return self._deadline  # another request's pull of the same has ended by then
        return LEASE_PATIENCE

    def _will_be_there(self, state: RequestState, start: int, end: int) -> bool:
        """Whether a request finds on the device some of what another one pulls: whole blocks, and
        never its last token's."""
        block = self._core.geometry.hash_tokens
        found = min(end, state.request.num_tokens - 1) // block
        return self._core.settings.shares_device_prefixes and found > start // block

    def drop(self, state: RequestState) -> None:
        """The request does not want what was handed over to it, or has it."""
        handoff, state.handoff = state.handoff, None
        if handoff is not None:
            self._agent.release(handoff)

    @property
    def _is_full(self) -> bool:
        if self._pool is None:
            return True
        return self.held > MAX_HELD_SHARE * compat.usable_blocks(self._pool)

    def _fits(self, state: RequestState, handoff: Handoff) -> bool:
        """Whether it is this prompt's KV, by its proof and by the blocks granted."""
        ticket, granted = handoff.ticket, handoff.granted
        geometry = self._core.geometry
        if granted is None or state.content is None or ticket.tokens > state.request.num_tokens:
            return False
        counts = [-(-ticket.tokens // tokens) for tokens in granted.block_tokens]
        if len(counts) != len(geometry.groups):
            return False
        if [len(blocks) for blocks in granted.blocks] != counts:
            return False
        if state.proven is not handoff:
            proof = compat.proof_of(
                state.request, ticket.tokens, geometry.hash_tokens, state.content.digest
            )
            if proof != ticket.proof:
                return False
            state.proven = handoff
        return True

    # -- pull --------------------------------------------------------------------------

    def plan(
        self,
        job: int,
        state: RequestState,
        start: int,
        end: int,
        tables: Sequence[Sequence[int]],
    ) -> tuple[PullJob, ActivePull] | None:
        """Pull tokens ``[start, end)`` into the request's blocks.

        The hand-over is the pull's from now on.

        Returns:
            None if that cannot be.
        """
        handoff, geometry = state.handoff, self._core.geometry
        granted = handoff.granted if handoff is not None else None
        if handoff is None or granted is None or handoff.state is not State.GRANTED:
            return None
        local, remote, skips = [], [], set()
        for group, table, theirs, size in zip(
            geometry.groups, tables, granted.blocks, granted.block_tokens, strict=True
        ):
            if start % group.block_tokens:
                return None
            first, last = start // group.block_tokens, -(-end // group.block_tokens)
            ours = tuple(table[first:last])
            if len(ours) < last - first or self._core.null_block in ours:
                return None
            local.append(ours)
            remote.append(tuple(theirs[start // size : -(-end // size)]))
            skips.add(start % size)
        if len(skips) != 1:
            return None
        self.introduce(granted.memory)
        active = ActivePull(handoff, tuple(b for group in local for b in group), end - start)
        self._active[job] = active
        self._pulling[_name(handoff)] = job
        state.handoff = None
        order = PullJob(
            granted.memory.engine,
            tuple(local),
            tuple(remote),
            self._deadline,
            granted.place,
            start,
            skips.pop(),
            granted.sums if self._verify else (),
        )
        return order, active

    def introduce(self, memory: PeerMemory) -> None:
        """Tell the ranks where a producer's memory is, if they do not know."""
        if self._known.get(memory.engine) != memory.generation:
            self._known[memory.engine] = memory.generation
            self.peers.append(memory)

    def told(self, job: int, *, good: bool) -> None:
        """vLLM learns that the load is over, and may free its blocks when this returns."""
        active = self._active.pop(job, None)
        if active is None:
            return
        if self._pulling.get(_name(active.handoff)) == job:
            del self._pulling[_name(active.handoff)]
        self._count(active, good=good)
        if not active.writers or self._pool is None:
            self._agent.release(active.handoff)
            return
        compat.hold_blocks(self._pool, active.blocks)
        self._quarantined[job] = active
        self.held += len(active.blocks)
        self._core.fail("remote_quarantine", "a pull was given up and may still write")

    def settled(self, rank: int, jobs: Sequence[int]) -> None:
        """On this rank these pulls can write no more."""
        for job in jobs:
            if (active := self._active.get(job)) is not None:
                active.writers.discard(rank)
            elif (active := self._quarantined.get(job)) is not None:
                active.writers.discard(rank)
                if not active.writers:
                    self._end_quarantine(job, active)

    def _end_quarantine(self, job: int, active: ActivePull) -> None:
        del self._quarantined[job]
        self.held -= len(active.blocks)
        if self._pool is not None:
            compat.let_go_blocks(self._pool, active.blocks)
        self._agent.release(active.handoff)

    def _count(self, active: ActivePull, *, good: bool) -> None:
        tally = self._core.tally
        tally.add(metrics.HANDOFFS.key("pulled" if good else "failed"))
        tally.add(metrics.BYTES.key("load", metrics.PEER), active.nbytes)
        tally.add(metrics.SECONDS.key("load", metrics.PEER), active.seconds)
        if good:
            tally.add(metrics.HIT_TOKENS.key(metrics.PEER), active.tokens)

    def take_in(self) -> None:
        """Take in what the agent has to say."""
        for engine in self._agent.take_gone():
            if self._known.pop(engine, None) is not None:
                self.peers = [memory for memory in self.peers if memory.engine != engine]
                self.gone.append(engine)


def _name(handoff: Handoff) -> tuple[str, int]:
    """What is the same for all who were handed the same."""
    return handoff.ticket.engine, handoff.ticket.lease
