# SPDX-License-Identifier: Apache-2.0
"""What other engines hand over to this one: asked for early, pulled last, given back for certain.

Scheduler thread only. The device, host memory and disk are asked first; what they do not have, up
to the last token, is pulled from the producer's memory into the request's own blocks. A pull is the
one thing that may still write to device blocks when vLLM has been told that it is over, so these
blocks are held here until it is known that it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.protocol import PullJob, PullResult
from vllm_tiered_kv.remote.handoff import Granted, Handoff, PeerMemory, State
from vllm_tiered_kv.remote.params import Wish
from vllm_tiered_kv.remote.ticket import TicketError

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool
    from vllm_tiered_kv.geometry import GroupGeometry
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
        granted = handoff.granted
        if granted is None or not self._fits(state, handoff, granted):
            self._core.fail("remote_proof", "what was handed over is not of this prompt; ignored")
            self.drop(state)
            return start, start
        if self._verify and not granted.sums:
            self._core.fail(
                "remote_verify",
                "a hand-over without checksums is ignored: give the producer verify as well",
            )
            self.drop(state)
            return start, start
        if start >= state.request.num_tokens - 1:
            return start, start  # the last token is computed in any case
        end = self._end(state, handoff)
        if not self._fills(granted, handoff.ticket.tokens, start, end):
            self._core.fail(
                "remote_pages",
                "a hand-over is ignored: a sliding window begins within one of our blocks, which "
                "are larger than the producer's; give both engines the same block size",
            )
            self.drop(state)
            return start, start
        if _name(handoff) in self._pulling and self._will_be_there(state, start, end):
            return None
        return start, max(start, end)

    def patience(self, state: RequestState) -> float:
        """Seconds that the answer "ask again" may be given."""
        handoff = state.handoff
        if handoff is not None and handoff.state is State.GRANTED:
            return self._deadline  # another request's pull of the same has ended by then
        return LEASE_PATIENCE

    def _end(self, state: RequestState, handoff: Handoff) -> int:
        """How many of a prompt's tokens are taken at most.

        Where there are sliding windows not the last one: vLLM computes it again, and its window
        begins one token before the blocks that vLLM has when the token is there.
        """
        tokens, known = handoff.ticket.tokens, state.request.num_tokens
        return tokens if self._core.geometry.keeps_all else min(tokens, known - 1)

    def _fills(self, granted: Granted, tokens: int, start: int, end: int) -> bool:
        """Whether all of the blocks that vLLM allocates for tokens ``[start, end)`` are written.

        One of which only a part is would be taken for whole later, by vLLM and by the tiers.

        Args:
            granted: the KV of so many ``tokens``; in the first slot, if it is in slots, what the
                producer's window has left behind is missing.
        """
        return all(
            group.first_handed_token(tokens, size) <= max(start, _first_kept(group, end))
            for group, size in zip(self._core.geometry.groups, granted.page_tokens, strict=True)
        )

    def _will_be_there(self, state: RequestState, start: int, end: int) -> bool:
        """Whether a request finds on the device some of what another one pulls: whole blocks, and
        never its last token's. A sliding window must be there from its first token on."""
        groups = self._core.geometry.groups
        block = math.lcm(*(group.block_tokens for group in groups))
        found = min(end, state.request.num_tokens - 1) // block * block
        if not self._core.settings.shares_device_prefixes or found <= start:
            return False
        return all(
            _first_kept(group, end) <= max(start, _first_kept(group, found)) for group in groups
        )

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

    def _fits(self, state: RequestState, handoff: Handoff, granted: Granted) -> bool:
        """Whether it is this prompt's KV, by its proof and by the blocks granted."""
        ticket, geometry, sizes = handoff.ticket, self._core.geometry, granted.block_tokens
        if state.content is None or ticket.tokens > state.request.num_tokens:
            return False
        if len(sizes) != len(geometry.groups):
            return False
        counts = [
            -(-ticket.tokens // size) - group.first_handed_token(ticket.tokens, size) // size
            for group, size in zip(geometry.groups, sizes, strict=True)
        ]
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
        local, skips, null = [], [], self._core.null_block
        for group, table, size in zip(geometry.groups, tables, granted.block_tokens, strict=True):
            if start % group.block_tokens:
                return None
            # Where a window has moved on vLLM has no blocks.
            first = max(start, _first_kept(group, end))
            ours = _blocks_of(group, table, first, end)
            gone = _blocks_of(group, table, start, first)
            if ours is None or gone is None or set(gone) - {null} or null in ours:
                return None
            skip = first - group.first_handed_token(handoff.ticket.tokens, size)
            if skip < 0:
                return None
            local.append(ours)
            skips.append(skip)
        self.introduce(granted.memory)
        active = ActivePull(handoff, tuple(b for group in local for b in group), end - start)
        self._active[job] = active
        self._pulling[_name(handoff)] = job
        state.handoff = None
        order = PullJob(
            granted.memory.engine,
            tuple(local),
            granted.blocks,
            self._deadline,
            tuple(skips),
            granted.place,
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
        # An engine that idles hears of the read's end with its next step, which may be long after.
        self._agent.lapse(active.handoff)
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


def _first_kept(group: GroupGeometry, computed: int) -> int:
    """The first token of the blocks that vLLM has of a request with so many computed tokens."""
    return group.first_needed_token(computed) // group.block_tokens * group.block_tokens


def _blocks_of(
    group: GroupGeometry, table: Sequence[int], start: int, end: int
) -> tuple[int, ...] | None:
    """The blocks of tokens ``[start, end)``, which begin with a block; None if the table ends
    before."""
    first, last = start // group.block_tokens, -(-end // group.block_tokens)
    return tuple(table[first:last]) if last <= len(table) else None


def _name(handoff: Handoff) -> tuple[str, int]:
    """What is the same for all who were handed the same."""
    return handoff.ticket.engine, handoff.ticket.lease
