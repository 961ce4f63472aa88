# SPDX-License-Identifier: Apache-2.0
"""One spelling for every value, so that equal things have equal digests in every process."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import os
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import NewType

import msgspec

Canonical = NewType("Canonical", str)
"""JSON text of a value: sorted, typed, the same for the same content everywhere."""

DIGEST_LENGTH = 32
"""Hexadecimal digits of a digest (128 bits of SHA-256)."""

_MAX_DEPTH = 64
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 64) - 1

_encoder = msgspec.json.Encoder(order="sorted")


class Unidentifiable(ValueError):
    """A value whose content cannot be told, such as a function or a live object."""


def canonical(value: object, *, omit: Collection[str] = ()) -> Canonical:
    """The canonical text of plain data, configuration objects included.

    Args:
        value: None, numbers, strings, bytes, paths, enums, dtypes, classes, dataclasses,
            objects with ``to_dict`` (transformers' configurations), and containers of these.
        omit: keys and attributes left out at every depth.

    Raises:
        Unidentifiable: ``value`` holds something else, or nests too deeply.
    """
    return Canonical(_encode(_plain(value, frozenset(omit), 0)).decode())


def digest(kind: str, value: msgspec.Struct) -> str:
    """A digest of a struct of plain fields: names, values and types all count. Never raises.

    Args:
        kind: keeps digests of different things apart even when their fields are equal.
    """
    hasher = hashlib.sha256(f"vllm-tiered-kv {kind}\n".encode())
    try:
        hasher.update(_encoder.encode(value))
    except (TypeError, UnicodeEncodeError):
        # A field that is not as plain as its type says: at worst a digest nobody else has.
        hasher.update(repr(value).encode(errors="backslashreplace"))
    return hasher.hexdigest()[:DIGEST_LENGTH]


def _encode(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError as error:
        raise Unidentifiable("a text is not valid Unicode") from error


def _plain(value: object, omit: frozenset[str], depth: int) -> object:
    """JSON data; what JSON has no type for becomes ``{"$type": ...}``."""
    if depth > _MAX_DEPTH:
        raise Unidentifiable("the value nests too deeply")
    scalar = _scalar(value)
    if scalar is not None or value is None:
        return scalar
    if isinstance(value, Mapping):
        return _mapping(value, omit, depth)
    if isinstance(value, (set, frozenset)):
        return {"$set": sorted((_plain(v, omit, depth + 1) for v in value), key=_encode)}
    if isinstance(value, (list, tuple)):
        return [_plain(v, omit, depth + 1) for v in value]
    if isinstance(value, type):
        return {"$class": f"{value.__module__}.{value.__qualname__}"}
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        return _tagged(value, to_dict(), omit, depth)
    if dataclasses.is_dataclass(value):
        names = (f.name for f in dataclasses.fields(value))
        return _tagged(value, {n: getattr(value, n) for n in names}, omit, depth)
    raise Unidentifiable(f"a {type(value).__name__} has no content to go by")


def _scalar(value: object) -> object:
    """The plain form of a value without parts, or None when it is none of those."""
    if isinstance(value, enum.Enum):
        return {"$enum": f"{type(value).__name__}.{value.name}"}
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if _INT_MIN <= value <= _INT_MAX else {"$int": str(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, Fraction):
        return {"$fraction": str(value)}
    if isinstance(value, os.PathLike):
        return {"$path": os.fspath(value)}
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    return None


def _mapping(value: Mapping[object, object], omit: frozenset[str], depth: int) -> object:
    items = [(k, v) for k, v in value.items() if not (isinstance(k, str) and k in omit)]
    if all(type(k) is str for k, _ in items):
        # A leading "$" is ours; doubling it keeps data that looks like a tag from being one.
        return {
            f"${k}" if str(k).startswith("$") else str(k): _plain(v, omit, depth + 1)
            for k, v in items
        }
    pairs = [[_plain(k, omit, depth + 1), _plain(v, omit, depth + 1)] for k, v in items]
    return {"$map": sorted(pairs, key=_encode)}


def _tagged(value: object, parts: object, omit: frozenset[str], depth: int) -> object:
    return {"$type": type(value).__name__, "parts": _plain(parts, omit, depth + 1)}
