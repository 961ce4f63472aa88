# SPDX-License-Identifier: Apache-2.0
"""A hand-over between every two layouts: the consumer's pages mean what the producer's meant.

Every value is known by layer, token, head and place. The producer's ranks hold theirs in their
layout, the plan's runs are copied with memmove, and the consumer's pages are read through its own.
"""

from __future__ import annotations

import ctypes
import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit._layouts import ORDERS, SCATTERED, Cache, Shape, make_cache
from vllm_tiered_kv.layout import LayoutError, group_pages
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, RankLayout, heads_of_rank
from vllm_tiered_kv.worker.remote.layout import OwnSlots, page_strips, slot_layout
from vllm_tiered_kv.worker.remote.plan import (
    OutOfRange,
    Places,
    Refusal,
    Runs,
    in_slots,
    place_entries,
    plan_read,
    plan_routes,
    plan_slot_routes,
    whole_slots,
)

LAYERS, CONTENT, ENTRY_TOKENS, BLOCKS = 3, 5, 4, 9
ENTRIES = 7  # of the prompt
GENERATOR = torch.Generator().manual_seed(0)


def truth(heads: int) -> torch.Tensor:
    """What KV is: `[layers, tokens, heads, content]`, never 0."""
    shape = (LAYERS, ENTRIES * ENTRY_TOKENS, heads, CONTENT)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=GENERATOR)


