# SPDX-License-Identifier: Apache-2.0
"""What this engine hands over to others: memory held under a lease, and given back.

Scheduler thread only. Device blocks are held by a reference of our own in the block pool, so that
the request ends as any other and vLLM waits for nothing: no step need be run to say that a consumer
is done, and none is while an engine idles. Where the KV is copied to CPU slots first, or checksums
of it are made, vLLM keeps the blocks, and goes on with steps, for just that long.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.protocol import SumJob
from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.remote.options import Handoff
from vllm_tiered_kv.remote.params import Wish, answer
from vllm_tiered_kv.remote.serving import Offer
from vllm_tiered_kv.scheduler.lending import Effort, Lender, Loan

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool
    from vllm_tiered_kv.remote.agent import RemoteAgent
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.index import Node
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.stores import StorePlanner

PATIENCE = 0.75
"""Seconds that copies, and checksums, may take; a consumer waits twice as long for an answer."""
SHORT_OF_BLOCKS = 0.5
"""With less than this share of the device's blocks free, to hold some takes others' room."""

Tables = tuple[tuple[int, ...], ...]


class HandingOptions(msgspec.Struct, frozen=True):
    """What hand-overs are served from, and how."""

    handoff: Handoff = Handoff.DEVICE
    verify: bool = False
    """Make checksums."""


class Handed(NamedTuple):
    """What a request leaves behind."""

    params: dict[str, Any]
    """That a consumer goes on from."""
    waits: bool
    """Whether vLLM is to keep its blocks until it is told otherwise."""


class _Stage(enum.Enum):
    COPYING = "copying"
    SUMMING = "summing"
    OFFERED = "offered"


class _HandOver:
    """One prompt, from its end to the end of its lease."""

    __slots__ = (
        "blocks",
        "is_awaited",
        "is_held",
        "loan",
        "request_id",
        "since",
        "stage",
        "sums",
        "tokens",
    )

    def __init__(self, request_id: str, tokens: int, blocks: Tables, loan: Loan | None) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.blocks = blocks
        """On the device, by KV cache group."""
        self.loan = loan
        """Slots it is read from; None: it is read from the blocks."""
        self.stage = _Stage.COPYING
        self.since = 0.0
        """When the stage began."""
        self.sums: dict[int, tuple[bytes, ...]] = {}
        """By rank."""
        self.is_held = False
        """Whether the blocks are held by a reference of ours."""
        self.is_awaited = False
        """Whether vLLM keeps the blocks until it is told otherwise."""


class HandOvers:
    """Offers what requests leave behind.

    Args:
        core: what the scheduler half's parts share.
        agent: runs the control channel.
        stores: copies out of the device.
        engine_id: vLLM's name of this engine.
        tensor_parallel: its ranks that share a layer.
        options: what hand-overs are served from.
    """

    def __init__(
        self,
        core: Core,
        agent: RemoteAgent,
        stores: StorePlanner,
        engine_id: str,
        tensor_parallel: int,
        options: HandingOptions,
    ) -> None:
        self._core = core
        self._agent = agent
        self._engine_id = engine_id
        self._tensor_parallel = tensor_parallel
        self._options = options
        self._pool: BlockPool | None = None
        self._lender = Lender(core.index, core.geometry, stores)
        stores.on_end = self.stored
        self._all: dict[int, _HandOver] = {}
        """By lease."""
        self._waiting: dict[int, _HandOver] = {}
        """Those that vLLM keeps the blocks of; the one that has waited longest first."""
        self._awaited: dict[Node, list[int]] = {}
        """Leases by slots that are being written."""
        self.sums: list[SumJob] = []
        """For the next plan."""
        self.sent: list[str] = []
        """For the next plan."""

    def __len__(self) -> int:
        return len(self._all)

    @property
    def slots(self) -> int:
        """Slots on each rank that are held."""
        return self._lender.slots

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    # -- a request ends ----------------------------------------------------------------

    def finished(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> Handed | None:
        """A request ends, and its blocks are freed after this call unless they are waited for.

        Returns:
            None if nothing is handed over.
        """
        if state.remote.wish is not Wish.SEND or not compat.ended_well(state.request):
            return None
        tokens = self._tokens(state)
        blocks = self._blocks(tokens, block_ids)
        if not tokens or blocks is None:
            return None
        proof = self._proof(state, tokens)
        if proof is None:
            self._core.fail("remote_proof", "what a prompt's KV stands for cannot be told")
            return None
        given = self._agent.promise(tokens, proof)
        if given is None:
            self._core.fail("remote_not_ready", "a prompt's KV cannot be handed over now")
            return None
        ticket, sealed = given
        loan = self._loan(state, tokens, blocks)
        hand = _HandOver(state.request.request_id, tokens, blocks, loan)
        self._begin(ticket.lease, hand)
        self._core.tally.add(metrics.HANDOFFS.key("offered"))
        params = answer(
            ticket,
            sealed,
            engine_id=self._engine_id,
            request_id=hand.request_id,
            blocks=blocks,
            tensor_parallel=self._tensor_parallel,
        )
        hand.is_awaited = hand.stage is not _Stage.OFFERED
        return Handed(params, hand.is_awaited)

    def _tokens(self, state: RequestState) -> int:
        """Tokens of the prompt whose KV is there and can be offered."""
        stale = state.epoch != self._core.epoch or state.unsure or state.content is None
        if stale or not self._agent.sends or self._pool is None:
            return 0
        request = state.request
        return int(min(request.num_computed_tokens, request.num_prompt_tokens))

    def _blocks(self, tokens: int, block_ids: Sequence[Sequence[int]]) -> Tables | None:
        """The prompt's blocks; None if they do not hold the prompt."""
        groups = []
        for group, table in zip(self._core.geometry.groups, block_ids, strict=True):
            count = -(-tokens // group.block_tokens)
            blocks = tuple(table[:count])
            if len(blocks) < count or self._core.null_block in blocks:
                return None
            groups.append(blocks)
        return tuple(groups)

    def _proof(self, state: RequestState, tokens: int) -> bytes | None:
        content = state.content.digest if state.content is not None else b""
        hash_tokens = self._core.geometry.hash_tokens
        return compat.proof_of(state.request, tokens, hash_tokens, content)

    def _loan(self, state: RequestState, tokens: int, blocks: Tables) -> Loan | None:
        """Slots for the prompt, where it is to be read from slots and they can be had."""
        handoff = self._options.handoff
        if handoff is Handoff.CPU:
            return self._lender.lend(state, tokens, blocks, Effort.ANY)
        if handoff is Handoff.AUTO and self._is_short_of_blocks:
            return self._lender.lend(state, tokens, blocks, Effort.SPARE)
        return None

    @property
    def _is_short_of_blocks(self) -> bool:
        pool = self._pool
        if pool is None:
            return False
        return compat.free_blocks(pool) < SHORT_OF_BLOCKS * compat.usable_blocks(pool)

    # -- until it can be read ----------------------------------------------------------

    def _begin(self, lease: int, hand: _HandOver) -> None:
        self._all[lease] = hand
        for node in hand.loan.awaits if hand.loan is not None else ():
            self._awaited.setdefault(node, []).append(lease)
        self._enter(lease, hand, _Stage.COPYING)
        self._go_on(lease, hand)

    def _enter(self, lease: int, hand: _HandOver, stage: _Stage) -> None:
        self._waiting.pop(lease, None)
        hand.stage = stage
        hand.since = self._core.clock()
        if stage is not _Stage.OFFERED:
            self._waiting[lease] = hand

    def _go_on(self, lease: int, hand: _HandOver) -> None:
        """Enter the next stage, if nothing keeps it in this one."""
        if hand.loan is not None and hand.loan.awaits:
            return
        if self._options.verify and hand.stage is _Stage.COPYING:
            self.sums.append(SumJob(lease, hand.tokens, *self._place(hand)))
            self._enter(lease, hand, _Stage.SUMMING)
            return
        self._offer(lease, hand)

    def _offer(self, lease: int, hand: _HandOver) -> None:
        """It can be read from now on."""
        self._enter(lease, hand, _Stage.OFFERED)
        place, numbers = self._place(hand)
        sums = tuple(hand.sums[rank] for rank in sorted(hand.sums))
        self._agent.settle(lease, Offer(hand.tokens, numbers, place, sums))
        if place is Place.SLOTS:
            self._core.tally.add(metrics.HANDOFFS.key("early"))
        elif self._pool is not None:
            compat.hold_blocks(self._pool, _flat(hand.blocks))
            hand.is_held = True
        self._let_vllm_go_on(hand)

    def _let_vllm_go_on(self, hand: _HandOver) -> None:
        if hand.is_awaited:
            hand.is_awaited = False
            self.sent.append(hand.request_id)

    def _stay(self, lease: int, hand: _HandOver) -> None:
        """It can't be read from slots: offer the blocks."""
        self._core.fail("remote_slots", "a hand-over's copy failed, or took too long: not early")
        self._return(lease, hand)
        self._go_on(lease, hand)

    def _return(self, lease: int, hand: _HandOver) -> None:
        """Give the slots back; what is still written to them ends by itself."""
        loan, hand.loan = hand.loan, None
        if loan is None:
            return
        for node in loan.awaits:
            leases = [other for other in self._awaited.pop(node, ()) if other != lease]
            if leases:
                self._awaited[node] = leases
        self._lender.give_back(loan)

    def _place(self, hand: _HandOver) -> tuple[Place, Tables]:
        if hand.loan is None:
            return Place.PAGES, hand.blocks
        return Place.SLOTS, hand.loan.slots(len(self._core.geometry.groups))

    # -- what comes of it --------------------------------------------------------------

    def stored(self, node: Node, good: bool) -> None:
        """Slots have been written to, and can be read or not."""
        for lease in self._awaited.pop(node, ()):
            hand = self._all.get(lease)
            if hand is None or hand.loan is None:
                continue
            hand.loan.awaits.discard(node)
            if good:
                self._go_on(lease, hand)
            else:
                self._stay(lease, hand)

    def summed(self, rank: int, lease: int, sums: tuple[bytes, ...]) -> None:
        """A rank has made its checksums."""
        hand = self._waiting.get(lease)
        if hand is None or hand.stage is not _Stage.SUMMING:
            return
        hand.sums[rank] = sums
        if len(hand.sums) == self._core.settings.world_size:
            self._offer(lease, hand)

    def take_in(self) -> None:
        """Give back what nobody reads any more, and wait for nothing too long."""
        for lease in self._agent.take_freed():
            hand = self._all.pop(lease, None)
            if hand is not None:
                self._end(lease, hand)
        if not self._waiting:
            return
        now = self._core.clock()
        while (lease := next(iter(self._waiting), None)) is not None:
            hand = self._waiting[lease]
            if now - hand.since < PATIENCE:
                return
            if hand.stage is _Stage.COPYING:
                self._stay(lease, hand)
            else:
                self._core.fail("remote_verify", "checksums of a hand-over took too long: none")
                hand.sums.clear()
                self._offer(lease, hand)

    def _end(self, lease: int, hand: _HandOver) -> None:
        """Nobody reads it any more."""
        self._waiting.pop(lease, None)
        self._return(lease, hand)
        self._let_vllm_go_on(hand)
        if hand.is_held and self._pool is not None:
            compat.let_go_blocks(self._pool, _flat(hand.blocks))


def _flat(tables: Tables) -> tuple[int, ...]:
    return tuple(block for group in tables for block in group)
