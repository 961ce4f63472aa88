# SPDX-License-Identifier: Apache-2.0
"""Slots lent to hand-overs: nobody else's meanwhile, never more than a share, all given back.

Hypothesis stores and evicts chunks, lends, ends copies well or badly, resets, in any order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.protocol import BlockCopy
from vllm_tiered_kv.scheduler.adapters import BASE_MODEL
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node, NodeState, chunk_policy
from vllm_tiered_kv.scheduler.lending import MAX_SHARE, Effort, Extent, Lender, Loan

BLOCK, PER_CHUNK, GROUPS, SLOTS = 4, 2, 2, 40
CHUNK = BLOCK * PER_CHUNK
LONGEST = 4 * CHUNK + 3
PROMPTS = 5
FULL = GroupGeometry(GroupKind.FULL, BLOCK, 64)
WINDOW = GroupGeometry(GroupKind.WINDOW, BLOCK, 64, CHUNK + 2)


class Stores:
    """Copies under way, as the lender sees them."""

    def __init__(self) -> None:
        self.under_way: list[Node] = []
        self.is_full = False
        self.index: Any = None
        self.copied: dict[int, BlockCopy] = {}
        """By slot."""

    def is_storing(self, node: Node) -> bool:
        return node in self.under_way

    def lend(self, node: Node, copies: Sequence[BlockCopy], use: object) -> bool:
        assert [copy.slot for copy in copies] == [slot for slot in node.slots if slot >= 0]
        if self.is_full:
            return False
        self.copied |= {copy.slot: copy for copy in copies}
        self.index.pin(node)
        self.under_way.append(node)
        return True


def request(prompt: int) -> Any:
    hashes = [b"%d.%d" % (prompt, i) for i in range(LONGEST // BLOCK)]
    return SimpleNamespace(request=SimpleNamespace(block_hashes=hashes), content=BASE_MODEL)


def key(prompt: int, chunk: int) -> bytes:
    return b"%d.%d" % (prompt, (chunk + 1) * PER_CHUNK - 1)


class Lending(RuleBasedStateMachine):
    """A tier, and loans out of it."""

    eviction = Eviction.LRU
    groups = (FULL,) * GROUPS

    def __init__(self) -> None:
        super().__init__()
        self.index = ChunkIndex(SLOTS, GROUPS, policy=chunk_policy(self.eviction))
        self.stores = Stores()
        self.stores.index = self.index
        geometry = Geometry(CHUNK, BLOCK, self.groups)
        self.lender = Lender(self.index, geometry, self.stores)  # type: ignore[arg-type]
        self.loans: list[Loan] = []

    @rule(prompt=st.integers(0, PROMPTS - 1), chunks=st.integers(1, 4), whole=st.booleans())
    def store(self, prompt: int, chunks: int, whole: bool) -> None:
        parent: Node | None = None
        parts = [g for g in range(GROUPS) if whole or self.groups[g] is FULL]
        for chunk in range(chunks):
            node = self.index.get(key(prompt, chunk))
            if node is None:
                node = self.index.reserve(key(prompt, chunk), parent, parts)
                if node is None:
                    return
                self.stores.under_way.append(node)
            parent = node

    @rule(which=st.integers(0, 50), good=st.booleans())
    def a_copy_ends(self, which: int, good: bool) -> None:
        if not self.stores.under_way:
            return
        node = self.stores.under_way.pop(which % len(self.stores.under_way))
        if node.key:
            (self.index.commit if good else self.index.discard)(node)
        self.index.unpin(node)
        for loan in self.loans:
            loan.awaits.discard(node)

    @rule(
        prompt=st.integers(0, PROMPTS - 1),
        tokens=st.integers(1, LONGEST),
        effort=st.sampled_from(Effort),
        is_full=st.booleans(),
    )
    def lend(self, prompt: int, tokens: int, effort: Effort, is_full: bool) -> None:
        self.stores.is_full = is_full
        count = -(-tokens // BLOCK)
        firsts = [group.first_handed_token(tokens, BLOCK) for group in self.groups]
        numbers = tuple(tuple(range(first // BLOCK, count)) for first in firsts)
        blocks = Extent(numbers, tuple(firsts))
        evicted, used = self.index.evicted, self.index.used_slots
        loan = self.lender.lend(request(prompt), tokens, blocks, effort)
        if effort is Effort.SPARE:
            assert self.index.evicted == evicted
            assert self.index.used_slots <= used + GROUPS  # the tail
        if loan is None:
            return
        assert len(loan.nodes) == -(-tokens // CHUNK)
        for chunk, node in enumerate(loan.nodes):
            full = (chunk + 1) * CHUNK <= tokens
            assert node.key == b"" or (full and node.key == key(prompt, chunk))
            ready = node.state is NodeState.READY
            assert ready is (node not in loan.awaits)
            assert ready or node in self.stores.under_way
        for group, slots in enumerate(loan.slots.numbers):
            first = loan.slots.firsts[group]
            assert first // CHUNK == firsts[group] // CHUNK
            assert first % CHUNK == 0
            assert [node.slots[group] for node in loan.nodes[first // CHUNK :]] == list(slots)
            own = [node.key == b"" for node in loan.nodes[first // CHUNK :]]
            for i, slot in enumerate(slots):
                start = first // BLOCK + i * PER_CHUNK
                if own[i]:
                    copy = self.stores.copied[slot]
                    whole = range(start, min(start + PER_CHUNK, count))
                    assert list(copy.blocks) == [b for b in whole if b >= firsts[group] // BLOCK]
                    assert copy.blocks[0] == start + copy.first
        self.loans.append(loan)

    @rule(which=st.integers(0, 50))
    def a_lease_ends(self, which: int) -> None:
        if self.loans:
            self.lender.give_back(self.loans.pop(which % len(self.loans)))

    @rule()
    def reset(self) -> None:
        self.index.clear()

    @invariant()
    def nobody_else_has_what_is_lent(self) -> None:
        lent = {node for loan in self.loans for node in loan.nodes}
        written = {node for node in self.stores.under_way if not node.key}
        others = set(self.index._nodes.values()) - lent
        slots = [slot for node in lent | written | others for slot in node.slots if slot >= 0]
        assert len(slots) == len(set(slots))
        assert all(slot >= 0 for loan in self.loans for part in loan.slots.numbers for slot in part)

    @invariant()
    def it_is_a_share(self) -> None:
        lent = {node for loan in self.loans for node in loan.nodes}
        assert self.lender.slots == sum(node.num_slots for node in lent) <= MAX_SHARE * SLOTS

    def teardown(self) -> None:
        for loan in self.loans:
            self.lender.give_back(loan)
        for node in self.stores.under_way:
            if node.key:
                self.index.discard(node)
            self.index.unpin(node)
        assert self.index.pinned == self.lender.slots == 0
        kept = self.index._nodes.values()
        assert self.index.used_slots == sum(node.num_slots for node in kept)
        self.index.clear()
        everything = list(itertools.takewhile(bool, (self._whole(i) for i in range(SLOTS))))
        assert len(everything) == SLOTS // GROUPS

    def _whole(self, i: int) -> Node | None:
        return self.index.reserve(b"all %d" % i, None, range(GROUPS))


Lending.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLending = Lending.TestCase


class _LendingByArc(Lending):
    eviction = Eviction.ARC


_LendingByArc.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLendingByArc = _LendingByArc.TestCase


class _LendingWindows(Lending):
    groups = (FULL, WINDOW)


_LendingWindows.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None
)
TestLendingWindows = _LendingWindows.TestCase


@pytest.mark.parametrize("tokens", [CHUNK, CHUNK + 1, LONGEST])
def test_slots_come_in_the_order_of_the_prompt(tokens: int) -> None:
    machine = Lending()
    machine.store(0, 1, True)
    machine.a_copy_ends(0, True)
    machine.lend(0, tokens, Effort.ANY, False)
    (loan,) = machine.loans
    first, second = loan.slots.numbers
    stored = machine.index.get(key(0, 0))
    assert stored is not None
    assert (first[0], second[0]) == stored.slots
    assert [tuple(node.slots) for node in loan.nodes] == list(zip(first, second, strict=True))
    assert len(loan.awaits) == len(loan.nodes) - 1
