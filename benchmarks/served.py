# SPDX-License-Identifier: Apache-2.0
"""The tables of servers under load, each measured by one ``vllm-tiered-kv bench ab``.

    python -m benchmarks.served rag --update

runs the command of that name, prints its table, and with ``--update`` puts both into the document
that shows them. ``--last`` runs nothing and takes the report of the last time.
``--without lmcache`` leaves an arm out, for a machine that does not have it.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.ab_ttft import markdown
from tools.tinymodels import build_model
from vllm_tiered_kv.bench.markdown import markdown_table
from vllm_tiered_kv.bench.report import ArmReport, Report
from vllm_tiered_kv.bench.stats import Estimate
from vllm_tiered_kv.bench.tables import Table, conditions, figure

ARMS = Path("examples/bench/arms")
EXPERIMENT = "examples/bench/cpu-box.toml"
MODEL = Path("build/models/llama")
README = Path("README.md")
DOCUMENT = Path("docs/benchmarks.md")


class Bench(msgspec.Struct, frozen=True):
    """One table."""

    document: Path
    says: str
    """What was asked."""
    arms: tuple[str, ...]
    options: tuple[str, ...] = ()
    slo: tuple[int, int] = (500, 100)
    """Milliseconds, to the first token and for each token after it."""

    def command(self, name: str) -> list[str]:
        """As somebody would type it."""
        ttft, tpot = self.slo
        words = ["vllm-tiered-kv", "bench", "ab", EXPERIMENT, "--model", str(MODEL)]
        for arm in self.arms:
            words += ["--arm", str(ARMS / f"{arm}.toml")]
        words += ["--slo-ttft-ms", str(ttft), "--slo-tpot-ms", str(tpot)]
        return [*words, *self.options, "--out", str(folder(name))]


def settings(**values: object) -> tuple[str, ...]:
    """``--set`` options; a double underscore is a level."""
    pairs = (f"{key.replace('__', '.')}={value}" for key, value in values.items())
    return tuple(word for pair in pairs for word in ("--set", pair))


NONE, CPU, DISK, LMCACHE = "no-connector", "tiered-kv-cpu", "tiered-kv-cpu-disk", "lmcache"
BENCHES = {
    "rag": Bench(
        README,
        "Questions about two of twelve shared documents, two clients at once:",
        (NONE, CPU, DISK, LMCACHE),
        settings(sessions=60, blocks=10, warmup=12),
    ),
    "cold": Bench(
        README,
        "Prompts that share nothing, which is what a connector costs where it cannot help:",
        (NONE, CPU, DISK),
        (
            *("--workload", "cold"),
            *settings(workload__input_tokens=1500, workload__output_tokens=16),
            *settings(sessions=60, blocks=12, warmup=6),
        ),
        slo=(2500, 100),
    ),
    "chat": Bench(
        DOCUMENT,
        "Conversations of four turns, ten at a time, with four seconds to think before each turn: "
        "the device cache still holds nearly all that comes back, so it can only cost:",
        (NONE, CPU, DISK),
        (
            *("--workload", "chat"),
            *settings(workload__think=4.0, workload__input_tokens=400, workload__output_tokens=16),
            *settings(load__concurrency=10, sessions=40, blocks=8, warmup=6),
        ),
    ),
    "agent": Bench(
        DOCUMENT,
        "Loops of five calls, six at a time, each with the result of the last one; together about "
        "twice what the device cache holds:",
        (NONE, CPU, DISK),
        (
            *("--workload", "agent"),
            *settings(workload__system_tokens=1000, workload__steps=5),
            *settings(workload__result_tokens=500, workload__output_tokens=16),
            *settings(load__concurrency=6, sessions=30, blocks=10, warmup=4),
        ),
    ),
}
CONNECTOR = "connector"
"""The tier by which the bench reports what any connector has found."""


def main() -> int:
    args = _parser().parse_args()
    bench = BENCHES[args.name]
    arms = tuple(arm for arm in bench.arms if arm not in args.without)
    bench = msgspec.structs.replace(bench, arms=arms)
    if not args.last and (code := _run(bench.command(args.name))):
        return code
    content = render(bench, args.name, read(folder(args.name) / "report.json"))
    print(content)
    if args.update:
        markdown.update(bench.document, f"served_{args.name}", content)
    return 0


def folder(name: str) -> Path:
    return Path("build") / "served" / name


def read(path: Path) -> Report:
    """What a run has reported.

    Raises:
        OSError: there is no report.
        ValueError: it ended early: what it holds is no table for a document.
    """
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    if report.ended_early is not None:
        raise ValueError(f"{path}: ended early: {report.ended_early}")
    return report


def render(bench: Bench, name: str, report: Report) -> str:
    """The table, the command and the conditions, in Markdown."""
    ttft, tpot = bench.slo
    rows = [
        *_latencies(report, "ttft", 0.5, "time to first token, p50, ms"),
        *_latencies(report, "ttft", 0.9, "time to first token, p90, ms"),
        *_latencies(report, "tpot", 0.5, "time per output token, p50, ms"),
        *_rates(report, "requests/s", "requests/s"),
        *_rates(report, "goodput, requests/s", f"those within {ttft} ms and {tpot} ms a token"),
        ["prompt tokens from the connector, %", *map(_found, report.arms)],
        ["outputs equal to the first column's", "", *_equal(report)],
    ]
    header = ("", *(arm.name for arm in report.arms))
    parts = [
        bench.says,
        markdown_table(Table(name, header, tuple(map(tuple, rows)))),
        f"```console\n{_wrapped(bench.command(name))}\n```",
        conditions(report),
    ]
    return "\n\n".join(parts) + "\n"


def _latencies(report: Report, metric: str, share: float, label: str) -> list[list[str]]:
    values = []
    for arm in report.arms:
        latency = next(each for each in arm.latencies if each.metric == metric)
        values.append(next(p.estimate for p in latency.percentiles if p.share == share))
    return _with_ratios(report, values, (metric, share), label)


def _rates(report: Report, metric: str, label: str) -> list[list[str]]:
    values = [
        next(rate.estimate for rate in arm.rates if rate.metric == metric) for arm in report.arms
    ]
    return _with_ratios(report, values, (metric, None), label)


def _with_ratios(
    report: Report, values: Sequence[Estimate], figure_of: tuple[str, float | None], label: str
) -> list[list[str]]:
    """A row of values and, where there are any, one of what they are to the first arm's."""
    ratios = {
        ratio.arm: ratio.estimate
        for ratio in report.ratios
        if (ratio.metric, ratio.share) == figure_of
    }
    first, *others = report.arms
    rows = [[label, *map(_cell, values)]]
    if any(ratios[arm.name].value is not None for arm in others):
        rows.append([f"... of {first.name}", "", *(_cell(ratios[arm.name]) for arm in others)])
    return rows


