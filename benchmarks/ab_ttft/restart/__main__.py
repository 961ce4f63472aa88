# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.ab_ttft.restart [--quick]``: measure, print, write the tables.

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
from benchmarks.ab_ttft import conditions, restart
from benchmarks.ab_ttft.arms import ON_DISK, Setup
from benchmarks.ab_ttft.client import BenchmarkFailed
from benchmarks.ab_ttft.floor import kv_bytes_per_token
from benchmarks.ab_ttft.measure import TAIL_TOKENS
from benchmarks.ab_ttft.restart import results
from benchmarks.ab_ttft.restart.run import FULL, QUICK, Run, Workload
from benchmarks.ab_ttft.servers import empty_folder, serve_args
from tools.serving import ServerFailed
from tools.tinymodels import build_model

NAME = "ab_ttft_restart"
CAPACITY_GIB = 2
DOCUMENT = Path("docs/benchmarks.md")
TABLE = FOLDER / f"{NAME}.md"


def main() -> int:
    args = _parser().parse_args()
    if args.update_docs:
        return update_docs(TABLE, DOCUMENT, NAME)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended then, too
    workload = _workload(args)
    arms = present(args.arms)
    model = build_model("llama", FOLDER.parent / "models" / "llama-bfloat16", dtype="bfloat16")
    setup = Setup(
        model=model,
        work=FOLDER.parent / NAME,
        capacity_gib=CAPACITY_GIB,
        serve_args=serve_args(max(workload.lengths) + TAIL_TOKENS, sum(workload.lengths)),
    )
    token_bytes = kv_bytes_per_token(model)
    if workload.stored_tokens * token_bytes > CAPACITY_GIB << 30:
        say(f"more prompts than fit in {CAPACITY_GIB} GiB: some of them may not be stored")
    started = time.monotonic()
    run = Run(
        arms,
        setup,
        workload,
        token_bytes,
        lambda s: say(f"{time.monotonic() - started:5.0f} s  {s}"),
    )
    if warning := conditions.busy_warning():
        say(warning)
    try:
        with contextlib.ExitStack() as stack:
            for arm in arms:
                stack.enter_context(empty_folder(arm, setup))
            run.store()
            run.rounds()
    except KeyboardInterrupt:
        say("interrupted; the servers are stopped")
        return 130
    except (BenchmarkFailed, ServerFailed, OSError) as error:
        say(f"failed: {error}")
        return 1
    text = (
        f"{conditions.on_what(arms, CAPACITY_GIB, token_bytes)}; {conditions.PROMPTS}, "
        f"{workload.rounds} restarts of every arm in rotating order; after each an unrelated "
        f"prompt of the shortest length was asked twice, and then {workload.prompts} stored ones "
        "of each length, every one once."
    )
    if workload != FULL or arms != list(ON_DISK):
        text = f"{conditions.PARTIAL_MARK}: {text}"
    found = results.summarise(run.measured)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{NAME}_samples.json").write_bytes(msgspec.json.encode(run.measured))
    TABLE.write_text(results.render(found, text), encoding="utf-8")
    report = Report(NAME, notes=[text])
    report.rows += results.rows(found, run.measured)
    report.finish()
    say(f"tables in {TABLE}, servers' logs in {setup.work}/")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ab_ttft.restart",
        description=restart.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer restarts")
    parser.add_argument(
        "--arms", type=arms_of, default=list(ON_DISK), help="such as none,ours-disk"
    )
    parser.add_argument("--lengths", type=lengths, help="prompt lengths, such as 1024,4096")
    parser.add_argument("--rounds", type=int, help="restarts of every arm")
    parser.add_argument("--prompts", type=int, help="prompts of each length after a restart")
    parser.add_argument("--update-docs", action="store_true", help="from the last full run")
    return parser


def _workload(args: argparse.Namespace) -> Workload:
    base = QUICK if args.quick else FULL
    return Workload(
        lengths=args.lengths or base.lengths,
        rounds=args.rounds or base.rounds,
        prompts=args.prompts or base.prompts,
    )


if __name__ == "__main__":
    sys.exit(main())
