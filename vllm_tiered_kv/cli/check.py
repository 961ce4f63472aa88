# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv check``: whether an engine's options can be used here, before one is started."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_tiered_kv.check.findings import Level
from vllm_tiered_kv.check.given import NotReadable, read_given
from vllm_tiered_kv.check.model import Served
from vllm_tiered_kv.cli import options as o
from vllm_tiered_kv.cli.output import console, print_json, print_notes, print_table
from vllm_tiered_kv.sizing.errors import SizingError

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_tiered_kv.check.report import CheckReport

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "bold red"}
_UNUSABLE = 2
"""The status where there was nothing to check."""


def check(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="What --kv-transfer-config is given, or its kv_connector_extra_config alone: "
            "JSON, a file of it, or - for standard input.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder with a config.json, the file, or a name in the local hub cache.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer.", min=1, max=1024)] = 1,
    block_size: Annotated[
        int | None,
        typer.Option(help="As vLLM's --block-size.", min=1, max=1 << 20, show_default="16"),
    ] = None,
    kv_dtype: o.KvDtype = None,
    as_json: o.Json = False,
) -> None:
    """Whether these options can be used on this machine, before an engine is started.

    Changes nothing. The status is 1 if an error was found, 2 if there was nothing to check.
    """
    from vllm_tiered_kv.check.report import check as run

    try:
        raw = read_given(config, sys.stdin.buffer)
        served = None
        if model is not None:
            found = o.describe(model, o.Flags(kv_dtype=kv_dtype))
            served = Served(found.name, found.model, tp, block_size)
        report = run(raw, served, ranks=tp)
    except (NotReadable, SizingError) as unusable:
        typer.echo(f"vllm-tiered-kv: {unusable}", err=True)
        raise typer.Exit(_UNUSABLE) from None
    if as_json:
        print_json(report)
    else:
        _print(console(), report)
    if report.level is Level.ERROR:
        raise typer.Exit(1)


def _print(to: Console, report: CheckReport) -> None:
    from rich.markup import escape

    rows = [
        (f"[{_STYLES[one.level]}]{one.level.value}[/]", escape(one.what), escape(one.says))
        for one in report.findings
    ]
    title = f"{_number(report.errors, 'error')}, {_number(report.warnings, 'warning')}"
    print_table(to, title, ("", "option", ""), rows, words=3)
    print_notes(to, [f"as user {report.user}, on this machine, now; nothing was changed"])


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
