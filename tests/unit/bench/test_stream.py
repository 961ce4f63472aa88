# SPDX-License-Identifier: Apache-2.0
"""From bytes to events, and from events to a completion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bench._server import Part, token, usage
from vllm_tiered_kv.bench import sse
from vllm_tiered_kv.bench.records import Counted
from vllm_tiered_kv.bench.sse import EventParser, EventTooLong
from vllm_tiered_kv.bench.stream import Completion, EndedEarly, Malformed, StreamError

LINE_ENDS = [b"\n", b"\r\n", b"\r"]


@given(
    st.lists(st.binary(min_size=1, max_size=20).map(lambda b: b.hex().encode()), max_size=6),
    st.sampled_from(LINE_ENDS),
    st.data(),
)
def test_events_come_out_whole_however_they_are_cut(
    events: list[bytes], end: bytes, data: st.DataObject
) -> None:
    # Two lines of data each: a line's end that is cut in two must not end the event.
    lines = [(b": ping", b"data: " + event, b"data:" + event, b"") for event in events]
    stream = b"".join(line + end for event in lines for line in event)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    parser = EventParser()
    found = []
    for begin, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += parser.feed(stream[begin:stop])
    # Behind a last lone carriage return a line feed may still come.
    found += parser.feed(b"\n") if end == b"\r" else []
    assert found == [event + b"\n" + event for event in events]


@pytest.mark.parametrize("end", LINE_ENDS)
def test_bytes_may_come_one_by_one(end: bytes) -> None:
    stream = end.join((b"data: a", b"data: b", b"", b"data: c", b"", b": x"))
    parser = EventParser()
    found = [event for byte in stream for event in parser.feed(bytes([byte]))]
    assert found == [b"a\nb", b"c"]


def test_lines_of_data_are_joined_and_other_fields_passed_over() -> None:
    parser = EventParser()
    assert parser.feed(b"event: x\nid: 3\ndata: a\ndata:b\ndata:  c\n\n\n\n") == [b"a\nb\n c"]
    assert parser.feed(b"id: 4\n\ndata\n\n") == [b""]


def test_an_event_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT", 1000)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 900 + b"\n\n")
    with pytest.raises(EventTooLong):
        parser.feed(b"data: " + b"x" * 1100)
    parser = EventParser()
    lines = (b"data: " + b"x" * 20 + b"\n" for _ in range(100))
    with pytest.raises(EventTooLong):
        list(map(parser.feed, lines))


def take(completion: Completion, part: Part | dict[str, Any] | bytes, now: float = 0.0) -> None:
    if isinstance(part, Part):
        part = part.data.removeprefix(b"data: ").strip()
    completion.take(part if isinstance(part, bytes) else json.dumps(part).encode(), now)


def test_a_completion() -> None:
    completion = Completion(10.0)
    take(completion, token(5, text="a", logprob=-0.25), 10.5)
    take(completion, token(6, text="b"), 10.6)
    take(completion, token(7, text="", end=True), 10.9)
    take(completion, usage(100, 3, cached=64), 11.5)
    take(completion, b"[DONE]", 11.6)
    answer = completion.answer()
    assert answer.ttft == pytest.approx(0.5)
    assert answer.gaps == pytest.approx((0.1, 0.3))
    assert answer.seconds == pytest.approx(0.9)
    assert answer.tpot == pytest.approx(0.2)
    assert (answer.text, answer.tokens) == ("ab", (5, 6, 7))
    assert answer.logprobs == (-0.25, -0.5, -0.5)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (100, 64, 3)
    assert answer.counted is Counted.USAGE


def test_what_a_server_does_not_say_is_counted_or_left_open() -> None:
    completion = Completion(0.0)
    take(completion, {"choices": [{"text": "some words"}]}, 1.0)
    take(completion, {"choices": [{"text": " more"}]}, 2.0)
    take(completion, {"choices": [{"text": "", "finish_reason": "stop"}]}, 9.0)
    answer = completion.answer()
    assert (answer.output_tokens, answer.counted) == (2, Counted.CHUNKS)
    assert answer.seconds == 2.0  # a bare end is no token
    assert answer.tpot == pytest.approx(1.0)
    assert answer.prompt_tokens is answer.cached_tokens is None
    assert answer.tokens == answer.logprobs == ()


def test_one_token_has_no_time_per_further_token() -> None:
    completion = Completion(0.0)
    take(completion, token(5, end=True), 1.0)
    assert completion.answer().tpot is None


def test_several_tokens_in_a_part_count_by_usage() -> None:
    completion = Completion(0.0)
    logprobs = {"tokens": ["token_id:1", "token_id:2"], "token_logprobs": [-1.0, -2.0]}
    take(completion, {"choices": [{"text": "ab", "logprobs": logprobs}]}, 1.0)
    take(completion, token(3, end=True), 3.0)
    take(completion, usage(9, 3))
    answer = completion.answer()
    assert answer.tokens == (1, 2, 3)
    assert answer.gaps == (2.0,)
    assert answer.tpot == 1.0


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"error": {"message": "out of memory"}}', StreamError),
        (b"not json", Malformed),
        (b'{"choices": 3}', Malformed),
        (b'{"choices": [{"text": 3}]}', Malformed),
        (b'{"usage": {"completion_tokens": -1}}', Malformed),
        (b"\xff", Malformed),
    ],
)
def test_what_is_no_completion(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        Completion(0.0).take(data, 1.0)


def test_a_stream_that_ends_early() -> None:
    completion = Completion(0.0)
    with pytest.raises(EndedEarly):
        completion.answer()
    take(completion, token(5), 1.0)
    take(completion, b"[DONE]", 2.0)
    with pytest.raises(EndedEarly, match="after 1 parts"):
        completion.answer()
