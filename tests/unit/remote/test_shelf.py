# SPDX-License-Identifier: Apache-2.0
"""Chunks that peers read beside an index that evicts: nobody's slots are given to anybody else."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_tiered_kv.remote.shelf import BATCH, Lent, Shelf
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node, NodeState
from vllm_tiered_kv.scheduler.shelving import Shelving

SLOTS = 8
MOST_LENT = 5


def tier(num_slots: int = SLOTS, most: int = MOST_LENT) -> tuple[ChunkIndex, Shelf[Node], Shelving]:
    index = ChunkIndex(num_slots, 1)
    shelf: Shelf[Node] = Shelf(most)
    return index, shelf, Shelving(shelf, index)


def store(index: ChunkIndex, *keys: bytes) -> None:
    parent = None
    for key in keys:
        node = index.get(key)
        if node is None:
            node = index.reserve(key, parent, [0])
            assert node is not None
            index.commit(node)
            index.unpin(node)
        parent = node


def test_the_head_of_a_run_is_lent_up_to_the_first_chunk_that_is_missing() -> None:
    index, shelf, _ = tier()
    store(index, b"a", b"b", b"c")
    assert [chunk.owner.key for chunk in shelf.lend([b"a", b"b", b"x", b"c"])] == [b"a", b"b"]
    assert shelf.lend([b"x", b"a"]) == []
    assert shelf.lent_slots == 2


def test_no_more_than_a_share_is_lent_and_what_is_lent_can_be_lent_again() -> None:
    index, shelf, _ = tier()
    keys = [bytes([i]) for i in range(SLOTS)]
    store(index, *keys)
    assert len(shelf.lend(keys)) == MOST_LENT
    assert len(shelf.lend(keys)) == MOST_LENT
    assert shelf.lent_slots == MOST_LENT


def test_a_long_run_is_lent_whole() -> None:
    index, shelf, _ = tier(4 * BATCH, 4 * BATCH)
    keys = [i.to_bytes(2, "big") for i in range(3 * BATCH + 1)]
    store(index, *keys)
    lent = shelf.lend(keys)
    assert [chunk.owner.key for chunk in lent] == keys
    shelf.give_back(lent)
    assert shelf.lent_slots == 0


def test_what_is_read_is_not_evicted_until_it_is_given_back() -> None:
    index, shelf, shelving = tier(2)
    store(index, b"a")
    store(index, b"b")
    lent = shelf.lend([b"a"])
    store(index, b"c")
    assert set(index._nodes) == {b"a", b"c"}
    assert index.reserve(b"e", index.get(b"c"), [0]) is None
    shelf.give_back(lent)
    shelving.take_in()
    store(index, b"d")
    store(index, b"e")
    assert set(index._nodes) == {b"d", b"e"}


def test_what_has_to_go_keeps_its_slots_until_it_is_given_back() -> None:
    index, shelf, shelving = tier(1)
    store(index, b"a")
    lent = shelf.lend([b"a"])
    node = index.get(b"a")
    assert node is not None
    index.discard(node)
    assert shelf.lend([b"a"]) == []
    assert index.reserve(b"b", None, [0]) is None
    shelf.give_back(lent)
    shelving.take_in()
    store(index, b"b")


def test_after_a_reset_nothing_older_is_lent_and_what_is_read_keeps_its_slots() -> None:
    index, shelf, shelving = tier(2)
    store(index, b"a", b"b")
    lent = shelf.lend([b"a"])
    (slot,) = lent[0].slots
    index.clear()
    assert shelf.lend([b"b"]) == []
    store(index, b"c")
    node = index.get(b"c")
    assert node is not None
    assert node.slots != [slot]
    shelf.give_back(lent)
    shelving.take_in()
    assert index.used_slots == 1


def test_a_closed_shelf_lends_nothing_that_comes_either() -> None:
    index, shelf, shelving = tier()
    store(index, b"a")
    shelving.close()
    store(index, b"b")
    assert shelf.lend([b"a"]) == shelf.lend([b"b"]) == []


class Machine(RuleBasedStateMachine):
    """An index under pressure whose chunks are lent."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.shelf, self.shelving = tier()
        self.leases: list[list[Lent[Node]]] = []
        self.open: list[Node] = []

    key = st.integers(0, 11).map(lambda n: bytes([n]))

    @rule(key=key, parent=st.none() | key)
    def reserve(self, key: bytes, parent: bytes | None) -> None:
        if self.index.get(key) is not None:
            return
        above = self.index.get(parent) if parent is not None else None
        node = self.index.reserve(key, above, [0])
        if node is None:
            return
        lent = {slot for lease in self.leases for chunk in lease for slot in chunk.slots}
        assert not lent & set(node.slots), "a slot that is read was given to another chunk"
        self.open.append(node)

    @precondition(lambda self: self.open)
    @rule(good=st.booleans())
    def end_store(self, good: bool) -> None:
        node = self.open.pop(0)
        if good:
            self.index.commit(node)
        else:
            self.index.discard(node)
        self.index.unpin(node)

    @rule(keys=st.lists(key, min_size=1, max_size=4))
    def lend(self, keys: list[bytes]) -> None:
        lent = self.shelf.lend(keys)
        for chunk in lent:
            assert chunk.owner.state is NodeState.READY
        if lent:
            self.leases.append(lent)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 7))
    def give_back(self, which: int) -> None:
        self.shelf.give_back(self.leases.pop(which % len(self.leases)))

    @rule(key=key)
    def discard(self, key: bytes) -> None:
        if (node := self.index.get(key)) is not None:
            self.index.discard(node)

    @rule()
    def take_in(self) -> None:
        self.shelving.take_in()

    @rule()
    def clear(self) -> None:
        self.index.clear()

    @invariant()
    def no_slot_is_lost(self) -> None:
        index = self.index
        nodes = {*index._nodes.values(), *index._pinned}
        held = [slot for node in nodes for slot in node.slots if slot >= 0]
        assert sorted(held) == sorted(set(held))
        assert len(held) == index.used_slots
        lent = {slot for lease in self.leases for chunk in lease for slot in chunk.slots}
        assert lent <= set(held)
        assert self.shelf.lent_slots == len(lent) <= MOST_LENT
        assert len(self.shelf) <= len(index)

    def teardown(self) -> None:
        while self.leases:
            self.give_back(0)
        while self.open:
            self.end_store(good=True)
        self.take_in()
        assert self.index.pinned == 0
        assert self.shelf.lent_slots == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
