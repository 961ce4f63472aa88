# SPDX-License-Identifier: Apache-2.0
"""Which chunks leave the device, and when their blocks may no longer be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_tiered_kv import compat
from vllm_tiered_kv.geometry import Geometry, GroupKind
from vllm_tiered_kv.protocol import AdapterUse, BlockCopy, JobStatus, StoreJob
from vllm_tiered_kv.scheduler.core import Core
from vllm_tiered_kv.scheduler.index import ABSENT, Node, NodeState
from vllm_tiered_kv.scheduler.jobs import ActiveStore
from vllm_tiered_kv.scheduler.plan import NO_BLOCKS, blocks_of_chunk, chunk_key, chunk_keys
from vllm_tiered_kv.scheduler.requests import NEVER, RequestState
from vllm_tiered_kv.scheduler.states import NO_STATES, States

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool, KVCacheBlock, Request

MAX_STORES = 4096
"""Chunks on their way out of the device at once."""

BlockTables = Sequence[Sequence[int]]


class _Visit(NamedTuple):
    """A request's chunk that may be stored."""

    request: Request
    chunk: int
    adapter: AdapterUse | None


class StorePlanner:
    """Starts a store for each chunk that is complete and not in the index.

    A store holds no device block: vLLM tells us when it hands one out again, and the job is
    fenced. So neither a free block nor a cache reset ever waits for a store.
    """

    def __init__(self, core: Core, take_in: Callable[[], None]) -> None:
        self._core = core
        self._take_in = take_in
        """Takes in reports that have arrived, once a step."""
        self._pool: BlockPool | None = None
        self.jobs: list[StoreJob] = []
        """For the next plan."""
        self.fences: list[int] = []
        """For the next plan."""
        self.on_end: Callable[[Node, bool], None] = _nobody
        """Told of each node that a store has been written to, and whether it can be read."""

    def bind(self, pool: BlockPool) -> None:
        self._pool = pool

    def computed(
        self,
        state: RequestState,
        computed: int,
        block_ids: Callable[[], BlockTables],
        states: States = NO_STATES,
    ) -> None:
        """Store what is complete once the step now being planned has run.

        Args:
            state: the request.
            computed: its tokens that are computed then.
            block_ids: its block tables, asked for only where something is stored.
            states: recurrent states that are complete then.
        """
        if state.epoch != self._core.epoch or state.content is None:
            state.next_store_at = NEVER  # its blocks are from before a reset
            return
        # Draft tokens may be rejected: only tokens that are known count.
        target = self._target(state, min(computed, state.request.num_tokens))
        self._walk(state, target, block_ids, states)

    def finished(self, state: RequestState, block_ids: BlockTables) -> None:
        """The last chance: the request ends and its blocks are freed after this call."""
        if state.next_store_at == NEVER or state.epoch != self._core.epoch or state.unsure:
            return
        request = state.request
        # The last sampled token has no KV.
        known = max(request.num_prompt_tokens, request.num_tokens - 1)
        target = self._target(state, min(request.num_computed_tokens, known))
        if target <= state.next_chunk:
            return
        self._walk(state, target, lambda: block_ids, NO_STATES)
        if (missing := target - state.next_chunk) > 0:
            self._core.count_chunks("dropped", missing)

    def ended(self, job: int, store: ActiveStore) -> None:
        """Every rank has reported the store."""
        if self._core.disk is not None:
            self._core.disk.store_ended(job, good=store.status is JobStatus.DONE)
        core, node = self._core, store.node
        done, failed = store.status is JobStatus.DONE, store.status is JobStatus.FAILED
        if done:
            core.count_copy("store", store.nbytes, store.seconds)
        elif failed:
            core.fail("store", "storing a chunk failed; it is not kept")
        if store.is_lent:
            core.index.unpin(node)
            self.on_end(node, done)
            return
        is_first = not store.extends or node.is_empty
        if is_first:
            kept = done and node.state is not NodeState.GONE
            core.count_chunks("stored" if kept else "failed" if failed else "dropped")
        if store.extends:
            core.index.extended(node, store.extends, arrived=done)
            return
        if done:
            core.index.commit(node)
        else:
            core.index.discard(node)
        core.index.unpin(node)
        self.on_end(node, node.state is NodeState.READY)

    def is_storing(self, node: Node) -> bool:
        """Whether :attr:`on_end` will be told of a node."""
        return self._core.ledger.is_storing(node)

    def lend(self, node: Node, copies: tuple[BlockCopy, ...], use: AdapterUse | None) -> bool:
        """Copy device blocks to slots that are not in the index.

        Args:
            node: from `ChunkIndex.borrow`.
            copies: to its slots.
            use: the LoRA weights the blocks were computed with.

        Returns:
            False if too much is under way.
        """
        core, pool = self._core, self._pool
        if pool is None or len(core.ledger.stores) >= MAX_STORES:
            return False
        self._submit(pool, ActiveStore(node, _blocks(copies), is_lent=True), copies, use)
        core.index.pin(node)
        return True

    def reset(self) -> None:
        """What is under way is of no use any more."""
        self.fences.extend(self._core.ledger.stores)

    def _target(self, state: RequestState, computed: int) -> int:
        """How many chunks of the request may be stored once ``computed`` tokens are."""
        request, geometry = state.request, self._core.geometry
        if not self._core.settings.store_generated:
            computed = min(computed, request.num_prompt_tokens)
        hashed = len(request.block_hashes) * geometry.hash_tokens
        return min(computed, hashed) // geometry.chunk_tokens

    def _walk(
        self,
        state: RequestState,
        target: int,
        block_ids: Callable[[], BlockTables],
        states: States,
    ) -> None:
        """Visit the request's chunks up to ``target``; start a store for each that is missing.

        Stops at the first chunk for which there is no room: the next one would be stored
        without its prefix. It is tried again with the next complete chunk.
        """
        core = self._core
        content = state.content
        if content is None:
            return
        hashes = state.request.block_hashes
        tables: BlockTables = ()
        if core.disk is not None:
            core.disk.begin(state.used_ns)
        found: list[Node] = []
        on_disk: list[int] = []
        for chunk in range(state.next_chunk, target):
            visit = _Visit(state.request, chunk, content.use)
            key = chunk_key(hashes, chunk, core.geometry, content.digest)
            node = core.index.get(key)
            if core.disk is not None and chunk >= state.used and core.disk.agent.groups(key):
                on_disk.append(chunk)
            if node is not None:
                core.index.adopt(node, state.tail)
                if chunk >= state.used:
                    found.append(node)
                if core.events is not None:
                    core.events.used(node, state.request, chunk)
                if core.disk is not None:
                    core.disk.found(node, state.request, chunk)
                ends = states.get(chunk, NO_BLOCKS)
                lacks = _lacks(core.geometry, node, ends)
                tables = tables or (block_ids() if lacks else ())
                extends = lacks and self._extend(node, lacks, visit, tables, ends)
                if extends and core.events is not None:
                    core.events.storing(key, state.request, chunk)
            else:
                if state.tail is not None and state.tail.state is NodeState.GONE:
                    break  # the prefix was evicted or failed: without it the rest is useless
                tables = tables or block_ids()
                ends = states.get(chunk, NO_BLOCKS)
                node = self._start(key, state.tail, visit, tables, ends)
                if node is None:
                    break
                if core.events is not None and node.is_arriving:
                    core.events.storing(key, state.request, chunk)
            state.tail = node
            state.next_chunk = chunk + 1
        state.used = max(state.used, state.next_chunk)
        if found:
            core.index.touch(found)
        if core.disk is not None and on_disk:
            reach = (on_disk[-1] + 1) * core.geometry.chunk_tokens
            keys = chunk_keys(hashes, reach, core.geometry, content.digest)
            core.disk.used([keys[chunk] for chunk in on_disk], again=keys[: on_disk[0]])
        state.next_store_at = (target + 1) * core.geometry.chunk_tokens

    def _start(
        self,
        key: bytes,
        parent: Node | None,
        visit: _Visit,
        tables: BlockTables,
        states: Mapping[int, int],
    ) -> Node | None:
        core = self._core
        if not tables or self._pool is None or len(core.ledger.stores) >= MAX_STORES:
            return None
        parts = blocks_of_chunk(core.geometry, visit.chunk, tables, core.null_block, states)
        if parts is None:
            return None
        # What leaves a window may be handed out in the next step. That must not cost the chunk
        # the parts that are needed of every prefix, so these are a job of their own; nor, where
        # there are none, the chunks after it, which may be all that a window needs.
        groups = core.geometry.groups
        now = {g: part for g, part in parts.items() if groups[g].kind is GroupKind.FULL}
        later = {g: part for g, part in parts.items() if g not in now}
        node = core.index.reserve(key, parent, list(parts), list(later))
        if node is None:
            return None
        if now:
            self._send(self._pool, node, now, node.slots, visit)
        if later:
            self._send(self._pool, node, later, node.coming, visit, extends=tuple(later))
        if not now:
            core.index.commit(node)
            core.index.unpin(node)
        return node

    def _extend(
        self,
        node: Node,
        groups: Sequence[int],
        visit: _Visit,
        tables: BlockTables,
        states: Mapping[int, int],
    ) -> bool:
        """Add to a chunk those parts of ``groups`` that are here now."""
        core = self._core
        if not tables or self._pool is None or len(core.ledger.stores) >= MAX_STORES:
            return False
        parts = blocks_of_chunk(core.geometry, visit.chunk, tables, core.null_block, states) or {}
        missing = {group: part for group, part in parts.items() if group in groups}
        if not missing or not core.index.extend(node, list(missing)):
            return False
        self._send(self._pool, node, missing, node.coming, visit, extends=tuple(missing))
        return True

    def _send(
        self,
        pool: BlockPool,
        node: Node,
        parts: Mapping[int, tuple[int, ...]],
        slots: Sequence[int] | Mapping[int, int],
        visit: _Visit,
        extends: tuple[int, ...] = (),
    ) -> None:
        """Have device blocks, by group, copied into the slots of these groups."""
        copies = tuple(BlockCopy(group, slots[group], 0, part) for group, part in parts.items())
        store = ActiveStore(node, _blocks(copies), extends)
        job = self._submit(pool, store, copies, visit.adapter)
        if self._core.disk is not None:
            self._core.disk.storing(job, node, tuple(parts), visit.request, visit.chunk)

    def _submit(
        self,
        pool: BlockPool,
        store: ActiveStore,
        copies: tuple[BlockCopy, ...],
        use: AdapterUse | None,
    ) -> int:
        job = self._core.ledger.add_store(store)
        compat.watch_blocks(pool, store.blocks, self._on_reuse)
        self.jobs.append(StoreJob(job, copies, use))
        return job

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """vLLM hands a block out again: what still reads it is void from now on."""
        self._take_in()  # a copy that has ended no longer reads
        ledger = self._core.ledger
        if self._pool is not None and compat.is_free(block):
            # The device's cache was reset, and the block keeps its bytes until it is handed out.
            if ledger.has_readers(block.block_id):
                compat.watch_blocks(self._pool, (block.block_id,), self._on_reuse)
            return
        voided = ledger.void_readers(block.block_id)
        self.fences.extend(voided)
        if self._core.disk is not None:
            for job in voided:
                self._core.disk.store_ended(job, good=False)


def _blocks(copies: Sequence[BlockCopy]) -> tuple[int, ...]:
    return tuple(block for copy in copies for block in copy.blocks)


def _nobody(node: Node, good: bool) -> None:
    """Nobody wants to know."""


def _lacks(geometry: Geometry, node: Node, states: Mapping[int, int]) -> list[int]:
    """Groups whose part a chunk has not and might be given."""
    if ABSENT not in node.slots:
        return []
    return [
        group
        for group, slot in enumerate(node.slots)
        if slot == ABSENT
        and group not in node.coming
        and (group in states or geometry.groups[group].kind is GroupKind.WINDOW)
    ]
