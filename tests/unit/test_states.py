# SPDX-License-Identifier: Apache-2.0
"""Recurrent states: where they are copied from, and what makes them a hit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_tiered_kv import compat
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind, plan_geometry
from vllm_tiered_kv.scheduler.groups import usable_ends
from vllm_tiered_kv.scheduler.index import ABSENT, Node
from vllm_tiered_kv.scheduler.plan import blocks_of_chunk, plan_load
from vllm_tiered_kv.scheduler.requests import Offer
from vllm_tiered_kv.scheduler.states import NO_STATES, found_states, kept_states

STATE = GroupGeometry(GroupKind.STATE, 16, 64 << 10)
FULL = GroupGeometry(GroupKind.FULL, 16, 64 << 10)
CUT = Geometry(16, 16, (STATE, FULL))


def node(*slots: int) -> Node:
    return Node(b"", None, list(slots), 0)


def test_a_chunk_is_one_scheduler_block_where_there_are_states() -> None:
    """vLLM may keep a state at any block's end, and each is worth resuming from."""
    cut = plan_geometry([STATE, FULL], scheduler_tokens=16, hash_tokens=16, chunk_tokens=None)
    assert cut.chunk_tokens == 16
    assert not cut.keeps_all


def test_of_a_chunk_of_several_blocks_one_state_is_kept() -> None:
    cut = Geometry(64, 16, (STATE, GroupGeometry(GroupKind.FULL, 16, 1 << 10)))
    assert cut.slot_bytes == 64 << 10
    assert [cut.kept_blocks(g) for g in cut.group_ids] == [1, 4]


def test_states_handed_over_at_a_chunks_end_are_kept() -> None:
    handed_over = [(0, 7, 32), (0, 8, 40), (1, 9, 32), (0, 6, 0), (5, 5, 32)]
    assert kept_states(CUT, handed_over) == {1: {0: 7}}


@pytest.mark.parametrize(
    ("computed", "want"),
    [(32, {1: {0: 22}}), (16, NO_STATES), (40, NO_STATES), (0, NO_STATES), (64, NO_STATES)],
    ids=["its last block", "a null block", "within a block", "nothing found", "beyond the table"],
)
def test_a_state_that_was_found_is_the_last_block(computed: int, want: object) -> None:
    assert found_states(CUT, computed, [[0, 22, 23], [1, 2, 3]], null_block=0) == want


def test_a_block_table_alone_says_nothing_of_states() -> None:
    """A running state stands there too."""
    table = [[31, 32], [41, 42]]
    assert blocks_of_chunk(CUT, 1, table, 0) == {1: (42,)}
    assert blocks_of_chunk(CUT, 1, table, 0, {0: 32}) == {0: (32,), 1: (42,)}
    assert blocks_of_chunk(CUT, 1, table, 0, {0: 0}) == {1: (42,)}


@pytest.mark.parametrize(
    ("states", "want"),
    [([1, 1, 1], [1, 2, 3]), ([0, 1, 0], [2]), ([0, 0, 1], [3]), ([1, 0, 1], [1, 3]), ([0, 0], [])],
)
def test_a_hit_ends_at_a_state(states: list[int], want: list[int]) -> None:
    run = [node(1 if state else ABSENT, 2) for state in states]
    assert usable_ends(CUT, run, 4, 64) == want


def test_only_the_last_state_is_loaded() -> None:
    offer = Offer(16, 1, (node(5, 6), node(ABSENT, 8), node(9, 10)))
    plan = plan_load(CUT, offer, 48, [[0, 0, 0, 33], [40, 41, 42, 43]], null_block=0)
    assert plan is not None
    assert [(c.group, c.slot, c.first, c.blocks) for c in plan.copies] == [
        (0, 9, 0, (33,)),
        (1, 6, 0, (41,)),
        (1, 8, 0, (42,)),
        (1, 10, 0, (43,)),
    ]
    assert plan.sources == (2, 0, 1, 2)


@pytest.mark.parametrize(
    ("tokens", "table"),
    [
        (32, [[0, 0, 33], [40, 41, 42]]),  # cut short: no state was kept there
        (48, [[0, 0, 0, 0], [40, 41, 42, 43]]),  # no block for the state
        (48, [[0, 0, 0], [40, 41, 42, 43]]),
    ],
)
def test_a_state_that_has_no_place_is_no_plan(tokens: int, table: list[list[int]]) -> None:
    offer = Offer(16, 1, (node(5, 6), node(ABSENT, 8), node(9, 10)))
    assert plan_load(CUT, offer, tokens, table, null_block=0) is None


def test_vllm_names_the_states_of_a_step() -> None:
    state = SimpleNamespace(boundary_state_offloads={"a": [(0, 7, 32)]})
    output = SimpleNamespace(kv_connector_block_state=state)
    assert compat.handed_over_states(output, "a") == [(0, 7, 32)]
    assert compat.handed_over_states(output, "b") == ()
    output.kv_connector_block_state = None
    assert compat.handed_over_states(output, "a") == ()
