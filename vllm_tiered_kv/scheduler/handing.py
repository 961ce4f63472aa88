# SPDX-License-Identifier: Apache-2.0
"""What this engine hands over to others: device blocks held under a lease, and given back.

Scheduler thread only. The blocks are held by a reference of our own in the block pool, so that the
request ends as any other and vLLM waits for nothing: no step need be run to say that a consumer is
done, and none is while an engine idles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv import compat, metrics
from vllm_tiered_kv.remote.params import answer
from vllm_tiered_kv.remote.serving import Offer

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool
    from vllm_tiered_kv.remote.agent import RemoteAgent
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.requests import RequestState


class HandOvers:
    """Offers what requests leave behind.

    Args:
        core: what the scheduler half's parts share.
        agent: runs the control channel.
        engine_id: vLLM's name of this engine.
        tensor_parallel: its ranks that share a layer.
    """

    def __init__(
        self, core: Core, agent: RemoteAgent, engine_id: str, tensor_parallel: int
    ) -> None:
        self._core = core
        self._agent = agent
        self._engine_id = engine_id
        self._tensor_parallel = tensor_parallel
        self._pool: BlockPool | None = None
        self._held: dict[int, tuple[int, ...]] = {}
        """The device blocks of each lease."""
        self.blocks = 0
        """Device blocks that are held; one held by two leases counts twice."""

    def __len__(self) -> int:
        return len(self._held)

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def finished(
        self, state: RequestState, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """A request that asked for it ends, and its blocks are freed after this call.

        Returns:
            The parameters that a consumer goes on from; None if nothing is handed over.
        """
        if not compat.ended_well(state.request):
            return None
        offer = self._offer(state, block_ids)
        if offer is None:
            return None
        proof = self._proof(state, offer.tokens)
        if proof is None:
            self._core.fail("remote_proof", "what a prompt's KV stands for cannot be told")
            return None
        given = self._agent.offer(offer, proof)
        if given is None or self._pool is None:
            self._core.fail("remote_not_ready", "a prompt's KV cannot be handed over now")
            return None
        ticket, sealed = given
        blocks = tuple(block for group in offer.blocks for block in group)
        compat.hold_blocks(self._pool, blocks)
        self._held[ticket.lease] = blocks
        self.blocks += len(blocks)
        self._core.tally.add(metrics.HANDOFFS.key("offered"))
        return answer(
            ticket,
            sealed,
            engine_id=self._engine_id,
            request_id=state.request.request_id,
            blocks=offer.blocks,
            tensor_parallel=self._tensor_parallel,
        )

    def take_in(self) -> None:
        """Give back what nobody reads any more; costs nothing where nothing was given back."""
        for lease in self._agent.take_freed():
            blocks = self._held.pop(lease, ())
            self.blocks -= len(blocks)
            if blocks and self._pool is not None:
                compat.let_go_blocks(self._pool, blocks)

    def _offer(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> Offer | None:
        """The prompt's blocks; None if they do not hold the prompt."""
        core, request = self._core, state.request
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        stale = state.epoch != core.epoch or state.unsure or state.content is None
        if stale or tokens < 1 or not self._agent.sends or self._pool is None:
            return None
        groups = []
        for group, table in zip(core.geometry.groups, block_ids, strict=True):
            count = -(-tokens // group.block_tokens)
            blocks = tuple(table[:count])
            if len(blocks) < count or core.null_block in blocks:
                return None
            groups.append(blocks)
        return Offer(tokens, tuple(groups))

    def _proof(self, state: RequestState, tokens: int) -> bytes | None:
        content = state.content.digest if state.content is not None else b""
        hash_tokens = self._core.geometry.hash_tokens
        return compat.proof_of(state.request, tokens, hash_tokens, content)
