# SPDX-License-Identifier: Apache-2.0
"""The report in Markdown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from vllm_tiered_kv.bench.report import Report
from vllm_tiered_kv.bench.tables import Table, conditions, remarks, tables


def render(report: Report, pictures: Sequence[str] = ()) -> str:
    """All of it; ``pictures`` are paths, seen from where the text will be."""
    parts = [f"# {_text(report.name)}", f"```console\n$ {shlex.join(report.command)}\n```"]
    for table in tables(report):
        parts += [f"## {_text(table.title)}", markdown_table(table)]
    parts += [f"![]({path})" for path in pictures]
    parts += [_text(remark) for remark in remarks(report)]
    parts.append(_text(conditions(report)))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    marks = [":---"] + ["---:"] * (len(table.header) - 1)
    lines = [map(_text, table.header), marks, *(map(_text, row) for row in table.rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _text(text: str) -> str:
    """On one line, with no mark-up in it."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))
