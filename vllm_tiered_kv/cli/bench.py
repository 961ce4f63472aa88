# SPDX-License-Identifier: Apache-2.0
"""``vllm-tiered-kv bench ab``: the same load on several servers, in turns."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_tiered_kv.bench import decode
from vllm_tiered_kv.bench.config import Experiment, Placement
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.cli.interrupt import ended_as_interrupted
from vllm_tiered_kv.cli.output import console, print_json, print_notes, print_table

if TYPE_CHECKING:
    from vllm_tiered_kv.bench.report import Report
    from vllm_tiered_kv.bench.summary import Measured

bench = typer.Typer(no_args_is_help=True, help="Measure servers against each other.")

_NEEDED = ("aiohttp", "numpy")


@bench.callback()
def _common() -> None:
    """Measure servers against each other."""


@bench.command()
def ab(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="EXPERIMENT",
            help="A .toml or .json file; see docs/bench.md.",
            show_default=False,
        ),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="A further arm: a file, or NAME=URL of a server that runs already."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="What servers serve that are started.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="shared-prompt, chat, rag, agent, trace or cold, with its usual sizes."),
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="TTFT at most, for goodput.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="TPOT at most, for goodput.")] = None,
    slo_e2e_ms: Annotated[float | None, typer.Option(help="A whole answer at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all that is drawn.")] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Servers do not fit the machine together.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other setting: KEY=VALUE, like load.concurrency=8."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for reports and logs.")] = Path("bench-ab"),
    plots: Annotated[bool, typer.Option(help="Draw pictures (matplotlib).")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Run one workload on two or more servers in turns; compare latency, hits and outputs.

    The first arm is what the others are compared with.
    """
    raw: dict[str, Any] = decode.read_options(file) if file is not None else {}
    if workload is not None:
        raw["workload"] = {"kind": workload}
    if model is not None:
        raw["model"] = model
    if seed is not None:
        raw["seed"] = seed
    if one_at_a_time:
        raw["placement"] = Placement.ONE_AT_A_TIME.value
    slo = {"ttft_ms": slo_ttft_ms, "tpot_ms": slo_tpot_ms, "e2e_ms": slo_e2e_ms}
    bounds = [f"slo.{name}={value}" for name, value in slo.items() if value is not None]
    raw = decode.with_settings(raw, [*bounds, *(settings or ())])
    arms = [decode.decode_arm(text) for text in arm or ()]
    experiment = decode.experiment(raw, arms, str(file) if file is not None else "options")
    report, found = _run(experiment, out, plots=plots)
    unwritten = _write(report, found, out, plots=plots)
    if json:
        print_json(report)
    else:
        _print(report, out)
    if unwritten is not None:
        raise unwritten
    if report.ended_early is not None:
        raise BenchError(f"ended early: {report.ended_early}")
    if silent := [arm.name for arm in report.arms if not arm.answered]:
        raise BenchError(f"no request was answered by {', '.join(silent)}")


def _run(experiment: Experiment, out: Path, *, plots: bool) -> tuple[Report, list[Measured]]:
    needed = (*_NEEDED, "matplotlib") if plots else _NEEDED
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(
            f'bench needs {" and ".join(missing)}: pip install "vllm-tiered-kv[bench]"'
        )
    from vllm_tiered_kv.bench.compare import compare, prepare
    from vllm_tiered_kv.bench.files import make_folder
    from vllm_tiered_kv.cli.bench_watch import watching

    make_folder(out)
    prepared = prepare(experiment)
    with ended_as_interrupted(), watching(prepared.requests, experiment) as watch:
        return compare(prepared, out, watch, ("vllm-tiered-kv", *sys.argv[1:]))


def _write(report: Report, found: list[Measured], out: Path, *, plots: bool) -> BenchError | None:
    """What was measured is shown even where it cannot be kept."""
    from vllm_tiered_kv.bench.files import write_all

    try:
        write_all(report, found, out, plots=plots)
    except BenchError as error:
        return error
    return None


def _print(report: Report, out: Path) -> None:
    from rich.markup import escape

    from vllm_tiered_kv.bench.tables import conditions, remarks, tables

    to = console()
    for table in tables(report):
        rows = (map(escape, row) for row in table.rows)
        print_table(to, table.title, [escape(name) for name in table.header], map(tuple, rows))
    print_notes(to, [*remarks(report), conditions(report)])
    to.print(f"reports, plots, every request and servers' logs: {out}/", markup=False)
