# SPDX-License-Identifier: Apache-2.0
"""The members of a vLLM that is not installed: its source is parsed, none of it is executed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from vllm_tiered_kv.contract.live import MAKERS
from vllm_tiered_kv.contract.structs import Form, Kind, Member, Need, Parameter, Passing

ReadFile = Callable[[str], "bytes | None"]
"""The content of ``vllm/...py``, or None if there is no such file."""

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"
MAX_IMPORTS = 16
"""Imports that are followed to where a name is defined."""


class Source:
    """The modules of one vLLM.

    Args:
        read: gives a file's content by its path, with ``/``.
    """

    def __init__(self, read: ReadFile) -> None:
        self._read = read
        self.module = functools.cache(self._module)

    def members(self, needs: Iterable[Need]) -> dict[str, Member]:
        """What is there of these needs, by ``Need.name``."""
        found: dict[str, Member] = {}
        for need in needs:
            member = self._find(need)
            if member is not None and (need.name not in found or need.kind is Kind.BASE):
                found[need.name] = member
        return found

    def _find(self, need: Need) -> Member | None:
        if self.module(need.module) is None:
            return None
        *path, name = need.member.split(".")
        if path:
            cls = self.resolve(need.module, path[0])
            if isinstance(cls, _Class):
                return cls.member(name)
            return None
        value = self.resolve(need.module, name)
        if isinstance(value, _Class):
            return value.described(need.kind)
        if isinstance(value, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return Member(Form.FUNCTION, _parameters(value.args))
        return Member(Form.VALUE) if value is not None else None

    def resolve(self, module: str, name: str, depth: int = 0) -> _Class | Function | str | None:
        """What ``name`` means in a module: a class, a function, or that it is a value."""
        tree = self.module(module)
        if tree is None or depth > MAX_IMPORTS:
            return None
        value: _Class | Function | str | None = None
        for node in _flat(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                value = _Class(self, module, node)
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                value = node
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        value = self._imported(module, node, alias.name, depth)
            elif name in _assigned(node):
                value = "value"
        return value

    def _imported(
        self, module: str, node: ast.ImportFrom, name: str, depth: int
    ) -> _Class | Function | str | None:
        target = node.module or ""
        if node.level:
            parts = module.split(".")
            is_package = self._read(module.replace(".", "/") + "/__init__.py") is not None
            keep = len(parts) - node.level + (1 if is_package else 0)
            target = ".".join([*parts[:keep], *([target] if target else [])])
        if not target.startswith("vllm"):
            return "value"  # somebody else's
        if self.module(f"{target}.{name}") is not None:
            return "value"  # a module
        return self.resolve(target, name, depth + 1)

    def _module(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (content := self._read(candidate)) is not None:
                return ast.parse(content, candidate)
        return None


class _Class:
    """A class in the source, with the classes it inherits from."""

    def __init__(self, source: Source, module: str, node: ast.ClassDef) -> None:
        self._source = source
        self._module = module
        self.node = node

    def member(self, name: str) -> Member | None:
        for cls in self.lineage():
            for node in _flat(cls.node.body):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                    return _method(node)
                if isinstance(node, ast.ClassDef) and node.name == name:
                    return Member(Form.CLASS)
                if name in _assigned(node):
                    return Member(Form.VALUE)
        made = any(name in cls.set_on_self() for cls in self.lineage())
        return Member(Form.VALUE) if made else None

    def described(self, kind: Kind) -> Member:
        if kind is not Kind.BASE:
            return Member(Form.CLASS, self.constructor() if kind is Kind.CALLED else ())
        methods: set[str] = set()
        abstract: set[str] = set()
        for cls in reversed(self.lineage()):
            for node in _flat(cls.node.body):
                if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    continue
                (abstract.add if _has(node, "abstractmethod") else abstract.discard)(node.name)
                if not node.name.startswith("_") and not _is_property(node):
                    methods.add(node.name)
        return Member(Form.CLASS, abstract=tuple(sorted(abstract)), methods=tuple(sorted(methods)))

    def constructor(self) -> tuple[Parameter, ...]:
        fields: dict[str, Parameter] = {}
        for cls in reversed(self.lineage()):
            for node in _flat(cls.node.body):
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    return _parameters(node.args)[1:]
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    name = node.target.id
                    fields[name] = Parameter(name, has_default=node.value is not None)
        return tuple(fields.values())

    def lineage(self) -> list[_Class]:
        """This class and its bases within vLLM, nearest first; depth first suffices here."""
        found = [self]
        for base in self.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                cls = self._source.resolve(self._module, name.id)
                if isinstance(cls, _Class):
                    found.extend(cls.lineage())
        return found

    def set_on_self(self) -> set[str]:
        return {
            node.attr
            for function in self.node.body
            if isinstance(function, ast.FunctionDef) and function.name in MAKERS
            for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those within ``if``, ``try`` and ``with`` too."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from _flat(node.body)
        if isinstance(node, (ast.If, ast.Try)):
            yield from _flat(node.orelse)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _flat(handler.body)


def _assigned(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.AnnAssign):
        targets: list[ast.expr] = [node.target]
    elif isinstance(node, ast.Assign):
        targets = node.targets
    else:
        return set()
    return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}


def _method(node: Function) -> Member:
    if _is_property(node):
        return Member(Form.VALUE)
    parameters = _parameters(node.args)
    return Member(Form.FUNCTION, parameters if _has(node, "staticmethod") else parameters[1:])


def _is_property(node: Function) -> bool:
    return any(_has(node, name) for name in ("property", "cached_property", "setter"))


def _has(node: Function, decorator: str) -> bool:
    """Whether a decorator's last name is this."""
    for found in node.decorator_list:
        name = found.func if isinstance(found, ast.Call) else found
        last = name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")
        if last == decorator:
            return True
    return False


def _parameters(args: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*args.posonlyargs, *args.args]
    first_default = len(positional) - len(args.defaults)
    found = [
        Parameter(
            arg.arg,
            Passing.POSITION_ONLY if i < len(args.posonlyargs) else Passing.ANY,
            i >= first_default,
        )
        for i, arg in enumerate(positional)
    ]
    if args.vararg is not None:
        found.append(Parameter(args.vararg.arg, Passing.VAR_POSITION))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Parameter(arg.arg, Passing.KEYWORD_ONLY, default is not None))
    if args.kwarg is not None:
        found.append(Parameter(args.kwarg.arg, Passing.VAR_KEYWORD))
    return tuple(found)
