# SPDX-License-Identifier: Apache-2.0
"""LMCache's keys and layouts as names of files; its own classes are tested in `tests/lmcache`."""

from __future__ import annotations

import msgspec
import pytest

from vllm_tiered_kv.integrations.lmcache_objects import RAW, Listed, Names, layout_text
from vllm_tiered_kv.tiers.objects.names import ObjectId

KEY = Listed(b"0123456789abcdef", "org/model", 0x01000100, 2, "")


def named(names: Names, key: Listed) -> ObjectId:
    found = names.object_id(key)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_hash": b"another"},
        {"model_name": "org/other"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 3},
        {"cache_salt": "tenant"},
    ],
)
def test_all_of_the_key_counts(changes: dict[str, object]) -> None:
    names = Names("")
    other = msgspec.structs.replace(KEY, **changes)
    assert named(names, KEY) != named(names, other)
    assert named(names, KEY) == named(Names(""), KEY)


def test_so_does_the_revision() -> None:
    assert named(Names("1"), KEY) != named(Names("2"), KEY)


@pytest.mark.parametrize("changes", [{"object_group_id": 64}, {"chunk_hash": b""}, {"kv_rank": -1}])
def test_a_key_that_cannot_be_kept(changes: dict[str, object]) -> None:
    assert Names("").object_id(msgspec.structs.replace(KEY, **changes)) is None


def test_a_listed_key_is_the_one_that_was_named() -> None:
    names = Names("")
    for key in (KEY, msgspec.structs.replace(KEY, cache_salt="tenant")):
        name = named(names, key)
        namespace = names.namespace(name.family, "float16[2,4]")
        assert names.model_of(namespace, None) == key.model_name
        assert names.listed(name.file(namespace), key.model_name) == key


def test_after_a_restart_the_identity_file_tells_the_model_and_nothing_the_salt() -> None:
    names, again = Names("r1"), Names("r1")
    salted = msgspec.structs.replace(KEY, cache_salt="tenant")
    namespace = names.namespace(named(names, KEY).family, "float16[2,4]")
    said = msgspec.json.encode(names.identity(KEY.model_name, "float16[2,4]"))
    assert again.model_of(namespace, None) is None
    assert again.model_of(namespace, said) == KEY.model_name
    assert again.listed(named(names, salted).file(namespace), KEY.model_name) is None


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"{",
        b'{"kind":"lmcache","layout":"float16[2,4]","model":"org/other"}',
        b'{"kind":"lmcache","layout":"raw","model":"org/model"}',
        b'{"kind":"lmcache","layout":"float16[2,4]","model":"org/model","more":1}',
        b'{"kind":1,"layout":[],"model":null}',
    ],
)
def test_an_identity_file_that_does_not_fit_is_not_believed(said: bytes) -> None:
    names = Names("")
    namespace = names.namespace(named(names, KEY).family, "float16[2,4]")
    assert Names("").model_of(namespace, said) is None


def test_layouts_in_words() -> None:
    assert layout_text([(2, 8, 256, 64)], ["torch.bfloat16"]) == "bfloat16[2,8,256,64]"
    assert layout_text([(2, 4), (3,)], ["torch.half", "torch.uint8"]) == "half[2,4];uint8[3]"
    assert layout_text([(4096,)], ["torch.uint8"]) == RAW
    assert layout_text([(4096,)], ["torch.int8"]) == "int8[4096]"
    assert layout_text([], []) is None
