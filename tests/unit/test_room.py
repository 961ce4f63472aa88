# SPDX-License-Identifier: Apache-2.0
"""What requests hold that wait for a load, and what they still need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.scheduler.room import Room

FULL = GroupGeometry(GroupKind.FULL, 16, 1)
WINDOW = GroupGeometry(GroupKind.WINDOW, 16, 1, window=64)
STATE = GroupGeometry(GroupKind.STATE, 16, 1)
NULL = 0


def room(*groups: GroupGeometry, blocks: int, drafts: int = 0) -> Room:
    made = Room(Geometry(16, 16, groups), step_tokens=48, draft_tokens=drafts)
    made.bind(blocks)
    return made


def test_a_window_that_moves_on_needs_new_blocks() -> None:
    """128 of 160 tokens are loaded: four blocks in the window, and two more for what is left."""
    one = room(WINDOW, blocks=13)
    assert one.admits(10_000)  # alone: that is vLLM's to decide
    one.takes("a", 160, [[NULL] * 4 + [1, 2, 3, 4]], NULL)
    assert not one.admits(160)  # 4 + 2 here, and 8 at most there
    assert one.admits(7 * 16)
    one.gives("a")
    assert one.admits(160)


def test_without_windows_vllm_counts_itself() -> None:
    one = room(FULL, blocks=2)
    one.takes("a", 160, [[1, 2]], NULL)
    assert one.admits(1000)


def test_blocks_that_two_hold_count_once() -> None:
    one = room(FULL, WINDOW, blocks=30)
    one.takes("a", 64, [[1, 2, 3, 4], [5, 6, 7, 8]], NULL)
    one.takes("b", 64, [[1, 2, 3, 4], [5, 6, 7, 8]], NULL)
    assert one.admits(11 * 16)  # 8 here, 11 and 8 there
    assert not one.admits(15 * 16)
    one.gives("a")
    assert not one.admits(15 * 16)
    one.gives("b")
    assert one.admits(15 * 16)


def test_draft_tokens_take_room() -> None:
    for drafts, fits in ((0, True), (1, False)):
        one = room(WINDOW, blocks=12, drafts=drafts)
        one.takes("a", 128, [[NULL] * 4 + [1, 2, 3, 4]], NULL)
        assert one.admits(8 * 16) is fits


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sets(st.integers(1, 9), max_size=6)), max_size=20)
)
def test_what_is_given_back_is_forgotten(moves: list[tuple[str, set[int]]]) -> None:
    one = room(WINDOW, STATE, blocks=20)
    for name, blocks in moves:
        if blocks:
            one.takes(name, 200, [sorted(blocks), [10]], NULL)
        else:
            one.gives(name)
    for name in "abc":
        one.gives(name)
        one.gives(name)
    one.takes("d", 64, [[1, 2, 3, 4], [5]], NULL)
    assert one.admits(4 * 16 + 48)
    assert one.admits(5 * 16)
