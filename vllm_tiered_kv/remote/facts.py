# SPDX-License-Identifier: Apache-2.0
"""What an engine's identity is made of, in words: so that a refusal can say what differs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import Annotated

import msgspec

MAX_FACTS = 1024
"""Of one identity; what comes after these is not named."""
MAX_NAME = 120
MAX_VALUE = 64
MAX_NAMED = 4
"""Differences that a sentence names."""

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Value = Annotated[str, msgspec.Meta(max_length=MAX_VALUE)]
Facts = Annotated[tuple[tuple[Name, Value], ...], msgspec.Meta(max_length=MAX_FACTS)]
"""Names of fields and what they hold, cut to a size; what is cut ends in a digest of it."""


class IdentityFacts(msgspec.Struct, frozen=True):
    """What the two digests of an identity are of."""

    semantic: Facts = ()
    pages: Facts = ()


UNTOLD = IdentityFacts()


def facts_of(struct: msgspec.Struct) -> Facts:
    """The fields of a struct, those within fields included; JSON text is looked into."""
    found = _leaves("", msgspec.to_builtins(struct))
    return tuple(itertools.islice(found, MAX_FACTS))


def differences(theirs: Facts, ours: Facts) -> str:
    """``"dtype (float16 there, bfloat16 here)"``; empty where nothing that is known differs."""
    if not theirs or not ours:
        return ""
    there, here = dict(theirs), dict(ours)
    named = [
        f"{name} ({there.get(name, 'nothing')} there, {here.get(name, 'nothing')} here)"
        for name in dict.fromkeys([*here, *there])
        if there.get(name) != here.get(name)
    ]
    if len(named) > MAX_NAMED:
        named[MAX_NAMED:] = [f"and {len(named) - MAX_NAMED} more"]
    return ", ".join(named)


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)) and any(isinstance(each, (dict, list)) for each in value):
        for i, inner in enumerate(value):
            yield from _leaves(f"{name}.{i}", inner)
    else:
        yield _fact(name, value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _parsed(text: str) -> object:
    """What JSON text says; any other text as it is."""
    if text[:1] not in ("{", "["):
        return text
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def _fact(name: str, value: str) -> tuple[str, str]:
    return _cut(name, MAX_NAME), _cut(value, MAX_VALUE)


def _cut(text: str, limit: int) -> str:
    text = text.encode(errors="backslashreplace").decode()  # what a message can carry
    if len(text) <= limit:
        return text
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{text[: limit - len(digest) - 3]}...{digest}"
