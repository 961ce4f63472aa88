# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.ab_ttft [--quick]``: measure, print, write tables and a plot.

``--update-docs`` measures nothing: it puts the last full run's tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from pathlib import Path

import msgspec

from benchmarks._command import arms_of, lengths, present, say, update_docs
from benchmarks._report import FOLDER, Report
from benchmarks.ab_ttft import conditions, markdown, plot
from benchmarks.ab_ttft.arms import IN_MEMORY, Arm, Setup
from benchmarks.ab_ttft.client import BenchmarkFailed
from benchmarks.ab_ttft.floor import kv_bytes_per_token
from benchmarks.ab_ttft.measure import FULL, QUICK, TAIL_TOKENS, Measured, Run, Workload
from benchmarks.ab_ttft.results import summarise
from benchmarks.ab_ttft.rows import rows
from benchmarks.ab_ttft.servers import empty_folder, running, serve_args
from tools.serving import ServerFailed
from tools.tinymodels import build_model

NAME = "ab_ttft"
DOCUMENT = Path("docs/benchmarks.md")


def main() -> int:
    args = _parser().parse_args()
    table = FOLDER / f"{NAME}.md"
    if args.update_docs:
        return update_docs(table, DOCUMENT, NAME)
    signal.signal(signal.SIGTERM, _terminate)  # so that the servers are ended then, too
    workload = _workload(args)
    arms = present(args.arms)
    model = build_model("llama", FOLDER.parent / "models" / "llama-bfloat16", dtype="bfloat16")
    setup = Setup(
        model=model,
        work=FOLDER.parent / NAME,
        capacity_gib=args.capacity,
        serve_args=serve_args(
            longest=max(workload.lengths) + TAIL_TOKENS,
            held=sum(workload.lengths) + len(workload.lengths) * TAIL_TOKENS,
        ),
    )
    token_bytes = kv_bytes_per_token(model)
    try:
        measured = _measure(arms, setup, workload, token_bytes)
    except KeyboardInterrupt:
        say("interrupted; the servers are stopped")
        return 130
    except (BenchmarkFailed, ServerFailed) as error:
        say(f"failed: {error}")
        return 1
    results = summarise(measured)
    text = conditions.describe(arms, workload, args.capacity, token_bytes)
    if workload != FULL or arms != list(IN_MEMORY):
        text = f"{conditions.PARTIAL_MARK}: {text}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{NAME}_samples.json").write_bytes(msgspec.json.encode(measured))
    table.write_text(markdown.render(results, text), encoding="utf-8")
    plot.draw(results, FOLDER / f"{NAME}.png")
    report = Report(NAME, notes=[text])
    report.rows += rows(results, measured)
    report.finish()
    say(f"tables in {table}, plot in {FOLDER}/{NAME}.png, servers' logs in {setup.work}/")
    return 0


def _measure(arms: list[Arm], setup: Setup, workload: Workload, token_bytes: int) -> Measured:
    """Start every arm, run the workload, end every arm."""
    started = time.monotonic()

    def progress(text: str) -> None:
        say(f"{time.monotonic() - started:5.0f} s  {text}")

    if warning := conditions.busy_warning():
        progress(warning)
    with contextlib.ExitStack() as stack:
        engines = {}
        for arm in arms:
            progress(f"starting {arm.label}")
            stack.enter_context(empty_folder(arm, setup))
            engines[arm] = stack.enter_context(running(arm, setup))
        run = Run(engines, workload, model=str(setup.model), token_bytes=token_bytes)
        progress("warming up")
        run.warm_up()
        for number in run.rounds():
            progress(f"round {number + 1} of {workload.rounds}")
        for length in run.pairs():
            progress(f"pairs of {length} tokens")
    return run.measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ab_ttft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer repeats")
    parser.add_argument("--arms", type=arms_of, default=list(IN_MEMORY), help="such as none,ours")
    parser.add_argument("--lengths", type=lengths, help="prompt lengths, such as 512,2048")
    parser.add_argument("--rounds", type=int, help="rounds of all arms")
    parser.add_argument("--pairs", type=int, help="further cold pairs a length")
    parser.add_argument("--capacity", type=int, default=2, help="GiB of each CPU tier")
    parser.add_argument("--update-docs", action="store_true", help="from the last full run")
    return parser


def _workload(args: argparse.Namespace) -> Workload:
    base = QUICK if args.quick else FULL
    return msgspec.structs.replace(
        base,
        lengths=args.lengths or base.lengths,
        rounds=base.rounds if args.rounds is None else args.rounds,
        pairs=base.pairs if args.pairs is None else args.pairs,
    )


def _terminate(*_: object) -> None:
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())
