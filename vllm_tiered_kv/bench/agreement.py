# SPDX-License-Identifier: Apache-2.0
"""Whether arms gave the same output to the same prompt."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from vllm_tiered_kv.bench.records import Answer, Record, printable

SHOWN = 5
_AROUND = 30


class Difference(msgspec.Struct, frozen=True):
    """One request whose outputs differ."""

    session: int
    step: int
    place: int
    """Of the first difference: a token, or a character where there are no token ids."""
    expected: str
    """What stands there in the first arm; "" where it had ended."""
    actual: str
    logprobs: tuple[float, float] | None = None
    """Of both at that place. Close ones are a near-tie, which rounding decides."""


class Agreement(msgspec.Struct, frozen=True):
    """One arm against the first."""

    arm: str
    compared: int
    same: int
    by_tokens: int
    """Of those compared: by token ids, the others by text."""
    not_compared: int
    """Requests without an answer in one of both."""
    other_prompts: int
    """Not compared either: after different own answers the prompts differ."""
    worst_logprob: float | None
    """The largest difference of a log-probability before the first other token; None: not known."""
    differences: tuple[Difference, ...]
    """The first few."""


def agreement(expected: Iterable[Record], actual: Iterable[Record]) -> Agreement:
    """Compare two arms' records of the same requests."""
    known = {(record.session, record.step): record for record in expected}
    records = tuple(actual)
    compared = same = by_tokens = not_compared = other_prompts = 0
    worst: float | None = None
    differences: list[Difference] = []
    for record in records:
        before = known.get((record.session, record.step))
        if before is None or before.answer is None or record.answer is None:
            not_compared += 1
            continue
        if before.prompt != record.prompt:
            other_prompts += 1
            continue
        compared += 1
        first, second = before.answer, record.answer
        with_tokens = bool(first.tokens and second.tokens)
        by_tokens += with_tokens
        gap = _worst_logprob(first, second) if with_tokens else None
        worst = gap if worst is None else max(worst, gap or 0.0)
        differ = _by_tokens if with_tokens else _by_text
        found = differ(record, first, second)
        if found is None:
            same += 1
        elif len(differences) < SHOWN:
            differences.append(found)
    return Agreement(
        arm=records[0].arm if records else "",
        compared=compared,
        same=same,
        by_tokens=by_tokens,
        not_compared=not_compared,
        other_prompts=other_prompts,
        worst_logprob=worst,
        differences=tuple(differences),
    )


def _by_tokens(record: Record, first: Answer, second: Answer) -> Difference | None:
    place = _first_difference(first.tokens, second.tokens)
    if place is None:
        return None
    logprobs = None
    if place < min(len(first.logprobs), len(second.logprobs)):
        logprobs = (first.logprobs[place], second.logprobs[place])
    return Difference(
        session=record.session,
        step=record.step,
        place=place,
        expected=str(first.tokens[place]) if place < len(first.tokens) else "",
        actual=str(second.tokens[place]) if place < len(second.tokens) else "",
        logprobs=logprobs,
    )


def _by_text(record: Record, first: Answer, second: Answer) -> Difference | None:
    place = _first_difference(first.text, second.text)
    if place is None:
        return None
    end = place + _AROUND
    return Difference(
        session=record.session,
        step=record.step,
        place=place,
        expected=printable(first.text[place:end]),
        actual=printable(second.text[place:end]),
    )


def _first_difference(first: tuple[int, ...] | str, second: tuple[int, ...] | str) -> int | None:
    if first == second:
        return None
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((place for place, (a, b) in pairs if a != b), shorter)


def _worst_logprob(first: Answer, second: Answer) -> float | None:
    place = _first_difference(first.tokens, second.tokens)
    pairs = zip(first.logprobs[:place], second.logprobs[:place], strict=False)
    return max((abs(a - b) for a, b in pairs), default=None)
