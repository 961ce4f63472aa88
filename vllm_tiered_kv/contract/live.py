# SPDX-License-Identifier: Apache-2.0
"""The members of the vLLM that is running, by inspection."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from vllm_tiered_kv.contract.structs import Form, Kind, Member, Need, Parameter, Passing, Use

_PASSING = {
    inspect.Parameter.POSITIONAL_ONLY: Passing.POSITION_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: Passing.ANY,
    inspect.Parameter.KEYWORD_ONLY: Passing.KEYWORD_ONLY,
    inspect.Parameter.VAR_POSITIONAL: Passing.VAR_POSITION,
    inspect.Parameter.VAR_KEYWORD: Passing.VAR_KEYWORD,
}
MAKERS = ("__init__", "__post_init__")
"""Methods that set attributes every instance has."""
_MISSING = object()
_STORE, _EXTENDED = dis.opmap["STORE_ATTR"], dis.opmap["EXTENDED_ARG"]


def relevant(needs: Iterable[Need]) -> list[Need]:
    """What matters in this process now: modules of the scheduler are not loaded for our sake."""
    return [
        need
        for need in needs
        if need.use in (Use.ALWAYS, Use.NEWER)
        or (need.use is Use.SCHEDULER and need.module in sys.modules)
    ]


def members(needs: Iterable[Need]) -> dict[str, Member]:
    """What is there of these needs; their modules are imported."""
    found: dict[str, Member] = {}
    for need in needs:
        member = _find(need)
        if member is not None and (need.name not in found or need.kind is Kind.BASE):
            found[need.name] = member
    return found


def _find(need: Need) -> Member | None:
    try:
        owner: object = importlib.import_module(need.module)
    except ImportError:
        return None
    *path, name = need.member.split(".")
    for part in path:
        owner = getattr(owner, part, _MISSING)
    if owner is _MISSING:
        return None
    if isinstance(owner, type):
        return _class_member(owner, name)
    value = getattr(owner, name, _MISSING)
    if value is _MISSING:
        return None
    if isinstance(value, type):
        return _describe_class(value, need.kind)
    if inspect.isfunction(value):
        return Member(Form.FUNCTION, _parameters(value))
    return Member(Form.VALUE)


def _class_member(owner: type, name: str) -> Member | None:
    value = inspect.getattr_static(owner, name, _MISSING)
    if isinstance(value, staticmethod):
        return Member(Form.FUNCTION, _parameters(value.__func__))
    if isinstance(value, classmethod):
        return Member(Form.FUNCTION, _parameters(value.__func__)[1:])
    if inspect.isfunction(value):
        return Member(Form.FUNCTION, _parameters(value)[1:])
    if value is not _MISSING or any(name in _names(cls) for cls in owner.__mro__):
        return Member(Form.VALUE)
    return None


@functools.cache
def _names(cls: type) -> frozenset[str]:
    """Annotated in the class's body, or set on ``self`` where its instances are made."""
    names = set(inspect.get_annotations(cls))
    for maker in MAKERS:
        function = cls.__dict__.get(maker)
        if isinstance(function, FunctionType):
            names.update(_stored(function.__code__))
    return frozenset(names)


def _stored(code: CodeType) -> Iterator[str]:
    """Names of attributes that a function sets; :mod:`dis` would take milliseconds."""
    extended = 0
    for operation, argument in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument |= extended
        extended = argument << 8 if operation == _EXTENDED else 0
        if operation == _STORE:
            yield code.co_names[argument]


def _describe_class(cls: type, kind: Kind) -> Member:
    if kind is not Kind.BASE:
        return Member(Form.CLASS, _parameters(cls) if kind is Kind.CALLED else ())
    methods = (
        name
        for owner in cls.__mro__
        if owner is not object
        for name, value in owner.__dict__.items()
        if not name.startswith("_")
        and (callable(value) or isinstance(value, (staticmethod, classmethod)))
    )
    abstract: Iterable[str] = getattr(cls, "__abstractmethods__", ())
    return Member(Form.CLASS, abstract=tuple(sorted(abstract)), methods=tuple(sorted(set(methods))))


def _parameters(function: object) -> tuple[Parameter, ...]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return tuple(
        Parameter(p.name, _PASSING[p.kind], p.default is not inspect.Parameter.empty)
        for p in signature.parameters.values()
    )