class Rank:
    """One rank's cache, in one layout, with the prompt's blocks somewhere in it."""

    def __init__(
        self, order: str, rank: int, heads: Heads, ratio: int, seed: int, blocks: int
    ) -> None:
        self.heads = heads
        self.ratio = ratio
        shape = Shape(
            order=ORDERS[order],
            layers=LAYERS,
            blocks=BLOCKS,
            ratio=ratio,
            heads=heads.count,
            tokens=ENTRY_TOKENS,
            content=CONTENT,
            dtype=torch.uint8,
            offset=seed,
        )
        self.cache: Cache = make_cache(shape, seed)
        tensors = {f"layer.{i}": tensor for i, tensor in enumerate(self.cache.tensors)}
        self.strips, entries = page_strips(tensors, BLOCKS, heads.count)
        assert entries == ratio
        group = GroupLayout("same", ENTRY_TOKENS, ratio, BLOCKS, heads, self.strips)
        self.layout = RankLayout(rank, (group,))
        needed = -(-ENTRIES // ratio)
        self.blocks = np.random.default_rng(blocks).permutation(BLOCKS)[:needed].astype(np.int64)

    def places(self, first: int = 0, count: int = ENTRIES) -> Places:
        return place_entries(self.blocks, self.ratio, first, count)

    def entry(self, layer: int, index: int) -> torch.Tensor:
        """One entry of the prompt: `[heads, tokens, content]`."""
        block = int(self.blocks[index // self.ratio])
        return self.cache.tensors[layer][block * self.ratio + index % self.ratio]

    def part(self, values: torch.Tensor, layer: int, index: int) -> torch.Tensor:
        """What that entry should hold."""
        tokens = values[layer, index * ENTRY_TOKENS : (index + 1) * ENTRY_TOKENS]
        heads = slice(self.heads.first, self.heads.first + self.heads.count)
        return tokens[:, heads].permute(1, 0, 2)

    def fill(self, values: torch.Tensor) -> None:
        for layer, index in itertools.product(range(LAYERS), range(ENTRIES)):
            self.entry(layer, index).copy_(self.part(values, layer, index))


def ranks(order: str, heads: int, parallel: int, ratio: int, seed: int) -> list[Rank]:
    """All ranks of an engine: they share its block tables."""
    return [
        Rank(order, rank, heads_of_rank(heads, parallel, rank), ratio, seed + rank, blocks=seed)
        for rank in range(parallel)
    ]


def pull(consumer: Rank, producers: list[Rank], first: int = 0, count: int = ENTRIES) -> set[int]:
    """Copy as planned; the ranks that were read."""
    (routes,) = plan_routes(consumer.layout, [producer.layout for producer in producers])
    places = producers[0].places(first, count)
    found = plan_read(routes, consumer.places(first, count), places)
    copy(found)
    return {rank for rank, *_ in found}


def copy(found: list[Runs]) -> None:
    for _, local, remote, nbytes in found:
        for here, there, length in zip(local, remote, nbytes, strict=True):
            ctypes.memmove(int(here), int(there), int(length))


def assert_pulled(consumer: Rank, values: torch.Tensor, entries: range) -> None:
    """The prompt's entries are there, and nothing else in the buffer has changed."""
    before = make_cache(consumer.cache.shape, consumer.cache.shape.offset)
    for layer, index in itertools.product(range(LAYERS), entries):
        block = int(consumer.blocks[index // consumer.ratio])
        entry = block * consumer.ratio + index % consumer.ratio
        before.tensors[layer][entry].copy_(consumer.part(values, layer, index))
    assert torch.equal(consumer.cache.buffer, before.buffer)


def heads_can_be_told(order: str, *sides: list[Rank]) -> bool:
    outermost = order.endswith("HNC")
    return all(outermost or rank.heads.count == 1 for side in sides for rank in side)


@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("parallel", list(itertools.product((1, 2, 4, 8), repeat=2)))
def test_every_tensor_parallelism(order: str, heads: int, parallel: tuple[int, int]) -> None:
    values = truth(heads)
    producers = ranks(order, heads, parallel[0], 1, seed=1)
    consumers = ranks(order, heads, parallel[1], 1, seed=20)
    for producer in producers:
        producer.fill(values)
    alike = min(parallel[0], heads) == min(parallel[1], heads)
    for consumer in consumers:
        if not alike and not heads_can_be_told(order, producers, consumers):
            with pytest.raises(Refusal, match="not apart"):
                pull(consumer, producers)
            continue
        pull(consumer, producers)
        assert_pulled(consumer, values, range(ENTRIES))


# The entries of a block are dense only where layers are outermost.
SIDES = [("LBHNC", 1), ("LBHNC", 2), ("LBHNC", 3), ("BLHNC", 1)]


@pytest.mark.parametrize("sides", list(itertools.product(SIDES, repeat=2)))
@pytest.mark.parametrize("parallel", [(1, 1), (2, 1), (1, 2)])
def test_every_block_size_that_is_made_of_the_same_entries(
    sides: tuple[tuple[str, int], tuple[str, int]], parallel: tuple[int, int]
) -> None:
    """A block of more tokens is several entries, which are never looked into."""
    (producers_order, producers_ratio), (consumers_order, consumers_ratio) = sides
    values = truth(2)
    producers = ranks(producers_order, 2, parallel[0], producers_ratio, seed=1)
    for producer in producers:
        producer.fill(values)
    for consumer in ranks(consumers_order, 2, parallel[1], consumers_ratio, seed=20):
        pull(consumer, producers, 2, 4)
        assert_pulled(consumer, values, range(2, 6))


@settings(deadline=None)
@given(
    order=st.sampled_from(sorted(ORDERS)),
    first=st.integers(0, ENTRIES),
    count=st.integers(0, ENTRIES),
)
def test_any_part_of_a_prompt(order: str, first: int, count: int) -> None:
    count = min(count, ENTRIES - first)
    values = truth(2)
    (producer,) = ranks(order, 2, 1, 1, seed=1)
    (consumer,) = ranks(order, 2, 1, 1, seed=20)
    producer.fill(values)
    pull(consumer, [producer], first, count)
    assert_pulled(consumer, values, range(first, first + count))


PER_SLOT, SLOTS = 2, 6
SLOT_TABLE = np.array([4, 0, 3, 1], dtype=np.int64)
"""Where a prompt's chunks are."""


class Pool:
    """A rank's host pool: slots of two blocks with room behind them."""

    def __init__(self, rank: Rank, seed: int) -> None:
        pages = group_pages(rank.cache.tensors, BLOCKS)
        self.block_bytes = pages.block_bytes
        self.slot_bytes = PER_SLOT * pages.block_bytes + 64
        rng = np.random.default_rng(seed)
        self.bytes = rng.integers(0, 256, SLOTS * self.slot_bytes, dtype=np.uint8)
        self.pages = pages
        chunk = PER_SLOT * ENTRY_TOKENS * rank.ratio
        own = OwnSlots(self.bytes.ctypes.data, self.slot_bytes, SLOTS, chunk, (pages,))
        slots = slot_layout(rank.layout.groups, own)
        rank.layout = msgspec.structs.replace(rank.layout, slots=slots)

    def image(self, index: int) -> np.ndarray:
        """Where the prompt's block of this index lies."""
        at = int(SLOT_TABLE[index // PER_SLOT]) * self.slot_bytes
        at += index % PER_SLOT * self.block_bytes
        return self.bytes[at : at + self.block_bytes]

    def store(self, rank: Rank) -> None:
        for index, block in enumerate(rank.blocks.tolist()):
            rows = [row[block] for row in self.pages.rows]
            self.image(index)[:] = torch.cat(rows).numpy()


@pytest.mark.parametrize("side", [("LBHNC", 1), ("BLHNC", 1), ("LBHNC", 2)])
@pytest.mark.parametrize("parallel", [(1, 1), (2, 1), (1, 2), (4, 2)])
@pytest.mark.parametrize(("first", "count"), [(0, ENTRIES), (3, 2)])
def test_out_of_the_slots_of_a_pool(
    side: tuple[str, int], parallel: tuple[int, int], first: int, count: int
) -> None:
    values = truth(4)
    producers = ranks(side[0], 4, parallel[0], side[1], seed=1)
    pools = [Pool(producer, seed=i) for i, producer in enumerate(producers)]
    for producer, pool in zip(producers, pools, strict=True):
        producer.fill(values)
        pool.store(producer)
        producer.cache.buffer.zero_()
    there = place_entries(SLOT_TABLE, side[1], first, count, PER_SLOT)
    for consumer in ranks("LBHNC", 4, parallel[1], 1, seed=20):
        layouts = [in_slots(producer.layout) for producer in producers]
        (routes,) = plan_routes(consumer.layout, layouts)
        copy(plan_read(routes, consumer.places(first, count), there))
        assert_pulled(consumer, values, range(first, first + count))


def test_from_slots_to_slots() -> None:
    values = truth(4)
    producers, consumers = ranks("BLHNC", 4, 2, 1, seed=1), ranks("BLHNC", 4, 2, 1, seed=20)
    theirs = [Pool(producer, seed=1) for producer in producers]
    ours = [Pool(consumer, seed=2) for consumer in consumers]
    for producer, pool in zip(producers, theirs, strict=True):
        producer.fill(values)
        pool.store(producer)
    before = [pool.bytes.copy() for pool in ours]
    slots = np.array([5, 2], dtype=np.int64)
    for i, consumer in enumerate(consumers):
        (routes,) = plan_slot_routes(consumer.layout, [p.layout for p in producers])
        found = plan_read(routes, whole_slots(slots), whole_slots(SLOT_TABLE[:2]))
        assert [(runs.rank, len(runs.nbytes)) for runs in found] == [(i, 2)]
        copy(found)
        size = PER_SLOT * ours[i].block_bytes
        for here, there in zip(slots, SLOT_TABLE, strict=False):
            at = int(here) * ours[i].slot_bytes
            before[i][at : at + size] = theirs[i].bytes[int(there) * theirs[i].slot_bytes :][:size]
        assert np.array_equal(ours[i].bytes, before[i])


@pytest.mark.parametrize(
    ("order", "parallel", "ratio"), [("LBHNC", 1, 1), ("BLHNC", 2, 1), ("LBHNC", 1, 2)]
)
def test_slots_that_are_laid_out_otherwise_are_refused(
    order: str, parallel: int, ratio: int
) -> None:
    producers, (consumer,) = ranks(order, 4, parallel, ratio, seed=1), ranks("BLHNC", 4, 1, 1, 20)
    for rank in (*producers, consumer):
        Pool(rank, seed=0)
    layouts = [producer.layout for producer in producers]
    if order == "LBHNC" and ratio == 1:  # the image of a block is the same there
        assert plan_slot_routes(consumer.layout, layouts)
        return
    with pytest.raises(Refusal, match="laid out otherwise"):
        plan_slot_routes(consumer.layout, layouts)


def test_slots_that_are_not_shown_are_not_read() -> None:
    (rank,) = ranks("LBHNC", 2, 1, 1, seed=1)
    with pytest.raises(Refusal, match="no slots"):
        in_slots(rank.layout)
    with pytest.raises(Refusal, match="no slots"):
        plan_slot_routes(rank.layout, [rank.layout])
    with pytest.raises(OutOfRange):
        place_entries(SLOT_TABLE, 1, 0, len(SLOT_TABLE) * PER_SLOT + 1, PER_SLOT)


def test_layers_of_a_pipeline_are_found_on_the_ranks_that_have_them() -> None:
    values = truth(2)
    (whole,) = ranks("LBHNC", 2, 1, 1, seed=1)
    whole.fill(values)
    (group,) = whole.layout.groups
    stages = [
        RankLayout(i, (msgspec.structs.replace(group, strips=strips),))
        for i, strips in enumerate((group.strips[:1], group.strips[1:]))
    ]
    (consumer,) = ranks("LBHNC", 2, 1, 1, seed=20)
    (routes,) = plan_routes(consumer.layout, stages)
    found = plan_read(routes, consumer.places(), whole.places())
    assert [runs.rank for runs in found] == [0, 1]
    assert [len(runs.nbytes) for runs in found] == [ENTRIES, 2 * ENTRIES]


def test_consumers_spread_over_ranks_that_hold_the_same() -> None:
    producers = ranks("LBHNC", 1, 4, 1, seed=1)
    for producer in producers:
        producer.fill(truth(1))
    read = [pull(consumer, producers) for consumer in ranks("LBHNC", 1, 4, 1, seed=20)]
    assert read == [{0}, {1}, {2}, {3}]


def test_layers_that_share_memory_are_read_once() -> None:
    (rank,) = ranks("LBHNC", 2, 1, 1, seed=1)
    (group,) = rank.layout.groups
    twin = msgspec.structs.replace(group.strips[0], layer="twin")
    layout = RankLayout(0, (msgspec.structs.replace(group, strips=(*group.strips, twin)),))
    (routes,) = plan_routes(layout, [layout])
    (runs,) = plan_read(routes, rank.places(), rank.places())
    assert len(runs.nbytes) == LAYERS * ENTRIES


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC"])
def test_runs_come_in_the_order_in_which_neighbours_follow_each_other(order: str) -> None:
    (producer,) = ranks(order, 2, 1, 1, seed=1)
    (consumer,) = ranks(order, 2, 1, 1, seed=20)
    (routes,) = plan_routes(consumer.layout, [producer.layout])
    table = np.arange(BLOCKS, dtype=np.int64)
    places = place_entries(table, 1, 0, BLOCKS)
    (runs,) = plan_read(routes, places, places)
    breaks = np.count_nonzero(runs.local[1:] != runs.local[:-1] + runs.nbytes[:-1])
    assert breaks == 0  # these layouts have no gap between neighbours, so it is one run


def refusal(**changes: object) -> str:
    """What is said when the producer's group differs by this."""
    (rank,) = ranks("LBHNC", 2, 1, 1, seed=1)
    other = RankLayout(0, (msgspec.structs.replace(rank.layout.groups[0], **changes),))
    with pytest.raises(Refusal) as caught:
        plan_routes(rank.layout, [other])
    return str(caught.value)


def test_what_cannot_be_read_is_refused_with_a_sentence() -> None:
    (rank,) = ranks("LBHNC", 2, 1, 1, seed=1)
    strips = rank.layout.groups[0].strips
    smaller = tuple(msgspec.structs.replace(s, entry_bytes=s.entry_bytes - 1) for s in strips)
    assert "mean something else" in refusal(contents="other")
    assert "without looking into a page" in refusal(entry_tokens=8)
    assert "KV heads there" in refusal(heads=Heads(0, 2, 4))
    assert "bytes there" in refusal(strips=smaller)
    assert "no rank there" in refusal(strips=strips[:2])
    half = tuple(msgspec.structs.replace(s, entry_bytes=s.entry_bytes // 2) for s in strips)
    assert "differs in size" in refusal(heads=Heads(0, 1, 2))
    assert "no rank there has KV head 1" in refusal(heads=Heads(0, 1, 2), strips=half)
    with pytest.raises(Refusal, match="KV cache groups"):
        plan_routes(rank.layout, [RankLayout(0, ())])
    with pytest.raises(Refusal, match="no rank there"):
        plan_routes(rank.layout, [])


@pytest.mark.parametrize("side", ["local", "remote"])
@pytest.mark.parametrize("block", [-1, BLOCKS, 1 << 60])
def test_blocks_that_do_not_exist_are_refused(side: str, block: int) -> None:
    (rank,) = ranks("LBHNC", 2, 1, 1, seed=1)
    (routes,) = plan_routes(rank.layout, [rank.layout])
    good = rank.places(0, 2)
    bad = good._replace(blocks=np.array([0, block]))
    with pytest.raises(OutOfRange):
        plan_read(routes, *((bad, good) if side == "local" else (good, bad)))


def test_tables_of_unequal_length_are_refused() -> None:
    (rank,) = ranks("LBHNC", 2, 1, 1, seed=1)
    (routes,) = plan_routes(rank.layout, [rank.layout])
    with pytest.raises(OutOfRange):
        plan_read(routes, rank.places(0, 2), rank.places(0, 3))
    for first, count in ((0, ENTRIES + 1), (-1, 2), (5, 5)):
        with pytest.raises(OutOfRange):
            place_entries(rank.blocks, 1, first, count)


@pytest.mark.parametrize("order", sorted(SCATTERED))
def test_pages_that_are_not_one_run_are_refused(order: str) -> None:
    cache = make_cache(Shape(order=SCATTERED[order], blocks=3))
    tensors = {str(i): tensor for i, tensor in enumerate(cache.tensors)}
    with pytest.raises(LayoutError):
        page_strips(tensors, 3, cache.shape.heads)


def test_heads_are_divided_as_vllm_divides_them() -> None:
    assert [heads_of_rank(8, 2, rank).first for rank in range(2)] == [0, 4]
    assert heads_of_rank(8, 2, 1).count == 4
    assert [heads_of_rank(2, 8, rank).first for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
