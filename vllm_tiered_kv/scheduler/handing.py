# SPDX-License-Identifier: Apache-2.0
"""What this engine hands over to others: memory held under a lease, and given back.

Scheduler thread only. Device blocks are held by a reference of our own in the block pool, so that
the request ends as any other and vLLM waits for nothing: no step need be run to say that a consumer
is done, and none is while an engine idles. Where the KV is copied to CPU slots first, or checksums
of it are made, vLLM keeps the blocks, and goes on with steps, for just that long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.remote.memory import Place
from vllm_tiered_kv.remote.options import Handoff
from vllm_tiered_kv.remote.params import answer
from vllm_tiered_kv.remote.serving import Offer
from vllm_tiered_kv.scheduler.lending import Effort, Extent, Lender, Loan, Tables
from vllm_tiered_kv.scheduler.readying import HandOver, Readying, Stage

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool
    from vllm_tiered_kv.remote.agent import RemoteAgent
    from vllm_tiered_kv.remote.ticket import Ticket
    from vllm_tiered_kv.scheduler.adapters import Content
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.stores import StorePlanner

SHORT_OF_BLOCKS = 0.5
"""With less than this share of the device's blocks free, to hold some takes others' room."""
NO_BLOCKS = Extent((), ())
"""All of it is in slots."""


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
        self.readying = Readying(
            self._lender,
            core.settings.world_size,
            lambda: core.clock(),
            self._offer,
            core.fail,
            verify=options.verify,
        )
        stores.on_end = self.readying.stored
        self._all: dict[int, HandOver] = {}
        """By lease."""
        self._fresh: list[tuple[int, Content]] = []
        """Leases that are offered before it is known which LoRA weights were there in the end."""
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

    def planned(
        self, state: RequestState, computed: int, tables: Callable[[], Sequence[Sequence[int]]]
    ) -> None:
        """A step is planned; begin with the one that completes the prompt.

        What is to be copied is copied then. And where there are sliding windows, what they leave
        behind until the request ends is held: vLLM frees it, even the block in which the last
        token's window begins, before it says that the request has ended.

        Args:
            state: a request that is to be handed over.
            computed: its tokens that are computed then.
            tables: its block tables.
        """
        if state.handing is not None or computed < state.request.num_prompt_tokens:
            return
        if self._options.handoff is Handoff.DEVICE and self._core.geometry.keeps_all:
            return
        if not self._is_ready(state):
            return
        hand = self._prepare(state, state.request.num_prompt_tokens, tables())
        if hand is not None:
            self._keep(hand, state.request.max_tokens)
        state.handing = hand

    def preempted(self, state: RequestState) -> None:
        """The request loses its blocks: what is held of them may be what it lacks to run again.

        It is not held a second time, which could cost it its blocks once more.
        """
        if state.handing is not None:
            self._let_go(state.handing)

    def drop(self, state: RequestState) -> None:
        """The request is not handed over."""
        hand, state.handing = state.handing, None
        if hand is not None:
            self._end(hand)

    def finished(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> Handed | None:
        """A request that asked for it ends; its blocks are freed after this call unless waited for.

        Returns:
            None if nothing is handed over.
        """
        hand = self._prepared(state, block_ids)
        if hand is None:
            self.drop(state)
            return None
        given = self._promise(state, hand)
        if given is None:
            self._end(hand)
            return None
        ticket, sealed = given
        self._all[ticket.lease] = hand
        self.readying.start(hand, ticket.lease)
        if state.content is not None and state.content.use is not None:
            self._fresh.append((ticket.lease, state.content))
        self._core.tally.add(metrics.HANDOFFS.key("offered"))
        params = answer(
            ticket,
            sealed,
            engine_id=self._engine_id,
            request_id=hand.request_id,
            blocks=hand.blocks.numbers,
            tensor_parallel=self._tensor_parallel,
        )
        hand.is_awaited = hand.stage is not Stage.READY
        return Handed(params, hand.is_awaited)

    def _prepared(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> HandOver | None:
        """What to hand over of a request that has ended; None if nothing."""
        request = state.request
        if not compat.ended_well(request):
            return None
        if not self._is_ready(state):
            self._core.fail("remote_not_ready", self._why_not)
            return None
        tokens = int(min(request.num_computed_tokens, request.num_prompt_tokens))
        if tokens < 1:
            return None
        hand = state.handing
        if hand is None or (hand.version, hand.tokens) != (_version(state), tokens):
            self.drop(state)
            return self._prepare(state, tokens, block_ids)
        blocks = self._blocks(tokens, block_ids, hand.kept)
        if blocks is None and (hand.loan is None or hand.loan.awaits):
            return None
        state.handing = None
        hand.blocks = blocks or NO_BLOCKS  # others, if it was preempted since
        return hand

    def _prepare(
        self, state: RequestState, tokens: int, tables: Sequence[Sequence[int]]
    ) -> HandOver | None:
        """See that its bytes get to where they will be read from; None if they can't be had."""
        blocks = self._blocks(tokens, tables)
        if blocks is None:
            return None
        loan = self._loan(state, tokens, blocks)
        hand = HandOver(state.request.request_id, _version(state), tokens, blocks, loan)
        self.readying.prepare(hand)
        return hand

    def _promise(self, state: RequestState, hand: HandOver) -> tuple[Ticket, str] | None:
        proof = self._proof(state, hand.tokens)
        if proof is None:
            self._core.fail("remote_proof", "what a prompt's KV stands for cannot be told")
            return None
        given = self._agent.promise(hand.tokens, proof)
        if given is None:
            self._core.fail("remote_not_ready", "a prompt's KV cannot be handed over now")
        return given

    def _is_ready(self, state: RequestState) -> bool:
        """Whether a request's KV can be offered, as far as is known."""
        stale = state.epoch != self._core.epoch or state.unsure or state.content is None
        return not stale and self._agent.sends and self._pool is not None

    @property
    def _why_not(self) -> str:
        why = "its caches were reset meanwhile, or its adapter is in doubt"
        if not self._agent.sends:
            why = (
                "this engine is not ready (its first request is never handed over, and none before "
                "its weights are digested), or was told not to"
            )
        return f"a prompt that a router asked for is not handed over: {why}"

    def _blocks(
        self, tokens: int, block_ids: Sequence[Sequence[int]], kept: Tables = ()
    ) -> Extent | None:
        """The prompt's blocks; None if they do not hold the prompt.

        Args:
            tokens: of the prompt.
            block_ids: the request's block table, one list a group.
            kept: blocks that are in place of the first ones, by group; none: none are.
        """
        groups, firsts = [], []
        for g, (group, table) in enumerate(zip(self._core.geometry.groups, block_ids, strict=True)):
            first = group.first_handed_token(tokens, group.block_tokens)
            start, end = first // group.block_tokens, -(-tokens // group.block_tokens)
            ahead = kept[g] if kept else ()
            blocks = (*ahead, *table[start + len(ahead) : end])
            if len(blocks) < end - start or self._core.null_block in blocks:
                return None
            groups.append(blocks)
            firsts.append(first)
        return Extent(tuple(groups), tuple(firsts))

    def _keep(self, hand: HandOver, max_tokens: int) -> None:
        """Hold what leaves the window before a request with so many tokens to say has ended."""
        pool = self._pool
        if pool is None:
            return
        end = hand.tokens - 1 + max_tokens + self._core.settings.draft_tokens
        kept = []
        tables, firsts = hand.blocks
        for group, table, first in zip(self._core.geometry.groups, tables, firsts, strict=True):
            gone = group.first_needed_token(end) // group.block_tokens
            kept.append(table[: max(0, gone - first // group.block_tokens)])
        hand.kept = tuple(kept)
        compat.hold_blocks(pool, _flat(hand.kept))

    def _let_go(self, hand: HandOver) -> None:
        """Undo :meth:`_keep`, once."""
        kept, hand.kept = hand.kept, ()
        if kept and self._pool is not None:
            compat.let_go_blocks(self._pool, _flat(kept))

    def _end(self, hand: HandOver) -> None:
        """Nobody reads it, or will."""
        self.readying.end(hand)
        self._let_go(hand)

    def _proof(self, state: RequestState, tokens: int) -> bytes | None:
        content = state.content.digest if state.content is not None else b""
        hash_tokens = self._core.geometry.hash_tokens
        return compat.proof_of(state.request, tokens, hash_tokens, content)

    def _loan(self, state: RequestState, tokens: int, blocks: Extent) -> Loan | None:
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

    # -- what comes of it --------------------------------------------------------------

    def confirm(self) -> None:
        """Take back what was computed with other LoRA weights than those it is offered as.

        To be called when what the ranks say of the step that ended the request is known. Nobody has
        the ticket before.
        """
        fresh, self._fresh = self._fresh, []
        for lease, content in fresh:
            if not self._core.adapters.is_current(content):
                self._core.fail(
                    "adapter",
                    "LoRA weights changed while a prompt was computed: it is not handed over",
                )
                self._agent.withdraw(lease)

    def _offer(self, hand: HandOver) -> None:
        """It can be read from now on."""
        place, extent = hand.place
        sums = tuple(hand.sums[rank] for rank in sorted(hand.sums))
        if hand.lease is not None:
            self._agent.settle(hand.lease, Offer(hand.tokens, extent.numbers, place, sums))
        if place is Place.SLOTS:
            self._core.tally.add(metrics.HANDOFFS.key("early"))
        elif self._pool is not None:
            compat.hold_blocks(self._pool, _flat(hand.blocks.numbers))
            hand.is_held = True
        self._let_go(hand)
        self._let_vllm_go_on(hand)

    def _let_vllm_go_on(self, hand: HandOver) -> None:
        if hand.is_awaited:
            hand.is_awaited = False
            self.sent.append(hand.request_id)

    def take_in(self) -> None:
        """Give back what nobody reads any more, and wait for nothing too long.

        To be called when what the ranks have said is known.
        """
        for lease in self._agent.take_freed():
            hand = self._all.pop(lease, None)
            if hand is None:
                continue
            self._end(hand)
            self._let_vllm_go_on(hand)
            if hand.is_held and self._pool is not None:
                compat.let_go_blocks(self._pool, _flat(hand.blocks.numbers))
        self.readying.end_waits()


def _version(state: RequestState) -> object:
    """What a request's KV is of, besides its tokens."""
    return state.epoch, state.content


def _flat(tables: Tables) -> tuple[int, ...]:
    return tuple(block for group in tables for block in group)
