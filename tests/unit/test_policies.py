# SPDX-License-Identifier: Apache-2.0
"""The eviction policies against the algorithms of their papers, and under holds."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.unit._policy_models import ARCModel, CostModel, LRUModel, S3FIFOModel
from vllm_tiered_kv.policies import Eviction, Item, make_policy
from vllm_tiered_kv.policies.cost import DOUBLING_TOKENS, compute_cost
from vllm_tiered_kv.policies.heap import Heap, HeapNode

MODELS = {
    Eviction.LRU: LRUModel,
    Eviction.S3FIFO: S3FIFOModel,
    Eviction.ARC: ARCModel,
    Eviction.COST: CostModel,
}


class Cache:
    """A cache of ``size`` pages, one of which is asked for at a time."""

    def __init__(self, eviction: Eviction, size: int) -> None:
        self.policy = make_policy(eviction)
        self.size = size
        self.pages: set[int] = set()

    def request(self, page: int, item: Item) -> bool:
        if page in self.pages:
            self.policy.use((page,))
            return True
        while len(self.pages) >= self.size:
            victim = self.policy.victim(page)
            self.policy.evict(victim)
            self.pages.remove(victim)
        self.policy.add(page, item)
        self.pages.add(page)
        return False


@pytest.mark.parametrize("eviction", Eviction)
@given(
    pages=st.lists(st.integers(0, 30), max_size=300),
    size=st.integers(1, 20),
    span=st.integers(1, 3),
)
@settings(deadline=None)
def test_a_policy_does_what_its_paper_says(
    eviction: Eviction, pages: list[int], size: int, span: int
) -> None:
    cache, model = Cache(eviction, size), MODELS[eviction](size)
    for page in pages:
        item = Item(nbytes=1, tokens=512, position=2 * (page // span))
        assert cache.request(page, item) == model.request(page, item)
        assert cache.pages == model.contents()


@pytest.mark.parametrize("eviction", Eviction)
def test_a_policy_does_what_its_paper_says_on_a_long_skewed_load(eviction: Eviction) -> None:
    rng = random.Random(1)
    cache, model = Cache(eviction, 50), MODELS[eviction](50)
    for _ in range(20_000):
        page = int(rng.paretovariate(0.5)) % 1000
        item = Item(tokens=512, position=2 * (page % 40))
        assert cache.request(page, item) == model.request(page, item)
    assert cache.pages == model.contents()


def test_s3fifo_passes_over_what_is_seen_once_and_takes_back_what_it_remembers() -> None:
    cache, item = Cache(Eviction.S3FIFO, 10), Item()
    for page in (1, 1, 1, *range(10, 30)):  # page 1 is used twice after it came
        cache.request(page, item)
    assert 1 in cache.pages
    assert cache.request(20, item) is False  # evicted from the small queue, and remembered
    for page in range(30, 45):
        cache.request(page, item)
    assert {1, 20} <= cache.pages


def test_arc_keeps_what_was_used_twice_through_a_scan() -> None:
    cache, item = Cache(Eviction.ARC, 10), Item()
    for page in (1, 2, 3, 1, 2, 3, *range(100, 200)):
        cache.request(page, item)
    assert {1, 2, 3} <= cache.pages


def test_the_time_to_compute_a_chunk_grows_with_its_position() -> None:
    assert compute_cost(Item(tokens=512)) == 512
    far = Item(tokens=512, position=DOUBLING_TOKENS // 512)
    assert compute_cost(far) == 2 * 512


def test_cost_evicts_what_is_cheap_large_or_seldom_used() -> None:
    policy = make_policy(Eviction.COST)
    policy.add("far", Item(4, 512, 64))
    policy.add("large", Item(16, 512, 64))
    policy.add("used", Item(4, 512, 0))
    policy.add("near", Item(4, 512, 0))
    policy.use(["used"])
    policy.use(["used"])
    order = []
    while (key := policy.victim()) is not None:
        policy.evict(key)
        order.append(key)
    assert order == ["large", "near", "far", "used"]


@pytest.mark.parametrize("eviction", Eviction)
def test_a_victim_is_named_also_where_everything_was_used(eviction: Eviction) -> None:
    policy = make_policy(eviction)
    pages = range(1000)
    for page in pages:
        policy.add(page, Item())
    for _ in range(5):
        policy.use(pages)
    for _ in pages:
        victim = policy.victim()
        assert policy.may_evict(victim)
        policy.evict(victim)
    assert policy.victim() is None


class HoldMachine(RuleBasedStateMachine):
    """Entries come, go and are held in any order."""

    eviction: Eviction

    def __init__(self) -> None:
        super().__init__()
        self.policy = make_policy(self.eviction)
        self.here: set[int] = set()
        self.held: set[int] = set()

    keys = st.integers(0, 7)

    @rule(key=keys, size=st.integers(1, 3), position=st.integers(0, 5))
    def add(self, key: int, size: int, position: int) -> None:
        if key not in self.here:
            self.policy.add(key, Item(size, 512, position))
            self.here.add(key)

    @rule(keys=st.lists(keys, max_size=5))
    def use(self, keys: list[int]) -> None:
        self.policy.use(keys)

    @rule(keys=st.lists(keys, max_size=5))
    def renew(self, keys: list[int]) -> None:
        self.policy.renew(keys)

    @rule(key=keys, size=st.integers(0, 9))
    def resize(self, key: int, size: int) -> None:
        self.policy.resize(key, size)

    @rule(key=keys)
    def hold(self, key: int) -> None:
        self.policy.hold(key)
        self.held |= {key} & self.here

    @rule(key=keys)
    def release(self, key: int) -> None:
        if key in self.held:
            self.policy.release(key)
            self.held.remove(key)

    @rule(coming=keys)
    def evict(self, coming: int) -> None:
        victim = self.policy.victim(coming)
        if victim is None:
            assert self.here == self.held
            return
        assert victim in self.here - self.held
        self.policy.evict(victim)
        self.here.remove(victim)

    @rule(key=keys)
    def remove(self, key: int) -> None:
        self.policy.remove(key)
        self.here.discard(key)
        self.held.discard(key)

    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.here, self.held = set(), set()

    @invariant()
    def only_what_is_here_and_not_held_may_be_evicted(self) -> None:
        assert {key for key in range(8) if self.policy.may_evict(key)} == self.here - self.held


@pytest.mark.parametrize("eviction", Eviction)
def test_what_is_held_is_never_a_victim(eviction: Eviction) -> None:
    machine = type("Machine", (HoldMachine,), {"eviction": eviction})
    machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    machine.TestCase().runTest()


@pytest.mark.parametrize("eviction", [Eviction.S3FIFO, Eviction.ARC, Eviction.COST])
def test_holding_an_entry_does_not_change_its_turn(eviction: Eviction) -> None:
    held, free = make_policy(eviction), make_policy(eviction)
    for key in range(20):
        for policy in (held, free):
            policy.add(key, Item())
    for key in (3, 19, 0, 7):
        held.hold(key)
    for key in (0, 7, 3, 19):
        held.release(key)
    for _ in range(20):
        assert held.victim() == free.victim()
        held.evict(held.victim())
        free.evict(free.victim())


@pytest.mark.parametrize("eviction", [Eviction.S3FIFO, Eviction.ARC])
def test_what_a_policy_remembers_is_bounded(eviction: Eviction) -> None:
    cache = Cache(eviction, 10)
    rng = random.Random(0)
    for _ in range(5_000):
        cache.request(rng.randrange(1_000), Item())
    policy = cache.policy
    names = ["_ghosts"] if eviction is Eviction.S3FIFO else ["_once_ghosts", "_again_ghosts"]
    assert 0 < sum(getattr(policy, name).nbytes for name in names) <= 10


def test_what_comes_back_is_known_by_its_identity() -> None:
    policy = make_policy(Eviction.S3FIFO, identity=lambda key: key[0])
    policy.add(("a", 1), Item())
    for i in range(9):
        policy.add((i, 1), Item())
    assert policy.victim() == ("a", 1)
    policy.evict(("a", 1))
    policy.add(("a", 2), Item())  # goes to the main queue
    for _ in range(8):
        victim = policy.victim()
        policy.evict(victim)
        assert victim != ("a", 2)


@given(st.lists(st.tuples(st.sampled_from("put take change".split()), st.integers(0, 9))))
def test_a_heap_gives_the_least_and_lets_any_go(steps: list[tuple[str, int]]) -> None:
    heap: Heap[HeapNode] = Heap()
    inside: list[HeapNode] = []
    for step, number in steps:
        if step == "put":
            node = HeapNode((number, len(inside)))
            heap.push(node)
            inside.append(node)
        elif inside and step == "take":
            node = inside.pop(number % len(inside))
            heap.take_out(node)
            assert not node.inside
        elif inside:
            heap.change(inside[number % len(inside)], (number, -1))
        assert len(heap) == len(inside)
        least = heap.least()
        assert (least.rank if least else None) == min((n.rank for n in inside), default=None)


@pytest.mark.parametrize("eviction", Eviction)
def test_an_entry_of_no_bytes_comes_back(eviction: Eviction) -> None:
    """As a chunk that only links what comes after it."""
    policy = make_policy(eviction)
    for key in ("link", "other"):
        policy.add(key, Item(0))
    policy.use(["other"])
    for _ in range(3):
        gone = policy.victim("coming")
        assert gone is not None
        policy.evict(gone)
        assert policy.victim(gone) != gone
        policy.add(gone, Item(0))


@pytest.mark.parametrize("eviction", Eviction)
def test_a_use_that_goes_on_is_no_further_use(eviction: Eviction) -> None:
    once, renewed = make_policy(eviction), make_policy(eviction)
    for policy in (once, renewed):
        for key in range(20):
            policy.add(key, Item())
        for key in (3, 7):
            policy.use((key,))
    for _ in range(5):
        renewed.renew((3, 7))
    order: list[list[int | None]] = [[], []]
    for policy, gone in zip((once, renewed), order, strict=True):
        for new in range(20, 60):  # a scan: what is used more often outlives it
            victim = policy.victim(new)
            gone.append(victim)
            policy.evict(victim)
            policy.add(new, Item())
    assert order[0] == order[1]


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.ARC])
def test_what_is_renewed_is_the_newest_of_its_kind(eviction: Eviction) -> None:
    policy = make_policy(eviction)
    for key in range(4):
        policy.add(key, Item())
    policy.renew((1, 0))
    order = []
    while (key := policy.victim()) is not None:
        policy.evict(key)
        order.append(key)
    assert order == [2, 3, 1, 0]


@pytest.mark.parametrize("eviction", [Eviction.S3FIFO, Eviction.ARC])
def test_an_entry_that_grows_takes_its_new_room(eviction: Eviction) -> None:
    """As if it had had the size from the start: the queues' shares are in bytes."""
    born, grown = make_policy(eviction), make_policy(eviction)
    for key in range(30):
        born.add(key, Item(5 if key < 3 else 1))
        grown.add(key, Item(1))
    for key in range(3):
        grown.hold(key)
        grown.resize(key, 5)
        grown.release(key)
    for policy in (born, grown):
        policy.use(range(0, 30, 2))
        policy.use(range(0, 30, 4))
    for new in range(30, 60):
        victims = [policy.victim(new) for policy in (born, grown)]
        assert victims[0] == victims[1]
        for policy, victim in zip((born, grown), victims, strict=True):
            policy.evict(victim)
            policy.add(new, Item(1))
    for policy in (born, grown):
        while (victim := policy.victim()) is not None:
            policy.remove(victim)
    queues = ["_small", "_main"] if eviction is Eviction.S3FIFO else ["_once", "_again"]
    assert [getattr(grown, name).nbytes for name in queues] == [0, 0]


def test_what_has_grown_is_worth_less_a_byte() -> None:
    policy = make_policy(Eviction.COST)
    for key in ("first", "second", "third"):
        policy.add(key, Item(4, 512, 0))
    policy.use(["second"])
    policy.resize("second", 64)
    policy.resize("third", 2)
    policy.resize("nobody", 1)
    order = []
    while (key := policy.victim()) is not None:
        policy.evict(key)
        order.append(key)
    assert order == ["second", "first", "third"]
