# SPDX-License-Identifier: Apache-2.0
"""Slots that a hand-over is read from, so that the device's blocks need not wait for it.

Full chunks that the CPU tier has are pinned in it. What it lacks, and the tail below a chunk, is
copied to slots that are not in the index. Scheduler thread only.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv.scheduler.index import ChunkIndex, Node, NodeState
from vllm_tiered_kv.scheduler.plan import chunk_key

if TYPE_CHECKING:
    from vllm_tiered_kv.geometry import Geometry
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.stores import StorePlanner

MAX_SHARE = 0.5
"""Of the pool that hand-overs may hold, so that the tier goes on beside them."""


class Effort(enum.Enum):
    """What a hand-over may cost the tier."""

    SPARE = "spare"  # free slots for the tail, where all else is in the tier
    ANY = "any"  # what it takes: others are evicted


class Loan:
    """The slots of one hand-over."""

    __slots__ = ("awaits", "nodes")

    def __init__(self, nodes: tuple[Node, ...], awaits: set[Node]) -> None:
        self.nodes = nodes
        """One a chunk, in the order of the prompt; each is pinned once for this loan."""
        self.awaits = awaits
        """Those that are being written."""

    def slots(self, groups: int) -> tuple[tuple[int, ...], ...]:
        """Slot numbers by KV cache group."""
        return tuple(tuple(node.slots[g] for node in self.nodes) for g in range(groups))


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
        self.slots = 0
        """Slots that loans hold."""

    def lend(
        self,
        state: RequestState,
        tokens: int,
        tables: Sequence[Sequence[int]],
        effort: Effort,
    ) -> Loan | None:
        """Slots for a prompt's KV; those that are not written yet are being written from now on.

        Args:
            state: the request.
            tokens: of the prompt.
            tables: its device blocks by KV cache group, which stay as they are until then.
            effort: what it may cost.

        Returns:
            None if there are none to be had.
        """
        found, missing = self._look(state, tokens)
        tail = tokens % self._geometry.chunk_tokens
        if effort is Effort.SPARE and len(missing) > bool(tail):
            return None
        if not self._is_room(found, missing, effort):
            return None
        nodes = dict(found)
        for node in found.values():
            self._pin(node)
        for chunk in missing:
            copied = self._copy(state, chunk, tables)
            if copied is None:
                self._give_back(nodes.values())
                return None
            nodes[chunk] = copied
        ordered = tuple(nodes[chunk] for chunk in range(len(nodes)))
        awaits = {node for node in ordered if node.state is not NodeState.READY}
        return Loan(ordered, awaits)

    def give_back(self, loan: Loan) -> None:
        """They are not read any more."""
        self._give_back(loan.nodes)

    def _look(self, state: RequestState, tokens: int) -> tuple[dict[int, Node], list[int]]:
        """Chunks by index that are in the tier or on their way, and those that are not."""
        geometry = self._geometry
        found: dict[int, Node] = {}
        missing: list[int] = []
        content = state.content.digest if state.content is not None else b""
        full = tokens // geometry.chunk_tokens
        for chunk in range(full):
            key = chunk_key(state.request.block_hashes, chunk, geometry, content)
            node = self._index.get(key)
            if node is not None and self._will_be(node):
                found[chunk] = node
            else:
                missing.append(chunk)
        if tokens % geometry.chunk_tokens:
            missing.append(full)
        return found, missing

    def _will_be(self, node: Node) -> bool:
        """Whether it is there, or a store of ours will tell how it ends."""
        return node.state is NodeState.READY or self._stores.is_storing(node)

    def _is_room(self, found: Mapping[int, Node], missing: Sequence[int], effort: Effort) -> bool:
        fresh = len(self._geometry.groups) * len(missing)
        if effort is Effort.SPARE and fresh > self._index.free_slots:
            return False
        more = sum(node.num_slots for node in found.values() if not self._lent[node])
        return self.slots + more + fresh <= MAX_SHARE * self._index.num_slots

    def _copy(
        self, state: RequestState, chunk: int, tables: Sequence[Sequence[int]]
    ) -> Node | None:
        """Have a chunk, or what there is of the last one, copied to slots of its own."""
        geometry = self._geometry
        node = self._index.borrow(geometry.group_ids)
        if node is None:
            return None
        parts = {}
        for group in geometry.group_ids:
            size = geometry.blocks_per_chunk(group)
            parts[group] = tuple(tables[group][chunk * size : (chunk + 1) * size])
        use = state.content.use if state.content is not None else None
        if not self._stores.lend(node, parts, use):
            self._index.unpin(node)
            return None
        self._note(node)
        return node

    def _pin(self, node: Node) -> None:
        self._index.pin(node)
        self._note(node)

    def _note(self, node: Node) -> None:
        if not self._lent[node]:
            self.slots += node.num_slots
        self._lent[node] += 1

    def _give_back(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._lent[node] -= 1
            if not self._lent[node]:
                del self._lent[node]
                self.slots -= node.num_slots
            self._index.unpin(node)
