# SPDX-License-Identifier: Apache-2.0
"""Where hits can end that parts on disk and in memory make, against trying every length."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import example, given, settings

from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.scheduler.fetch import Fetch, possible_ends
from vllm_tiered_kv.scheduler.groups import parts_needed
from vllm_tiered_kv.scheduler.index import ChunkIndex

TOKENS = 8
FULL = GroupGeometry(GroupKind.FULL, TOKENS, 64)


def window(tokens: int) -> GroupGeometry:
    return GroupGeometry(GroupKind.WINDOW, TOKENS, 64, tokens)


STATE = GroupGeometry(GroupKind.STATE, TOKENS, 64)
kinds = st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 40).map(window))


def reads(group: GroupGeometry, end: int, start: int) -> set[int]:
    """Chunks, by index in the prompt, that hold what is read when token ``end`` is computed."""
    if group.kind is GroupKind.FULL:
        first = 0
    elif group.kind is GroupKind.STATE:
        first = end - 1
    else:
        first = max(0, end - group.window + 1)
    return {token // TOKENS for token in range(max(first, start), end)}


def try_all(
    geometry: Geometry, could: Sequence[int], first: int, start: int, room: int
) -> dict[int, list[int]]:
    """By length what each chunk is needed for."""
    found = {}
    for length in range(1, min(len(could), room // len(geometry.groups)) + 1):
        end = (first + length) * TOKENS
        needed = [0] * length
        for g, group in enumerate(geometry.groups):
            for chunk in reads(group, end, start):
                needed[chunk - first] |= 1 << g
        if all(could[i] & needed[i] == needed[i] for i in range(length)):
            found[length] = needed
    return found


@st.composite
def questions(draw: st.DrawFn) -> tuple[Geometry, list[int], int, int, int]:
    groups = tuple(draw(st.lists(kinds, min_size=1, max_size=3)))
    geometry = Geometry(TOKENS, TOKENS, groups)
    everything = (1 << len(groups)) - 1
    mask = st.one_of(st.just(everything), st.integers(0, everything))
    always = geometry.full_groups
    has_always = mask.map(lambda some: some | always)  # the run ends before a chunk without
    could = draw(st.lists(has_always, max_size=10))
    first = draw(st.integers(0, 4))
    start = first * TOKENS + draw(st.integers(0, TOKENS - 1))
    return geometry, could, first, start, draw(st.integers(0, 40))


@settings(max_examples=1000, deadline=None)
@example((Geometry(TOKENS, TOKENS, (FULL, window(1))), [1, 1, 1], 0, 0, 40))
@given(questions())
def test_no_other_hit_is_possible_and_nothing_is_read_in_vain(
    question: tuple[Geometry, list[int], int, int, int],
) -> None:
    geometry, _, first, start, _ = question
    ends = possible_ends(*question)
    assert {n: parts_needed(geometry, n, first, start) for n in ends} == try_all(*question)
    assert list(ends) == sorted(ends)


def test_a_look_up_waits_for_what_arrives_and_no_longer() -> None:
    index = ChunkIndex(4, 1)
    fetch = Fetch([b"0", b"1", b"2"], [1, 1, 1], None, 3)
    for key in fetch.keys:
        assert not fetch.is_ordered
        assert fetch.is_under_way
        node = index.reserve(key, fetch.parent, [0])
        assert node is not None
        fetch.takes(node)
    first, second, third = fetch.nodes
    assert fetch.is_ordered
    index.commit(first)
    index.commit(third)
    assert fetch.is_under_way
    index.discard(second)
    assert not fetch.is_under_way


def test_what_is_stopped_waits_for_what_was_ordered() -> None:
    fetch = Fetch([b"0", b"1"], [1, 1], None, 2)
    fetch.stop()
    assert fetch.is_ordered
    assert not fetch.is_under_way
