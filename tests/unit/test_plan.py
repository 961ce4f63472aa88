# SPDX-License-Identifier: Apache-2.0
"""Cutting prompts into chunks and matching blocks with slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv import assemble, compat
from vllm_tiered_kv.config import ConfigError, parse_options
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind, plan_geometry
from vllm_tiered_kv.scheduler.groups import usable_ends
from vllm_tiered_kv.scheduler.index import ABSENT, Node
from vllm_tiered_kv.scheduler.plan import blocks_of_chunk, chunk_keys, plan_load
from vllm_tiered_kv.scheduler.requests import Offer

FULL = GroupGeometry(GroupKind.FULL, 16, 64 << 10)


def geometry(*groups: GroupGeometry, chunk: int = 32) -> Geometry:
    return Geometry(chunk, 16, groups or (FULL,))


def window(tokens: int) -> GroupGeometry:
    return GroupGeometry(GroupKind.WINDOW, 16, 64 << 10, tokens)


def node(*slots: int) -> Node:
    return Node(b"", None, list(slots), 0)


@pytest.mark.parametrize(
    ("block_tokens", "block_bytes", "chunk"),
    [
        (16, 2 << 20, 16),
        (16, 640 << 10, 32),
        (16, 16 << 10, 128),
        (128, 1 << 20, 128),
        (256, 8, 256),
    ],
)
def test_a_chunk_is_about_a_mebibyte_of_whole_blocks(
    block_tokens: int, block_bytes: int, chunk: int
) -> None:
    group = GroupGeometry(GroupKind.FULL, block_tokens, block_bytes)
    cut = plan_geometry(
        [group], scheduler_tokens=block_tokens, hash_tokens=block_tokens, chunk_tokens=None
    )
    assert cut.chunk_tokens == chunk
    assert cut.slot_bytes % 4096 == 0
    assert cut.slot_bytes >= chunk // block_tokens * block_bytes


def test_groups_of_different_block_sizes_share_the_chunk() -> None:
    groups = [
        GroupGeometry(GroupKind.FULL, 32, 1 << 20),
        GroupGeometry(GroupKind.WINDOW, 16, 1 << 19, 64),
    ]
    cut = plan_geometry(groups, scheduler_tokens=32, hash_tokens=16, chunk_tokens=64)
    assert [cut.blocks_per_chunk(g) for g in cut.group_ids] == [2, 4]
    assert cut.hashes_per_chunk == 4


def test_a_chosen_chunk_must_be_whole_blocks() -> None:
    with pytest.raises(ConfigError, match=r"chunk_tokens: 24 .* 16"):
        plan_geometry([FULL], scheduler_tokens=16, hash_tokens=16, chunk_tokens=24)


@given(st.integers(0, 200))
def test_keys_are_the_hashes_of_each_full_chunks_last_block(tokens: int) -> None:
    hashes = [str(i).encode() for i in range(tokens // 16)]
    keys = chunk_keys(hashes, tokens, geometry())
    assert keys == [str(2 * i + 1).encode() for i in range(tokens // 32)]


def test_keys_stop_at_the_tokens_asked_for() -> None:
    hashes = [str(i).encode() for i in range(10)]
    assert chunk_keys(hashes, 63, geometry()) == [b"1"]


def test_a_load_may_begin_in_the_middle_of_a_chunk() -> None:
    offer = Offer(16, 0, (node(7), node(3)))
    plan = plan_load(geometry(), offer, 48, [[10, 11, 12, 13]], null_block=0)
    assert [(c.slot, c.first, c.blocks) for c in plan.copies] == [(7, 1, (11,)), (3, 0, (12, 13))]
    assert plan.sources == (0, 1)


def test_a_load_may_be_cut_short_by_vllm() -> None:
    offer = Offer(0, 0, (node(7), node(3)))
    plan = plan_load(geometry(), offer, 16, [[10, 11, 12, 13]], null_block=0)
    assert [(c.slot, c.first, c.blocks) for c in plan.copies] == [(7, 0, (10,))]


@pytest.mark.parametrize(
    ("offer", "tokens", "table"),
    [
        (Offer(0, 0, (node(7),)), 64, [[1, 2, 3, 4]]),  # more than was offered
        (Offer(0, 0, (node(7), node(8))), 64, [[1, 2, 3]]),  # fewer blocks than tokens
        (Offer(0, 0, (node(ABSENT),)), 32, [[1, 2]]),  # a part that is not stored
        (Offer(0, 0, (node(7),)), 32, [[1, 0]]),  # full attention without a block
    ],
)
def test_a_load_that_cannot_be_filled_is_no_plan(offer: Offer, tokens: int, table: list) -> None:
    assert plan_load(geometry(), offer, tokens, table, null_block=0) is None


def test_a_window_group_is_loaded_where_it_has_blocks() -> None:
    cut = geometry(FULL, window(32))
    offer = Offer(0, 0, (node(1, ABSENT), node(2, 5)))
    plan = plan_load(cut, offer, 64, [[10, 11, 12, 13], [0, 0, 22, 23]], null_block=0)
    assert [(c.group, c.slot, c.blocks) for c in plan.copies] == [
        (0, 1, (10, 11)),
        (0, 2, (12, 13)),
        (1, 5, (22, 23)),
    ]


def test_a_window_group_stores_what_it_still_holds() -> None:
    cut = geometry(FULL, window(32))
    table = [[10, 11, 12, 13], [0, 21, 22, 23]]
    assert blocks_of_chunk(cut, 0, table, 0) == {0: (10, 11)}
    assert blocks_of_chunk(cut, 1, table, 0) == {0: (12, 13), 1: (22, 23)}
    assert blocks_of_chunk(cut, 2, table, 0) is None


def test_windows_alone_may_have_left_a_chunk_behind_altogether() -> None:
    assert blocks_of_chunk(geometry(window(32)), 0, [[0, 21, 22, 23]], 0) == {}


@given(
    st.lists(st.booleans(), max_size=12),
    st.integers(0, 3),
    st.sampled_from([2, 16, 17, 32, 33, 34, 100]),
    st.integers(0, 1),
)
def test_a_hit_ends_where_every_window_is_whole(
    has_part: list[bool], first: int, tokens: int, partial: int
) -> None:
    """Against the definition: heads whose window lies in parts or on the device."""
    cut = geometry(FULL, window(tokens))
    run = [node(1, 1 if part else ABSENT) for part in has_part]
    start = first * 32 + partial * 16

    def whole(count: int) -> bool:
        end = (first + count) * 32
        needed = range(max(start, end - tokens + 1), end)
        return all(has_part[t // 32 - first] for t in needed)

    want = [n for n in range(1, len(run) + 1) if whole(n)]
    assert usable_ends(cut, run, first, start) == want


@given(st.integers(0, 12), st.integers(0, 3))
def test_without_windows_a_hit_ends_anywhere(count: int, first: int) -> None:
    ends = usable_ends(geometry(FULL), [node(1)] * count, first, first * 32)
    assert list(ends) == list(range(1, count + 1))


def test_slots_of_an_uneven_pipeline_are_aligned_on_every_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers of 2 KiB on the first stage fill a page of memory, three on the others two."""
    monkeypatch.setattr(compat, "largest_layer_share", lambda _: 1.5)
    capacity = 60 * 4096
    options = parse_options({"cpu": {"capacity": capacity}})
    cut = geometry(GroupGeometry(GroupKind.FULL, 16, 4096), chunk=16)
    assert cut.slot_bytes == 4096
    slots = assemble._num_slots(SimpleNamespace(), options, cut, ranks=3)
    assert 0 < slots * (4096 + 8192 + 8192) <= capacity
