# SPDX-License-Identifier: Apache-2.0
"""The chunk index against a plain model of what it must do."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.scheduler.index import ABSENT, ChunkIndex, Node, NodeState, chunk_policy
from vllm_tiered_kv.scheduler.slots import SlotAllocator


def store(index: ChunkIndex, *keys: bytes) -> None:
    """Store a prefix whose chunks are ``keys``."""
    parent = None
    for key in keys:
        node = index.get(key)
        if node is None:
            node = index.reserve(key, parent, [0])
            assert node is not None
            index.commit(node)
            index.unpin(node)
        parent = node


def keys_of(index: ChunkIndex) -> set[bytes]:
    return set(index._nodes)


def test_a_run_ends_at_the_first_chunk_that_is_missing_or_still_stored() -> None:
    index = ChunkIndex(8, 1)
    store(index, b"a", b"b")
    storing = index.reserve(b"c", index.get(b"b"), [0])
    assert storing is not None
    keys = [b"a", b"b", b"c", b"d"]
    assert [n.key for n in index.ready_run(keys, 0)] == [b"a", b"b"]
    index.commit(storing)
    assert [n.key for n in index.ready_run(keys, 1)] == [b"b", b"c"]
    assert index.ready_run(keys, 3) == []


def test_the_least_recently_used_prefix_loses_its_tail_first() -> None:
    index = ChunkIndex(4, 1)
    store(index, b"a1", b"a2")
    store(index, b"b1", b"b2")
    index.touch([index.get(b"a1"), index.get(b"a2")])
    store(index, b"c1")
    assert keys_of(index) == {b"a1", b"a2", b"b1", b"c1"}
    store(index, b"d1")
    assert keys_of(index) == {b"a1", b"a2", b"c1", b"d1"}


def test_a_shared_head_outlives_each_of_its_tails() -> None:
    index = ChunkIndex(4, 1)
    store(index, b"head", b"x")
    store(index, b"head", b"y")
    store(index, b"other")
    store(index, b"z")
    assert b"head" in keys_of(index)
    assert b"x" not in keys_of(index)


def test_a_head_used_alone_is_not_as_old_as_its_last_tail() -> None:
    index = ChunkIndex(3, 1)
    store(index, b"head", b"tail")
    store(index, b"other")
    index.touch([index.get(b"head")])
    store(index, b"new")  # evicts the tail
    assert keys_of(index) == {b"head", b"other", b"new"}
    store(index, b"newer")
    assert keys_of(index) == {b"head", b"new", b"newer"}


def test_a_child_never_takes_its_parents_slot() -> None:
    index = ChunkIndex(2, 1)
    store(index, b"a", b"b")
    assert index.reserve(b"c", index.get(b"b"), [0]) is None
    assert keys_of(index) == {b"a", b"b"}
    assert index.used_slots == 2


def test_pinned_chunks_are_not_evicted() -> None:
    index = ChunkIndex(1, 1)
    store(index, b"a")
    node = index.get(b"a")
    index.pin(node)
    assert index.reserve(b"b", None, [0]) is None
    index.unpin(node)
    assert index.reserve(b"b", None, [0]) is not None
    assert index.get(b"a") is None


def test_discarding_a_chunk_that_is_read_frees_its_slot_only_afterwards() -> None:
    index = ChunkIndex(1, 1)
    store(index, b"a")
    node = index.get(b"a")
    index.pin(node)
    index.discard(node)
    assert index.get(b"a") is None
    assert index.used_slots == 1
    index.unpin(node)
    assert index.used_slots == 0


def test_a_chunk_whose_parent_failed_is_tied_to_the_parent_stored_again() -> None:
    index = ChunkIndex(3, 1)
    store(index, b"a", b"b")
    index.discard(index.get(b"a"))
    store(index, b"a")
    index.adopt(index.get(b"b"), index.get(b"a"))
    store(index, b"c")
    store(index, b"d")  # evicts the oldest leaf, b: never a before it
    assert keys_of(index) == {b"a", b"c", b"d"}


def test_clearing_keeps_slots_that_are_in_use_and_nothing_else() -> None:
    index = ChunkIndex(3, 1)
    store(index, b"a", b"b")
    node = index.get(b"b")
    index.pin(node)
    slot = node.slots[0]
    index.clear()
    assert len(index) == 0
    assert index.used_slots == 1
    store(index, b"x")
    store(index, b"y")
    assert slot not in {index.get(b"x").slots[0], index.get(b"y").slots[0]}
    index.commit(node)
    assert node.state is NodeState.GONE
    index.unpin(node)
    assert index.used_slots == 2
    store(index, b"z")
    assert index.evicted == 0


def test_groups_take_a_slot_each_or_none() -> None:
    index = ChunkIndex(3, 2)
    node = index.reserve(b"a", None, [0, 1])
    assert ABSENT not in node.slots
    assert index.reserve(b"b", node, [0, 1]) is None
    assert index.used_slots == 2
    partial = index.reserve(b"c", node, [1])
    assert partial.slots[0] == ABSENT


def test_slots_are_handed_out_lowest_first_and_once() -> None:
    slots = SlotAllocator(4)
    taken = [slots.take() for _ in range(5)]
    assert taken == [0, 1, 2, 3, None]
    slots.reset(held=[1, 3])
    assert slots.free == 2
    assert [slots.take(), slots.take(), slots.take()] == [0, 2, None]
    slots.give_back(3)
    slots.give_back(1)
    assert {slots.take(), slots.take()} == {1, 3}


def test_a_kept_slot_given_back_early_is_free_when_the_count_reaches_it() -> None:
    slots = SlotAllocator(2)
    slots.take(), slots.take()
    slots.reset(held=[1])
    slots.give_back(1)
    assert slots.free == 2
    assert [slots.take(), slots.take(), slots.take()] == [0, 1, None]


class Watcher:
    """Looks at what leaves the index of its own accord."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        self.discarding = False

    def stored(self, node: Node) -> None:
        pass

    def removed(self, node: Node) -> None:
        if not self.discarding:
            assert node.pins == 0
            assert all(other.parent is not node for other in self.nodes.values())

    def cleared(self) -> None:
        pass


