# SPDX-License-Identifier: Apache-2.0
"""What is wrong with data that a struct does not take, in words for the person who wrote it.

A mistake names the key, the value and what would be valid; for a key that does not exist, the
nearest one that does. Values and keys from outside are cut: the words may go into a log.
"""

from __future__ import annotations

import difflib
import enum
import re
import reprlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import msgspec

REFUSED = (msgspec.ValidationError, UnicodeEncodeError)
"""What ``msgspec.convert`` raises of data from outside: half of a character is no text to it."""
_WHERE = " - at `$"
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|(\[\.\.\.\])")
_EXPECTED = re.compile(r"Expected `([\w |]+)`(.*)", re.DOTALL)
_BOUND = re.compile(r"(?: of length)? (>=|<=|>|<) (\S+)")
_BOUNDS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "text",
}
_MAX_NAME = 60
"""Characters of a key that are shown; of a longer one no nearest is looked for."""


def _shortener() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 1000
    short.maxdict = short.maxlist = short.maxtuple = 20
    return short


_SHORT = _shortener()


def shown(value: object) -> str:
    """``repr`` of what was given, cut where it is long."""
    return _SHORT.repr(value)


def explain(
    error: msgspec.ValidationError | UnicodeEncodeError,
    raw: Any,
    kind: Any,
    root: str = "this",
    *,
    within: str = "",
) -> str:
    """One sentence without an end.

    Args:
        error: what converting ``raw`` to ``kind`` has raised, one of :data:`REFUSED`.
        raw: what was given.
        kind: the type.
        root: what the whole of ``raw`` is called.
        within: the key that it stands below; then there is no need of ``root``.
    """
    if isinstance(error, UnicodeEncodeError):
        return f"{within or root}: {shown(raw)} is not valid: there is half of a character in it"
    text = str(error)
    reason, found, where = text.rpartition(_WHERE)
    if not found:
        reason, where = text, ""
    path, value, expected = _follow(raw, kind, where.removesuffix("`"), within)
    if "unknown field" in reason and (unknown := _unknown(path, value, expected)):
        return unknown
    if missing := re.search(r"missing required field `(\w+)`", reason):
        return f"{_below(path, missing[1])}: required, but not given"
    wanted = _choices(expected) or _tags(raw, kind, where)
    said = f"expected one of {', '.join(wanted)}" if wanted else _say(reason, value, expected)
    return f"{path or root}: {shown(value)} is not valid: {said}"


def explain_json(error: msgspec.ValidationError, data: bytes, kind: Any, root: str) -> str:
    """As :func:`explain`, for what was decoded from JSON."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as broken:
        return f"{root} is not JSON: {broken}"  # behind the first mistake
    return explain(error, raw, kind, root)


def unknown_key(path: str, key: str, value: object, known: Sequence[str]) -> str:
    """What is said of a key below ``path`` where there are only ``known`` ones."""
    text = f"{_below(path, named(key))}: unknown key (value {shown(value)})"
    near = difflib.get_close_matches(key, known, n=1) if len(key) <= _MAX_NAME else []
    if near:
        return f"{text}; the nearest valid key is {_below(path, near[0])!r}"
    if not known:
        return text
    return f"{text}; the valid keys are " + ", ".join(repr(_below(path, one)) for one in known)


def named(key: str) -> str:
    """A key that was given: as it is, or quoted and cut."""
    if len(key) <= _MAX_NAME and key.isprintable():
        return key
    return repr(key[:_MAX_NAME])


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _say(reason: str, value: object, kind: Any) -> str:
    """msgspec's reason in our words."""
    for each in _alternatives(kind):
        for meta in getattr(each, "__metadata__", ()):
            if getattr(meta, "description", None) and _is_about_values(reason):
                return f"expected {meta.description}"
    match = _EXPECTED.fullmatch(reason)
    if match is None:
        return reason[:1].lower() + reason[1:].replace("`", "")
    names = [name for name in match[1].split(" | ") if name != "null"]
    words = " or ".join(_WORDS.get(name, name) for name in names)
    if bound := _BOUND.fullmatch(match[2]):
        limit = f"{_BOUNDS[bound[1]]} {bound[2].removesuffix('.0')}"
        if bound[1] in (">=", "<="):
            limit = f"of {limit}"
        return f"expected {words} {limit}{' characters' if names == ['str'] else ''}"
    if match[2].startswith(", got"):
        return f"expected {words}{_quotes(names, value)}"
    return f"expected {words}{match[2]}"


