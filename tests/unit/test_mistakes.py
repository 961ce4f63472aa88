# SPDX-License-Identifier: Apache-2.0
"""What is said of data that a struct does not take."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from vllm_tiered_kv.mistakes import REFUSED, explain, explain_json


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1, le=9)] = 1
    name: Annotated[str, Meta(min_length=2, max_length=3)] = "ab"


class Left(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="left"):
    way: int = 0


class Right(msgspec.Struct, forbid_unknown_fields=True, tag_field="kind", tag="right"):
    road: int = 0


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    must: int
    colour: Colour | None = None
    inner: Inner | None = None
    many: Annotated[tuple[Inner, ...], Meta(min_length=1)] = (Inner(),)
    table: dict[str, Annotated[float, Meta(gt=0)]] = {}
    either: int | list[int] | None = None
    share: Annotated[float, Meta(lt=1)] = 0.5
    word: Annotated[str, Meta(pattern="^a")] = "a"
    time: Annotated[str, Meta(pattern="^t", description="a time like t1")] = "t"
    sides: tuple[Left | Right, ...] = ()
    pair: tuple[int, int] = (0, 0)


def said(raw: Any, **options: str) -> str:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(raw, Outer)
    return explain(error.value, raw, Outer, **options)


@pytest.mark.parametrize(
    ("change", "what", "valid"),
    [
        ({"must": "1"}, "must: '1'", "a whole number, without quotes"),
        ({"must": 1.5}, "must: 1.5", "a whole number"),
        ({"share": "0.5"}, "share: '0.5'", "a number, without quotes and unit"),
        ({"share": 1}, "share: 1", "a number below 1"),
        ({"word": 1}, "word: 1", "text in quotes"),
        ({"word": None}, "word: None", "text"),
        ({"word": "b"}, "word: 'b'", "text matching regex '^a'"),
        ({"time": "b"}, "time: 'b'", "a time like t1"),
        ({"time": 3}, "time: 3", "text in quotes"),
        ({"colour": "green"}, "colour: 'green'", "one of red, blue"),
        ({"colour": 3}, "colour: 3", "one of red, blue"),
        ({"inner": 3}, "inner: 3", "an object"),
        ({"inner": {"number": 0}}, "inner.number: 0", "a whole number of at least 1"),
        ({"inner": {"name": "abcd"}}, "inner.name: 'abcd'", "text of at most 3 characters"),
        ({"many": []}, "many: []", "a list of at least 1"),
        ({"table": {"a": 1, "b": 0}}, "table.b: 0", "a number above 0"),
        ({"either": "x"}, "either: 'x'", "a whole number or a list, without quotes"),
        ({"either": [1, "x"]}, "either[1]: 'x'", "a whole number, without quotes"),
        ({"sides": [{"kind": "up"}]}, "sides[0].kind: 'up'", "one of left, right"),
        ({"pair": [1]}, "pair: [1]", "a list of length 2, got 1"),
    ],
)
def test_a_mistake_names_key_value_and_what_is_valid(
    change: dict[str, Any], what: str, valid: str
) -> None:
    assert said({"must": 1, **change}) == f"{what} is not valid: expected {valid}"


@pytest.mark.parametrize(
    ("change", "what", "valid"),
    [
        ({"inner": {"nam": 1}}, "inner.nam", "nearest valid key is 'inner.name'"),
        ({"inner": {"zz": 1}}, "inner.zz", "valid keys are 'inner.number', 'inner.name'"),
        ({"many": [{}, {"nam": 1}]}, "many[1].nam", "nearest valid key is 'many[1].name'"),
        (
            {"sides": [{"kind": "left", "wy": 1}]},
            "sides[0].wy",
            "nearest valid key is 'sides[0].way'",
        ),
    ],
)
def test_of_a_key_that_is_none_the_nearest_is_named(
    change: dict[str, Any], what: str, valid: str
) -> None:
    assert said({"must": 1, **change}) == f"{what}: unknown key (value 1); the {valid}"


def test_what_the_whole_is_called() -> None:
    assert said([]) == "this: [] is not valid: expected an object"
    assert said([], root="the file") == "the file: [] is not valid: expected an object"
    assert said([], within="a.b") == "a.b: [] is not valid: expected an object"
    assert said({}, within="a.b") == "a.b.must: required, but not given"
    assert said({"must": 1, "sides": [{}]}) == "sides[0].kind: required, but not given"


def test_behind_the_first_mistake_the_text_may_be_broken() -> None:
    data = b'{"must": "1", '
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.json.decode(data, type=Outer)
    assert explain_json(error.value, data, Outer, "the line").startswith("the line is not JSON: ")
    assert explain_json(error.value, data[:-2] + b"}", Outer, "the line").startswith("must: '1' is")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(Outer.__struct_fields__) | st.text(max_size=12), inner)
    ),
    max_leaves=8,
)
TRICKY = st.sampled_from(["a - at `$.q", "`", "$", "[0]", "[...]", "a.b", "\ud800", "\n", ""])


@given(st.dictionaries(st.sampled_from(Outer.__struct_fields__) | TRICKY, JSON | TRICKY))
def test_there_are_words_for_whatever_is_wrong(raw: dict[str, Any]) -> None:
    try:
        msgspec.convert(raw, Outer)
    except REFUSED as error:
        text = explain(error, raw, Outer)
        assert text.encode()
        assert "\n" not in text