class IndexMachine(RuleBasedStateMachine):
    """Any order of stores, hits, failures and resets, on prefixes of a small alphabet."""

    eviction = Eviction.LRU
    pins = Bundle("pins")
    stores = Bundle("stores")
    extensions = Bundle("extensions")

    def __init__(self) -> None:
        super().__init__()
        self.watcher = Watcher()
        self.index = ChunkIndex(6, 2, self.watcher, chunk_policy(self.eviction), 512)
        self.held: list = []

    @rule(
        target=stores,
        path=st.lists(st.sampled_from("ab"), min_size=1, max_size=4),
        groups=st.sampled_from([[0], [0], []]),
    )
    def begin_store(self, path: list[str], groups: list[int]):
        parent, begun = None, []
        for i in range(len(path)):
            key = "".join(path[: i + 1]).encode()
            node = self.index.get(key)
            if node is not None:
                self.index.adopt(node, parent)
            else:
                if parent is not None and parent.state is NodeState.GONE:
                    break
                node = self.index.reserve(key, parent, groups)
                if node is None:
                    break
                self.held.append(node)
                begun.append(node)
            parent = node
        return begun

    @rule(nodes=consumes(stores), ok=st.booleans())
    def end_store(self, nodes, ok: bool) -> None:
        for node in nodes:
            if ok:
                self.index.commit(node)
            else:
                self.discard(node)
            self.index.unpin(node)
            self.held.remove(node)

    def discard(self, node: Node) -> None:
        self.watcher.discarding = True
        self.index.discard(node)
        self.watcher.discarding = False

    @rule(target=extensions, path=st.lists(st.sampled_from("ab"), min_size=1, max_size=3))
    def begin_extension(self, path: list[str]):
        node = self.index.get("".join(path).encode())
        if node is None or node.slots[1] != ABSENT or 1 in node.coming:
            return None
        if not self.index.extend(node, [1]):
            return None
        assert self.index.get(node.key) is node  # never evicted for its own part
        self.held.append(node)
        return node

    @rule(node=consumes(extensions), ok=st.booleans())
    def end_extension(self, node, ok: bool) -> None:
        if node is None:
            return
        self.index.extended(node, [1], arrived=ok)
        assert not node.coming
        if node.state is not NodeState.GONE:
            assert (node.slots[1] != ABSENT) == ok
        self.held.remove(node)

    @rule(target=pins, path=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def hit(self, path: list[str]):
        keys = ["".join(path[: i + 1]).encode() for i in range(len(path))]
        run = self.index.ready_run(keys, 0)
        self.index.touch(run)
        for node in run:
            self.index.pin(node)
            self.held.append(node)
        return run

    @rule(nodes=consumes(pins), ok=st.booleans())
    def end_hit(self, nodes, ok: bool) -> None:
        for node in nodes:
            if not ok:
                self.discard(node)
            self.index.unpin(node)
            self.held.remove(node)

    @precondition(lambda self: len(self.index) > 2)
    @rule()
    def reset(self) -> None:
        self.index.clear()
        assert len(self.index) == 0

    @invariant()
    def watch(self) -> None:
        self.watcher.nodes = self.index._nodes

    @invariant()
    def the_policy_knows_what_each_chunk_takes(self) -> None:
        entries = getattr(self.index._policy, "_entries", {})
        for node, entry in entries.items():
            if hasattr(entry, "nbytes"):
                assert entry.nbytes == node.num_slots

    @invariant()
    def slots_have_one_owner(self) -> None:
        owners = {id(n): n for n in (*self.index._nodes.values(), *self.held)}
        slots = [s for n in owners.values() for s in n.slots if s != ABSENT]
        slots += [s for n in owners.values() for s in n.coming.values()]
        slots += [s for late in self.index._late.values() for s in late]
        assert len(slots) == len(set(slots)) == self.index.used_slots <= 6

    @invariant()
    def empty_chunks_are_bounded(self) -> None:
        assert len(self.index) <= 12

    @invariant()
    def only_unpinned_leaves_can_be_evicted(self) -> None:
        parents = {id(n.parent) for n in self.index._nodes.values() if n.parent is not None}
        for node in self.index._nodes.values():
            evictable = node.pins == 0 and id(node) not in parents
            assert self.index._policy.may_evict(node) == evictable

    @invariant()
    def pins_add_up(self) -> None:
        assert self.index.pinned == len({id(n) for n in self.held})


@pytest.mark.parametrize("eviction", Eviction)
def test_the_index_in_any_order_of_events(eviction: Eviction) -> None:
    machine = type("Machine", (IndexMachine,), {"eviction": eviction})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    machine.TestCase().runTest()


@pytest.mark.parametrize("eviction", Eviction)
def test_a_prefix_loses_its_tail_before_its_head_under_every_policy(eviction: Eviction) -> None:
    index = ChunkIndex(8, 1, policy=chunk_policy(eviction), chunk_tokens=512)
    prefixes = [[bytes([p, i]) for i in range(4)] for p in range(6)]
    rng = random.Random(0)
    for _ in range(500):
        prefix = rng.choice(prefixes)
        index.touch(index.ready_run(prefix, 0))
        store(index, *prefix)
        for keys in prefixes:
            here = [key in keys_of(index) for key in keys]
            assert here == sorted(here, reverse=True)
    assert index.used_slots == len(index) == 8


def test_chunks_without_a_part_are_bounded_and_not_counted() -> None:
    index = ChunkIndex(2, 1)
    store(index, b"kept")
    parent = None
    for i in range(9):
        node = index.reserve(str(i).encode(), parent, [])
        if node is None:
            break
        index.commit(node)
        index.unpin(node)
        parent = node
    assert keys_of(index) == {b"0", b"1", b"2", b"3"}  # the last has no room but its prefix's
    assert index.used_slots == 0
    assert index.evicted == 1


@pytest.mark.parametrize("count", [1, 7])
def test_evicted_chunks_are_counted(count: int) -> None:
    index = ChunkIndex(1, 1)
    for i in range(count + 1):
        store(index, str(i).encode())
    assert index.evicted == count


def test_slots_beyond_a_limit_are_not_handed_out_again() -> None:
    slots = SlotAllocator(4)
    taken = [slots.take() for _ in range(4)]
    slots.limit(2)
    assert (slots.total, slots.used, slots.free) == (2, 4, 0)
    for slot in taken:
        slots.give_back(slot)
    assert {slots.take(), slots.take(), slots.take()} == {0, 1, None}
    slots.reset(held=[0])
    assert (slots.used, slots.free) == (1, 1)
    assert [slots.take(), slots.take()] == [1, None]
    slots.limit(3)
    assert slots.total == 2
