# SPDX-License-Identifier: Apache-2.0
"""What was found: a sentence each, and how much it matters."""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec


class Level(str, enum.Enum):
    """How much it matters."""

    OK = "ok"
    WARNING = "warning"
    """The engine starts, and somebody will be sorry."""
    ERROR = "error"
    """The engine does not start, or starts without what was asked for."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was looked at."""

    level: Level
    what: str
    """An option, mostly."""
    says: str


def ok(what: str, says: str) -> Finding:
    return Finding(Level.OK, what, says)


def warning(what: str, says: str) -> Finding:
    return Finding(Level.WARNING, what, says)


def error(what: str, says: str) -> Finding:
    return Finding(Level.ERROR, what, says)


def refused(message: str) -> Finding:
    """What an engine refuses to start with; its message begins with the option."""
    what, colon, says = message.partition(": ")
    return error(what, says) if colon and " " not in what else error("options", message)


def count(findings: Iterable[Finding], level: Level) -> int:
    return sum(finding.level is level for finding in findings)
