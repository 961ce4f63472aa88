# SPDX-License-Identifier: Apache-2.0
"""The commands and what they have in common."""

from __future__ import annotations

import sys

import typer

from vllm_tiered_kv import __version__
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.cli.bench import bench
from vllm_tiered_kv.cli.check import check
from vllm_tiered_kv.cli.keygen import keygen
from vllm_tiered_kv.cli.plan import plan
from vllm_tiered_kv.cli.size import size
from vllm_tiered_kv.sizing.errors import SizingError

app = typer.Typer(
    name="vllm-tiered-kv",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
app.command()(size)
app.command()(plan)
app.command()(check)
app.add_typer(bench, name="bench")
app.command()(keygen)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-tiered-kv {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Print it and exit."
    ),
) -> None:
    """Size, plan, check, measure and look after tiers of KV cache for vLLM."""


def main() -> None:
    """The console script: a question that cannot be answered ends with one line and status 1."""
    try:
        app()
    except (SizingError, BenchError) as error:
        typer.echo(f"vllm-tiered-kv: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
