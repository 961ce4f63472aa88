# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.disk._examples import unhurried
from vllm_tiered_kv.tiers.disk import names
from vllm_tiered_kv.tiers.disk.names import ChunkName


@unhurried
@given(key=st.binary(min_size=1, max_size=96), group=st.integers(0, names.MAX_GROUP))
def test_a_chunk_file_is_named_after_its_key_and_group(key: bytes, group: int) -> None:
    name = names.chunk_file(key, group)
    assert name is not None
    assert len(name) <= 255
    assert names.parse_chunk_file(name) == ChunkName(key, group)
    assert names.shard_folder(key) == name[:2]


@unhurried
@given(text=st.text(st.sampled_from("0123456789abcdefABF.kvtmpr-/\n٣"), max_size=20))
def test_a_name_that_parses_is_the_one_that_would_be_built(text: str) -> None:
    chunk = names.parse_chunk_file(text)
    assert chunk is None or names.chunk_file(chunk.key, chunk.group) == text
    rank = names.parse_rank_folder(text)
    assert rank is None or names.rank_folder(rank) == text


@pytest.mark.parametrize("key", [b"", bytes(97)])
def test_a_key_of_another_length_has_no_file(key: bytes) -> None:
    assert names.chunk_file(key, 0) is None
    assert names.parse_chunk_file(f"{key.hex()}.0.kv") is None


@pytest.mark.parametrize("group", [-1, names.MAX_GROUP + 1])
def test_a_group_out_of_bounds_has_no_file(group: int) -> None:
    assert names.chunk_file(b"k", group) is None
    assert names.parse_chunk_file(f"6b.{group}.kv") is None


@pytest.mark.parametrize(
    "name",
    ["6b.0.kv\n", "6B.0.kv", "6b.00.kv", "6b.+1.kv", "6b.0.kv.tmp", "6b0.0.kv", "6b.0", ".0.kv"],
)
def test_a_name_that_is_nearly_ours_is_not(name: str) -> None:
    assert names.parse_chunk_file(name) is None


@pytest.mark.parametrize("name", ["r-1", "r01", "r65536", "r", "R0", "r0\n", "0", "r1 "])
def test_other_folders_are_no_ranks(name: str) -> None:
    assert names.parse_rank_folder(name) is None


@pytest.mark.parametrize("name", ["", "a" * 129, "A", "a/b", "..", "a.b", "a_b", "a\n", "ä"])
def test_other_folders_are_no_namespaces(name: str) -> None:
    assert not names.valid_namespace(name)


TOKEN = "0123456789abcdef01234567"


@pytest.mark.parametrize(
    "name",
    [
        *(".tmp", "download.tmp", "a.tmp", f"{TOKEN}.tmp\n", f"{TOKEN.upper()}.tmp", TOKEN),
        *(f"{TOKEN}8.tmp", f"{TOKEN[1:]}.tmp", f"a/{TOKEN}.tmp", f"backup-{TOKEN}.tmp"),
    ],
)
def test_other_files_are_no_temporary_ones(name: str) -> None:
    assert not names.is_temp_file(name)
    assert names.is_temp_file(names.temp_file(TOKEN))
    assert names.is_temp_file(names.temp_file(f"{names.IDENTITY_TOKEN}{TOKEN}"))


@pytest.mark.parametrize("name", ["", "a", "abc", "AB", "g0", "ab\n"])
def test_other_folders_hold_no_chunks(name: str) -> None:
    assert not names.is_shard_folder(name)
    assert names.is_shard_folder("0f")
