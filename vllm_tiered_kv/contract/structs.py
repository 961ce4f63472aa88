# SPDX-License-Identifier: Apache-2.0
"""What we need of a member of vLLM, and what a member of vLLM is."""

from __future__ import annotations

import enum

import msgspec


class Kind(enum.Enum):
    """What we do with a member."""

    BASE = "subclassed"  # a class of ours derives from it: nothing may stay abstract
    OVERRIDDEN = "overridden"  # a method of such a class: vLLM calls ours
    CALLED = "called"
    READ = "read"


class Use(enum.Enum):
    """Where a member is needed, and so what its lack means."""

    ALWAYS = "always"  # the connector cannot work without it
    SCHEDULER = "scheduler half"  # as ALWAYS, in the process that has the scheduler
    NEWER = "where present"  # vLLM has it from some version on; where it is, it must fit
    ADAPTERS = "adapters"  # without it requests with LoRA are only computed; looked at in releases
    NAMESPACE = "namespace"  # without it there is none; looked at in releases, not at start


class Need(msgspec.Struct, frozen=True):
    """One member that we need."""

    name: str
    """``package.module:Class.member`` or ``package.module:member``."""
    kind: Kind
    arguments: tuple[str, ...] = ()
    """Overridden: what our method takes. Called: what we pass. Without ``self``; in order;
    ``name=`` is optional or passed by keyword, ``**name`` takes any keyword."""
    use: Use = Use.ALWAYS

    @property
    def module(self) -> str:
        return self.name.partition(":")[0]

    @property
    def member(self) -> str:
        return self.name.partition(":")[2]

    @property
    def owner(self) -> str:
        """The class that has it, as ``package.module:Class``; empty for a module's own."""
        owner, dot, _ = self.name.rpartition(".")
        return owner if dot and ":" in owner else ""


class Passing(enum.Enum):
    """How a parameter may be given."""

    POSITION_ONLY = "position"
    ANY = "any"
    KEYWORD_ONLY = "keyword"
    VAR_POSITION = "*"
    VAR_KEYWORD = "**"


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One parameter of a function in vLLM."""

    name: str
    passing: Passing = Passing.ANY
    has_default: bool = False

    def __str__(self) -> str:
        if self.passing in (Passing.VAR_POSITION, Passing.VAR_KEYWORD):
            return f"{self.passing.value}{self.name}"
        return f"{self.name}=" if self.has_default else self.name


class Form(enum.Enum):
    """What a member of vLLM is."""

    FUNCTION = "function"
    CLASS = "class"
    VALUE = "value"  # an attribute, a property, a field, a module's variable


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """One member of vLLM as found."""

    form: Form
    parameters: tuple[Parameter, ...] = ()
    """Of a function, without ``self``."""
    abstract: tuple[str, ...] = ()
    """Of a class: names that a subclass must define, sorted."""
    methods: tuple[str, ...] = ()
    """Of a class that we subclass: its public methods, inherited ones too, sorted."""


class Record(msgspec.Struct, frozen=True):
    """What one version of vLLM has of what we need."""

    version: str
    members: dict[str, Member]
    """By ``Need.name``; what is not there is missing."""
