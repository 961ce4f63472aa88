# SPDX-License-Identifier: Apache-2.0
"""What benchmarks that start servers share of their command lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.ab_ttft import conditions, markdown
from benchmarks.ab_ttft.arms import Arm, missing


def say(text: str) -> None:
    """Progress, apart from what is printed as a result."""
    print(text, file=sys.stderr, flush=True)


def lengths(text: str) -> tuple[int, ...]:
    """``512,4000``: prompt lengths, shortest first."""
    return tuple(sorted(int(number) for number in text.split(",")))


def arms_of(text: str) -> list[Arm]:
    """``none,ours``: what is compared."""
    return [Arm(name) for name in text.split(",")]


def present(arms: Iterable[Arm]) -> list[Arm]:
    """Those that can run here; why others cannot is said."""
    reasons = {arm: missing(arm) for arm in arms}
    for arm, reason in reasons.items():
        if reason is not None:
            say(f"skipping {arm.label}: {reason}")
    return [arm for arm, reason in reasons.items() if reason is None]


def update_docs(table: Path, document: Path, name: str) -> int:
    """Put the table of the last full run into a document; the status to exit with."""
    try:
        content = table.read_text(encoding="utf-8")
        if conditions.PARTIAL_MARK in content:
            raise ValueError(f"{table} is not of a full run of all arms")
        markdown.update(document, name, content)
    except (OSError, ValueError) as error:
        say(f"{document} not updated: {error}")
        return 1
    return 0
