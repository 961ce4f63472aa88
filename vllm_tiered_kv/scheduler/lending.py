# SPDX-License-Identifier: Apache-2.0
"""Slots that a hand-over is read from, so that the device's blocks need not wait for it.

Full chunks that the CPU tier has are pinned in it. What it lacks, and the tail below a chunk, is
copied to slots that are not in the index. A sliding window's part of a chunk is lent only where the
last token sees some of it. Scheduler thread only.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_tiered_kv.protocol import BlockCopy
from vllm_tiered_kv.scheduler.index import ABSENT, ChunkIndex, Node, NodeState
from vllm_tiered_kv.scheduler.plan import chunk_key

if TYPE_CHECKING:
    from vllm_tiered_kv.geometry import Geometry
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.stores import StorePlanner

MAX_SHARE = 0.5
"""Of the pool that hand-overs may hold, so that the tier goes on beside them."""

Tables = tuple[tuple[int, ...], ...]


class Extent(NamedTuple):
    """Blocks, or slots, that are handed over of a prompt; by KV cache group."""

    numbers: Tables
    """To the prompt's last token."""
    firsts: tuple[int, ...]
    """Tokens of the prompt before these, which a sliding window has left behind."""


class Effort(enum.Enum):
    """What a hand-over may cost the tier."""

    SPARE = "spare"  # free slots for the tail, where all else is in the tier
    ANY = "any"  # what it takes: others are evicted


class Loan:
    """The slots of one hand-over."""

    __slots__ = ("awaits", "nodes", "slots")

    def __init__(self, nodes: tuple[Node, ...], awaits: set[Node], slots: Extent) -> None:
        self.nodes = nodes
        """One a chunk, in the order of the prompt; each is pinned once for this loan."""
        self.awaits = awaits
        """Those that are being written."""
        self.slots = slots
        """The slots in which what is wanted of them lies."""


class Lender:
    """Pins and copies.

    Args:
        index: the CPU tier's.
        geometry: the cut.
        stores: copies out of the device.
    """

    def __init__(self, index: ChunkIndex, geometry: Geometry, stores: StorePlanner) -> None:
        self._index = index
        self._geometry = geometry
        self._stores = stores
        self._lent: Counter[Node] = Counter()
        self._sizes: dict[Node, int] = {}
        """The slots that each of these had when it was lent first."""
        self.slots = 0
        """Slots that loans hold."""

    def lend(self, state: RequestState, tokens: int, blocks: Extent, effort: Effort) -> Loan | None:
        """Slots for a prompt's KV; those that are not written yet are being written from now on.

        Args:
            state: the request.
            tokens: of the prompt.
            blocks: on the device, which stay as they are until then.
            effort: what it may cost.

        Returns:
            None if there are none to be had.
        """
        firsts = self._firsts(tokens)
        wanted = self._wanted(tokens, firsts)
        found = self._found(state, tokens, wanted)
        missing = {chunk: groups for chunk, groups in wanted.items() if chunk not in found}
        tail = tokens % self._geometry.chunk_tokens
        if effort is Effort.SPARE and len(missing) > bool(tail):
            return None
        if not self._is_room(found, missing, effort):
            return None
        nodes = dict(found)
        for node in found.values():
            self._pin(node)
        for chunk, groups in missing.items():
            copied = self._copy(state, chunk, groups, blocks)
            if copied is None:
                self._give_back(nodes.values())
                return None
            nodes[chunk] = copied
        ordered = tuple(nodes[chunk] for chunk in wanted)
        awaits = {node for node in ordered if node.state is not NodeState.READY}
        slots = tuple(
            tuple(nodes[chunk].slots[group] for chunk in wanted if group in wanted[chunk])
            for group in self._geometry.group_ids
        )
        return Loan(ordered, awaits, Extent(slots, firsts))

    def give_back(self, loan: Loan) -> None:
        """They are not read any more."""
        self._give_back(loan.nodes)

    def _firsts(self, tokens: int) -> tuple[int, ...]:
        """Tokens of a prompt before the first chunk that is wanted, by group."""
        geometry = self._geometry
        return tuple(g.first_handed_token(tokens, geometry.chunk_tokens) for g in geometry.groups)

    def _wanted(self, tokens: int, firsts: Sequence[int]) -> dict[int, list[int]]:
        """The groups whose part of a chunk is wanted, by its index; chunks of none are left out."""
        size = self._geometry.chunk_tokens
        wanted = {
            chunk: [group for group, first in enumerate(firsts) if first <= chunk * size]
            for chunk in range(-(-tokens // size))
        }
        return {chunk: groups for chunk, groups in wanted.items() if groups}

    def _found(
        self, state: RequestState, tokens: int, wanted: Mapping[int, Sequence[int]]
    ) -> dict[int, Node]:
        """Chunks, by index, of which the tier has all that is wanted, or will have."""
        geometry = self._geometry
        found: dict[int, Node] = {}
        content = state.content.digest if state.content is not None else b""
        for chunk, groups in wanted.items():
            if (chunk + 1) * geometry.chunk_tokens > tokens:
                break  # the tail
            key = chunk_key(state.request.block_hashes, chunk, geometry, content)
            node = self._index.get(key)
            if node is not None and self._will_be(node, groups):
                found[chunk] = node
        return found

    def _will_be(self, node: Node, groups: Sequence[int]) -> bool:
        """Whether these parts are there, or a store of ours will tell how it ends.

        Parts that are being added to a chunk are not waited for: nobody tells how that ends.
        """
        if any(node.slots[group] == ABSENT for group in groups):
            return False
        return node.state is NodeState.READY or self._stores.is_storing(node)

    def _is_room(
        self, found: Mapping[int, Node], missing: Mapping[int, Sequence[int]], effort: Effort
    ) -> bool:
        fresh = sum(map(len, missing.values()))
        if effort is Effort.SPARE and fresh > self._index.free_slots:
            return False
        more = sum(node.num_slots for node in found.values() if not self._lent[node])
        return self.slots + more + fresh <= MAX_SHARE * self._index.num_slots

    def _copy(
        self, state: RequestState, chunk: int, groups: Sequence[int], blocks: Extent
    ) -> Node | None:
        """Have a chunk, or what there is of the first and the last one, copied to its own slots."""
        node = self._index.borrow(groups)
        if node is None:
            return None
        copies = []
        for group in groups:
            size = self._geometry.blocks_per_chunk(group)
            before = blocks.firsts[group] // self._geometry.groups[group].block_tokens
            start, end = max(before, chunk * size), (chunk + 1) * size
            part = blocks.numbers[group][start - before : end - before]
            copies.append(BlockCopy(group, node.slots[group], start - chunk * size, part))
        use = state.content.use if state.content is not None else None
        if not self._stores.lend(node, tuple(copies), use):
            self._index.unpin(node)
            return None
        self._note(node)
        return node

    def _pin(self, node: Node) -> None:
        self._index.pin(node)
        self._note(node)

    def _note(self, node: Node) -> None:
        if not self._lent[node]:
            self._sizes[node] = node.num_slots
            self.slots += node.num_slots
        self._lent[node] += 1

    def _give_back(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._lent[node] -= 1
            if not self._lent[node]:
                del self._lent[node]
                self.slots -= self._sizes.pop(node)
            self._index.unpin(node)