def _found(arm: ArmReport) -> str:
    tokens = next((hit for hit in arm.hits if hit.tier == CONNECTOR), None)
    if tokens is None or tokens.share.value is None:
        return "-"
    return figure(100 * tokens.share.value)


def _equal(report: Report) -> list[str]:
    return [f"{each.same} of {each.compared}" for each in report.agreements]


def _cell(estimate: Estimate) -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return figure(estimate.value)
    return f"{figure(estimate.value)} ({figure(estimate.low)} to {figure(estimate.high)})"


def _wrapped(words: Sequence[str]) -> str:
    """A command over several lines, an option with its value on one."""
    pieces: list[str] = []
    for word in map(shlex.quote, words):
        if pieces and pieces[-1].startswith("--") and " " not in pieces[-1]:
            pieces[-1] += f" {word}"
        else:
            pieces.append(word)
    lines = [""]
    for piece in pieces:
        if lines[-1] and len(lines[-1]) + len(piece) > 94:
            lines.append("   ")
        lines[-1] += f" {piece}" if lines[-1] else piece
    return " \\\n".join(lines)


def _run(command: Sequence[str]) -> int:
    build_model("llama", MODEL)
    print(f"$ {shlex.join(command)}", file=sys.stderr, flush=True)
    program = [sys.executable, "-m", "vllm_tiered_kv.cli", *command[1:]]
    with subprocess.Popen(program) as running:
        signal.signal(signal.SIGTERM, lambda *_: running.send_signal(signal.SIGINT))
        return running.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=BENCHES)
    parser.add_argument("--last", action="store_true", help="run nothing: the last time's report")
    parser.add_argument(
        "--without", action="append", default=[], choices=(CPU, DISK, LMCACHE), help="leave it out"
    )
    parser.add_argument("--update", action="store_true", help="put the table into its document")
    return parser


if __name__ == "__main__":
    sys.exit(main())
