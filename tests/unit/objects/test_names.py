# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.tiers.disk.names import valid_key, valid_namespace
from vllm_tiered_kv.tiers.objects.names import (
    MAX_RANK,
    Family,
    family_of,
    namespace_of,
    object_key,
    salt_digest,
    split_key,
)

hashes = st.binary(min_size=1, max_size=72)
ranks = st.integers(0, MAX_RANK)


@given(hashes, ranks, st.text())
def test_a_key_is_put_together_and_taken_apart(chunk_hash: bytes, rank: int, salt: str) -> None:
    key = object_key(chunk_hash, rank, salt)
    assert key is not None
    assert valid_key(key)
    parts = split_key(key)
    assert parts is not None
    assert (parts.chunk_hash, parts.rank, parts.salt) == (chunk_hash, rank, salt_digest(salt))


@given(st.tuples(hashes, ranks, st.text()), st.tuples(hashes, ranks, st.text()))
def test_other_keys_are_other_names(
    one: tuple[bytes, int, str], other: tuple[bytes, int, str]
) -> None:
    assert (object_key(*one) == object_key(*other)) is (one == other)


@pytest.mark.parametrize(
    ("chunk_hash", "rank"), [(b"", 0), (bytes(73), 0), (b"x", -1), (b"x", MAX_RANK + 1)]
)
def test_there_is_no_such_key(chunk_hash: bytes, rank: int) -> None:
    assert object_key(chunk_hash, rank, "") is None


def test_what_is_too_short_is_no_key() -> None:
    assert split_key(bytes(24)) is None


def test_no_salt_is_told() -> None:
    key = object_key(b"hash", 1, "tenant-secret")
    assert key is not None
    assert b"tenant" not in key


def test_everything_in_a_familys_identity_counts() -> None:
    families = [
        Family("host", "a"),
        Family("host", "b"),
        Family("host", "a", "2"),
        Family("host", "", "a"),
        Family("other", "a"),
    ]
    names = [
        namespace_of(family.prefix, layout)
        for family, layout in itertools.product(families, ["float32[2]", "bfloat16[2]", ""])
    ]
    assert len(set(names)) == len(names)
    assert all(valid_namespace(name) for name in names)
    assert family_of(names[0]) == families[0].prefix


def test_text_that_is_no_unicode_has_a_name() -> None:
    assert valid_namespace(namespace_of(Family("host", "\ud800").prefix, "x"))
    assert object_key(b"x", 0, "\ud800") is not None
