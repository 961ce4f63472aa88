# SPDX-License-Identifier: Apache-2.0
"""Tables for people and JSON for programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120
"""Of tables where the output is not a terminal, so that nothing is cut off."""


def print_json(report: msgspec.Struct) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")


def console() -> Console:
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDTH)


def print_table(
    to: Console, title: str, header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1
) -> None:
    """The first ``words`` columns are of words, the others of figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column, name in enumerate(header):
        table.add_column(name, justify="left" if column < words else "right")
    for row in rows:
        table.add_row(*row)
    # Not the table's own title, which would be folded to its width.
    to.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
    to.print(table)


def print_notes(to: Console, notes: Iterable[str]) -> None:
    for note in notes:
        to.print(f"- {note}", soft_wrap=True, markup=False)
