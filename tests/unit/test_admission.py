# SPDX-License-Identifier: Apache-2.0
"""What is let in, and how often it has been seen."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.policies.admission import Admission, Sightings


def name(number: int) -> bytes:
    return number.to_bytes(8, "little")


@given(st.lists(st.integers(0, 20), max_size=100))
def test_sightings_are_never_counted_too_low_within_the_window(keys: list[int]) -> None:
    sightings, seen = Sightings(window=32), Counter()
    for key in keys:
        seen[key] += 1
        assert sightings.see(name(key)) >= seen[key]


def test_few_keys_are_taken_for_others() -> None:
    sightings = Sightings(window=10_000)
    mistaken = sum(sightings.see(name(key)) > 1 for key in range(9_999))
    assert mistaken < 0.024 * 10_000
    rng = random.Random(0)
    sample = [rng.randrange(9_999) for _ in range(1_000)]
    assert all(sightings.see(name(key)) >= 2 for key in sample)


def test_what_was_seen_long_ago_is_forgotten_and_memory_is_fixed() -> None:
    sightings = Sightings(window=1_000)
    size = len(sightings._now) + len(sightings._before)
    sightings.see(b"old")
    for key in range(3_000):
        sightings.see(name(key))
    assert sightings.see(b"old") == 1
    assert len(sightings._now) + len(sightings._before) == size == 16 * 1_000


def test_a_count_ends_and_does_not_wrap() -> None:
    sightings = Sightings(window=4)
    assert max(sightings.see(b"often") for _ in range(1_000)) == 255


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_chunk_is_let_in_when_it_is_seen_often_enough(times: int) -> None:
    admission = Admission(store_after=times)
    answers = [admission.admits(b"chunk") for _ in range(4)]
    assert answers == [i + 1 >= times for i in range(4)]


def test_a_short_prefix_is_not_kept() -> None:
    admission = Admission(min_tokens=1024)
    assert not admission.keeps(1023)
    assert admission.keeps(1024)


@pytest.mark.parametrize("options", [{"min_tokens": -1}, {"store_after": 0}, {"store_after": 256}])
def test_options_without_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="store_after"):
        Admission(**options)
