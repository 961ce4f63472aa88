# SPDX-License-Identifier: Apache-2.0
"""A streamed completion of the OpenAI API, put together from its events."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from vllm_tiered_kv.bench.records import Answer, Counted
from vllm_tiered_kv.mistakes import explain_json

_Number = Annotated[int, Meta(ge=0, le=1 << 40)]
MAX_PARTS = 1 << 20


class StreamError(RuntimeError):
    """The server reported an error in the stream."""


class Malformed(RuntimeError):
    """An event is not what the API promises."""


class EndedEarly(RuntimeError):
    """The stream ended before the completion did."""


class _Logprobs(msgspec.Struct):
    tokens: tuple[str, ...] | None = None
    token_logprobs: tuple[float | None, ...] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Details(msgspec.Struct):
    cached_tokens: _Number | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: _Number | None = None
    completion_tokens: _Number | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class Completion:
    """Takes the events of one stream, each with the moment of its arrival."""

    def __init__(self, sent: float) -> None:
        self._sent = sent
        self._arrivals: list[float] = []
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._usage = _Usage()
        self._finished = False

    def take(self, data: bytes, now: float) -> None:
        """One event.

        Raises:
            StreamError: it is an error.
            Malformed: it is nothing known.
        """
        if data == b"[DONE]":
            return
        try:
            event = _DECODER.decode(data)
        except msgspec.ValidationError as error:
            raise Malformed(explain_json(error, data, _Event, "an event")) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Malformed(f"an event is not JSON: {error}: {_shorten(data)}") from None
        if event.error is not None:
            raise StreamError(_shorten(data))
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._take_choice(choice, now)

    def answer(self) -> Answer:
        """All of it.

        Raises:
            EndedEarly: no token came, or no word that it is finished.
        """
        if not self._arrivals or not self._finished:
            raise EndedEarly(f"after {len(self._arrivals)} parts")
        usage, arrivals = self._usage, self._arrivals
        told = usage.completion_tokens
        details = usage.prompt_tokens_details
        return Answer(
            ttft=arrivals[0] - self._sent,
            gaps=tuple(b - a for a, b in pairwise(arrivals)),
            seconds=arrivals[-1] - self._sent,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
            output_tokens=told or len(arrivals),
            counted=Counted.USAGE if told else Counted.CHUNKS,
            text="".join(self._text),
            tokens=tuple(self._tokens),
            logprobs=tuple(self._logprobs),
        )

    def _take_choice(self, choice: _Choice, now: float) -> None:
        found = choice.logprobs or _Logprobs()
        named = found.tokens or ()
        # A bare end brings nothing; a token may have no text, as half of a character has.
        if choice.text or named or choice.finish_reason is None:
            if len(self._arrivals) >= MAX_PARTS:
                raise Malformed(f"more than {MAX_PARTS} parts")
            self._arrivals.append(now)
        self._text.append(choice.text or "")
        numbers = [name.removeprefix("token_id:") for name in named]
        if all(number.isdecimal() for number in numbers):
            self._tokens += map(int, numbers)
            self._logprobs += [value or 0.0 for value in found.token_logprobs or ()]
        self._finished |= choice.finish_reason is not None


def _shorten(data: bytes) -> str:
    return data[:500].decode(errors="replace")
