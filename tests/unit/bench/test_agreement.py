# SPDX-License-Identifier: Apache-2.0
"""Whether outputs agree, and what is said where they do not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from tests.unit.bench._records import answer, record
from vllm_tiered_kv.bench.agreement import SHOWN, Agreement, Difference, agreement
from vllm_tiered_kv.bench.records import Answer


def compare(first: Sequence[Answer | None], second: Sequence[Answer | None]) -> Agreement:
    return agreement(
        [record(each, session=n) for n, each in enumerate(first)],
        [record(each, arm="b", session=n) for n, each in enumerate(second)],
    )


def test_equal_outputs() -> None:
    found = compare([answer(), answer()], [answer(), answer(logprobs=(-1.0, -1.25, -1.0))])
    assert (found.arm, found.compared, found.same, found.by_tokens) == ("b", 2, 2, 2)
    assert found.worst_logprob == 0.25
    assert found.differences == ()


def test_the_first_other_token_is_named() -> None:
    other = answer(tokens=(1, 9, 3), logprobs=(-1.5, -2.0, -30.0))
    found = compare([answer()], [other])
    assert (found.compared, found.same) == (1, 0)
    assert found.worst_logprob == 0.5  # behind another token nothing is comparable
    assert found.differences == (Difference(0, 0, 1, "2", "9", (-1.0, -2.0)),)


def test_one_that_ends_sooner_differs_at_its_end() -> None:
    (found,) = compare([answer()], [answer(tokens=(1, 2), logprobs=(-1, -1))]).differences
    assert found == Difference(0, 0, 2, "3", "")


def test_text_stands_in_where_token_ids_are_missing() -> None:
    bare = answer(tokens=(), logprobs=())
    found = compare(
        [answer(), answer()],
        [bare, msgspec.structs.replace(bare, text="abX\x1b[2J")],
    )
    assert (found.compared, found.same, found.by_tokens) == (2, 1, 0)
    assert found.worst_logprob is None
    assert found.differences == (Difference(1, 0, 2, "c", "X [2J"),)


def test_what_cannot_be_compared_is_counted() -> None:
    found = compare([answer(), None, answer()], [None, answer(), answer()])
    assert (found.compared, found.same, found.not_compared) == (1, 1, 2)
    first = [record(answer(), prompt="p")]
    second = [record(answer(), prompt="q"), record(answer(), session=7)]
    found = agreement(first, second)
    assert (found.compared, found.other_prompts, found.not_compared) == (0, 1, 1)
    assert agreement(first, []).compared == 0


@pytest.mark.parametrize("count", [SHOWN - 1, SHOWN + 3])
def test_only_the_first_differences_are_kept(count: int) -> None:
    found = compare([answer()] * count, [answer(tokens=(4, 5, 6))] * count)
    assert found.same == 0
    assert len(found.differences) == min(count, SHOWN)