def _is_about_values(reason: str) -> bool:
    """Not about a type."""
    return ", got `" not in reason


def _quotes(names: Sequence[str], value: object) -> str:
    """What was probably done with quotation marks."""
    if names == ["str"]:
        return " in quotes" if isinstance(value, (int, float)) else ""
    if not isinstance(value, str) or not {"bool", "float", "int"} & {*names}:
        return ""
    return ", without quotes and unit" if names == ["float"] else ", without quotes"


# -- along the types -------------------------------------------------------------------


def _follow(raw: Any, kind: Any, where: str, path: str = "") -> tuple[str, Any, Any]:
    """The path as it is shown, the value there, and the type that is expected."""
    for name, index, _ in _STEP.findall(where):
        if name:
            path, kind = _below(path, name), _field(kind, name, raw)
            raw = raw.get(name) if isinstance(raw, Mapping) else None
        elif index:
            path, kind = f"{path}[{index}]", _inside(kind)
            number = int(index)
            raw = raw[number] if isinstance(raw, (list, tuple)) and number < len(raw) else None
        else:
            kind = _inside(kind)
            key, raw = _misfit(raw, kind)
            path = _below(path, named(key))
    return path, raw, kind


def _misfit(raw: Any, kind: Any) -> tuple[str, Any]:
    """The first entry of a table whose value is not of that type."""
    for key, value in raw.items() if isinstance(raw, Mapping) else ():
        try:
            msgspec.convert(value, kind)
        except REFUSED:
            return str(key), value
    return "...", None


def _members(kind: Any) -> Iterator[Any]:
    """Those of a union, with their annotations."""
    if get_origin(kind) in (Union, types.UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _alternatives(kind: Any) -> list[Any]:
    """The members of a union, annotated ones as they are and bare."""
    found = []
    for member in _members(kind):
        found.append(member)
        if hasattr(member, "__metadata__"):
            found += _alternatives(get_args(member)[0])
    return found


def _inside(kind: Any) -> Any:
    """What a container of that type holds."""
    for each in _alternatives(kind):
        if get_origin(each) in (tuple, list):
            return get_args(each)[0]
        if get_origin(each) in (dict, Mapping):
            return get_args(each)[1]
    return None


def _field(kind: Any, name: str, raw: Any) -> Any:
    chosen = _chosen(kind, raw)
    if chosen is None:
        return None
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(chosen)}
    return fields.get(name)


def _chosen(kind: Any, raw: Any) -> type[msgspec.Struct] | None:
    """Of several structs the one whose tag is given."""
    structs = structs_of(kind)
    if len(structs) < 2:
        return structs[0] if structs else None
    tag = raw.get("kind") if isinstance(raw, Mapping) else None
    return next((each for each in structs if each.__struct_config__.tag == tag), None)


def structs_of(kind: Any) -> list[type[msgspec.Struct]]:
    """The structs that a type is, or is a union of."""
    return [each for each in _alternatives(kind) if _is_a(each, msgspec.Struct)]


def _is_a(kind: Any, base: type) -> bool:
    # Before Python 3.11 list[int] passes for a class, too.
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, base)


def _unknown(path: str, value: Any, kind: Any) -> str | None:
    """What is said of the first key that a struct lacks."""
    chosen = _chosen(kind, value)
    if chosen is None or not isinstance(value, Mapping):
        return None
    known = [field.encode_name for field in msgspec.structs.fields(chosen)]
    for key, inside in value.items():
        if key not in known and key != chosen.__struct_config__.tag_field:
            return unknown_key(path, str(key), inside, known)
    return None


def _choices(kind: Any) -> tuple[str, ...]:
    for each in _alternatives(kind):
        if _is_a(each, enum.Enum):
            return tuple(str(member.value) for member in each)
    return ()


def _tags(raw: Any, kind: Any, where: str) -> tuple[str, ...]:
    """Where a tag was wrong: those that exist."""
    above, dot, last = where.removesuffix("`").rpartition(".")
    if not dot or last != "kind":
        return ()
    _, _, union = _follow(raw, kind, above)
    return tuple(str(each.__struct_config__.tag) for each in structs_of(union))
