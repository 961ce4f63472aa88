# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file that needs nothing else, pictures included."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping
from html import escape

import msgspec

from vllm_tiered_kv.bench.report import ArmReport, Report
from vllm_tiered_kv.bench.tables import Table, conditions, remarks, tables

# The policy makes the browser refuse whatever might slip in and ask somebody else for something.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; \
style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; \
padding: 0 1rem; color: #222; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
div.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ text-align: right; padding: .25rem .75rem; border-bottom: 1px solid #ddd; \
white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
pre {{ background: #f5f5f5; padding: .75rem; overflow-x: auto; }}
img {{ max-width: 100%; }} summary {{ cursor: pointer; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def render(report: Report, pictures: Mapping[str, bytes]) -> str:
    """The page.

    Args:
        pictures: PNG files by what they show.
    """
    parts = [f"<h1>{escape(report.name)}</h1>", _code(shlex.join(report.command))]
    parts.append(f"<p>{escape(conditions(report))}</p>")
    parts += [f"<p>{escape(remark)}</p>" for remark in remarks(report)]
    for title, content in pictures.items():
        data = base64.b64encode(content).decode()
        name = escape(title)
        parts.append(f'<h2>{name}</h2><img alt="{name}" src="data:image/png;base64,{data}">')
    parts += map(_table, tables(report))
    parts += map(_arm, report.arms)
    settings = msgspec.json.format(msgspec.json.encode(report.experiment)).decode()
    parts.append(f"<details><summary>All settings</summary>{_code(settings)}</details>")
    return _PAGE.format(title=escape(report.name), body="\n".join(parts))


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    rows = (f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{head}</tr></thead>'
        f"\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table></div>"
    )


def _arm(arm: ArmReport) -> str:
    lines = [shlex.join(words) for words in arm.commands] or [arm.url or ""]
    lines += [f"{each.count} x {each.kind}: {each.example}" for each in arm.failures]
    text = _code("\n".join(lines))
    return f"<details><summary>{escape(arm.name)}: what was started</summary>{text}</details>"


def _code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"
