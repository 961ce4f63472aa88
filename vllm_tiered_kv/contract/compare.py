# SPDX-License-Identifier: Apache-2.0
"""Whether a member of vLLM is what we need: pure functions over data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from vllm_tiered_kv.contract.needs import implemented
from vllm_tiered_kv.contract.structs import (
    Form,
    Kind,
    Member,
    Need,
    Parameter,
    Passing,
    Use,
)


class Findings(msgspec.Struct, frozen=True):
    """What a vLLM lacks."""

    problems: tuple[str, ...] = ()
    """We would fail."""
    notes: tuple[str, ...] = ()
    """We would work, and may miss something: an optional parameter that we do not take."""


def compare(needs: Iterable[Need], members: Mapping[str, Member]) -> Findings:
    """Hold every need against what was found, by ``Need.name``."""
    problems: list[str] = []
    notes: list[str] = []
    for need in needs:
        member = members.get(need.name)
        if member is None:
            if need.use is not Use.NEWER:
                problems.append(f"{need.member} is missing")
            continue
        if (problem := _problem(need, member)) is not None:
            problems.append(f"{need.member} {problem}")
        elif need.kind is Kind.OVERRIDDEN and (extra := _not_taken(need, member)):
            notes.append(f"{need.member} may be given {', '.join(extra)}, which we do not take")
    return Findings(tuple(problems), tuple(notes))


def _problem(need: Need, member: Member) -> str | None:
    if need.kind is Kind.READ:
        return None
    if need.kind is Kind.BASE:
        return _left_abstract(need, member)
    if member.form is Form.VALUE:
        return "is no longer a function"
    fits = _accepts_call if need.kind is Kind.CALLED else _calls_ours
    if fits(need.arguments, member.parameters):
        return None
    takes = ", ".join(map(str, member.parameters))
    return f"takes ({takes}), expected ({', '.join(need.arguments)})"


def _left_abstract(need: Need, member: Member) -> str | None:
    if member.form is not Form.CLASS:
        return "is no longer a class"
    missing = sorted(set(member.abstract) - implemented(need.name))
    return f"asks for {', '.join(missing)}, which we do not implement" if missing else None


def _accepts_call(arguments: Sequence[str], parameters: Sequence[Parameter]) -> bool:
    """Whether a function takes a call with these arguments.

    An argument that is given by position must meet the parameter of its name: one that was renamed
    or moved means something else now.
    """
    positional = [p for p in parameters if p.passing in (Passing.POSITION_ONLY, Passing.ANY)]
    passings = {p.passing for p in parameters}
    given: set[str] = set()
    for i, argument in enumerate(arguments):
        name = argument.removesuffix("=")
        if argument == name:  # by position
            if i < len(positional) and positional[i].name == name:
                given.add(name)
            elif i < len(positional) or Passing.VAR_POSITION not in passings:
                return False
            continue
        known = any(
            p.name == name and p.passing in (Passing.ANY, Passing.KEYWORD_ONLY) for p in parameters
        )
        if not known and Passing.VAR_KEYWORD not in passings:
            return False
        given.add(name)
    return all(p.name in given for p in parameters if _is_required(p))


def _calls_ours(arguments: Sequence[str], parameters: Sequence[Parameter]) -> bool:
    """Whether our method can be called wherever vLLM's, with these parameters, can be."""
    ours = [a.removesuffix("=") for a in arguments if not a.startswith("*")]
    optional = {a.removesuffix("=") for a in arguments if a.endswith("=")}
    any_keyword = any(a.startswith("**") for a in arguments)
    ordered = [p for p in parameters if p.passing in (Passing.POSITION_ONLY, Passing.ANY)]
    for i, parameter in enumerate(ordered):
        if i < len(ours) and ours[i] == parameter.name:
            if parameter.has_default and parameter.name not in optional:
                return False
        elif _is_required(parameter) or i < len(ours):
            return False
    for parameter in parameters:
        if parameter.passing is not Passing.KEYWORD_ONLY:
            continue
        if parameter.name not in ours and not any_keyword and _is_required(parameter):
            return False
    passed = {p.name for p in parameters}
    if any(p.passing is Passing.VAR_KEYWORD for p in parameters) and not any_keyword:
        return False
    return all(name in passed or name in optional for name in ours)


def _not_taken(need: Need, member: Member) -> list[str]:
    if any(a.startswith("**") for a in need.arguments):
        return []
    ours = {a.removesuffix("=") for a in need.arguments}
    return [p.name for p in member.parameters if p.has_default and p.name not in ours]


def _is_required(parameter: Parameter) -> bool:
    variable = parameter.passing in (Passing.VAR_POSITION, Passing.VAR_KEYWORD)
    return not variable and not parameter.has_default
