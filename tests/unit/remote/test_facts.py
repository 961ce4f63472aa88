# SPDX-License-Identifier: Apache-2.0
"""What engines say of themselves, so that a refusal can name what differs."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.identity.canonical import canonical
from vllm_tiered_kv.remote.facts import MAX_FACTS, MAX_NAME, MAX_VALUE, differences, facts_of
from vllm_tiered_kv.remote.messages import MAX_ANSWER_BYTES, Reason, Refused, decode_answer, encode


class Inner(msgspec.Struct, frozen=True):
    kernel: str
    window: int | None


class Thing(msgspec.Struct, frozen=True):
    dtype: str = "float32"
    model: str = canonical({"layers": 3, "rope": {"theta": 1e4}, "names": ["a", "b"]})
    groups: tuple[Inner, ...] = (Inner("avx", None), Inner("amx", 5))


def test_fields_within_fields_and_within_json_have_names() -> None:
    assert dict(facts_of(Thing())) == {
        "dtype": "float32",
        "model.layers": "3",
        "model.rope.theta": "10000.0",
        "model.names": '["a","b"]',
        "groups.0.kernel": "avx",
        "groups.0.window": "null",
        "groups.1.kernel": "amx",
        "groups.1.window": "5",
    }


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Thing(), ""),
        (Thing(dtype="bfloat16"), "dtype (bfloat16 there, float32 here)"),
        (Thing(model="{"), "model.layers (nothing there, 3 here), "),
        (Thing(groups=()), "groups.0.kernel (nothing there, avx here), "),
    ],
)
def test_what_differs(other: Thing, said: str) -> None:
    assert differences(facts_of(other), facts_of(Thing())).startswith(said)
    if not said:
        assert differences(facts_of(other), facts_of(Thing())) == ""


def test_long_values_that_differ_at_their_ends_are_told_apart() -> None:
    first, second = (facts_of(Thing(dtype="x" * 500 + end)) for end in "ab")
    assert "dtype" in differences(first, second)


def test_few_of_many_differences_are_named() -> None:
    def of(value: int) -> Thing:
        return Thing(model=canonical({f"k{i}": value for i in range(5000)}))

    said = differences(facts_of(of(1)), facts_of(of(2)))
    assert "more" in said
    assert len(said) < 1000


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()), inner),
)


@given(_VALUES, st.text(st.characters(), max_size=2000))
def test_whatever_it_is_it_fits_into_a_message(value: object, name: str) -> None:
    try:
        model = canonical({name: value})
    except ValueError:
        model = name
    facts = facts_of(Thing(dtype=name, model=model))
    assert len(facts) <= MAX_FACTS
    assert all(len(key) <= MAX_NAME and len(text) <= MAX_VALUE for key, text in facts)
    data = encode(Refused(1, Reason.PAGES, "no", facts))
    assert len(data) < MAX_ANSWER_BYTES
    answer = decode_answer(data)
    assert isinstance(answer, Refused)
    assert answer.facts == facts
