# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.pd [--quick]``: hand-overs between real engines, side by side.

Two pairs of ``vllm serve`` processes, all up at once, of which those whose turn it isn't stand
still (SIGSTOP: some spin): a producer and a consumer with this connector, and two with vLLM's
NixlConnector. Prompts of random tokens are computed by the
producers; then, in rotating order, each is handed over to a consumer that does not have it. The
clock runs from the request to the consumer, with the producer's ``kv_transfer_params``, to its
first token. Beside it, in the same rounds: a prompt that the consumer has on the device, a READ of
as many bytes by NIXL alone, and a memcpy.

``--update-docs`` measures nothing: it puts the last full run's tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks._command import lengths, say, update_docs
from benchmarks._report import FOLDER, Report
from benchmarks.ab_ttft import conditions
from benchmarks.ab_ttft.client import BenchmarkFailed
from benchmarks.ab_ttft.floor import kv_bytes_per_token
from benchmarks.ab_ttft.servers import serve_args
from benchmarks.pd.arms import Arm, make_key, missing
from benchmarks.pd.limits import Limits
from benchmarks.pd.pair import Setup, running
from benchmarks.pd.raw import SHAPES
from benchmarks.pd.results import render, rows, summarise
from benchmarks.pd.run import FULL, QUICK, Measured, Run, Workload
from tools.serving import ServerFailed
from tools.tinymodels import build_model

NAME = "pd"
CAPACITY_GIB = 1
TABLE = FOLDER / f"{NAME}.md"
DOCUMENT = Path("docs/benchmarks.md")


def main() -> int:
    args = _parser().parse_args()
    if args.update_docs:
        return update_docs(TABLE, DOCUMENT, NAME)
    if (reason := missing()) is not None:
        say(f"nothing measured: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended then, too
    workload = _workload(args)
    model = build_model("llama", FOLDER.parent / "models" / "llama-bfloat16", dtype="bfloat16")
    work = FOLDER.parent / NAME
    setup = Setup(
        model=model,
        work=work,
        key=make_key(work / "keys"),
        capacity_gib=CAPACITY_GIB,
        serve_args=serve_args(max(workload.lengths), sum(workload.lengths)),
        token_bytes=kv_bytes_per_token(model),
    )
    started = time.monotonic()
    try:
        measured = measure(
            args.arms, setup, workload, lambda s: say(f"{time.monotonic() - started:5.0f} s  {s}")
        )
    except KeyboardInterrupt:
        say("interrupted; the servers are stopped")
        return 130
    except (BenchmarkFailed, ServerFailed) as error:
        say(f"failed: {error}")
        return 1
    text = _describe(workload, setup.token_bytes)
    if workload != FULL or list(args.arms) != list(Arm):
        text = f"{conditions.PARTIAL_MARK}: {text}"
    results = summarise(measured)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{NAME}_samples.json").write_bytes(msgspec.json.encode(measured))
    TABLE.write_text(render(results, measured, text), encoding="utf-8")
    report = Report(NAME, notes=[text])
    report.rows += rows(results, measured)
    report.finish()
    say(f"tables in {TABLE}, servers' logs in {work}/")
    return 0


def measure(
    arms: Sequence[Arm], setup: Setup, workload: Workload, say: Callable[[str], None]
) -> Measured:
    """Start every pair, hand every prompt over, end every pair.

    Raises:
        BenchmarkFailed, ServerFailed: the figures would not be what they claim to be.
    """
    if warning := conditions.busy_warning():
        say(warning)
    with contextlib.ExitStack() as stack:
        pairs = {}
        for arm in arms:
            say(f"starting {arm.label}")
            pairs[arm] = stack.enter_context(running(arm, setup))
        limits = stack.enter_context(Limits(SHAPES[0]))
        run = Run(pairs, limits, workload, say)
        say("warming up")
        run.warm_up()
        run.rounds()
    return run.measured


def _describe(workload: Workload, token_bytes: int) -> str:
    return (
        f"{conditions.on_what((), CAPACITY_GIB, token_bytes)} (ours); one request at a time, "
        f"{workload.prompts} prompts of each length, each handed over {workload.repeats} times by "
        "both, in rotating order, while the other pair's processes stand still; data by CMA."
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pd",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="two lengths, fewer hand-overs")
    parser.add_argument("--arms", type=_arms, default=list(Arm), help="such as ours")
    parser.add_argument("--lengths", type=lengths, help="prompt lengths, such as 512,4000")
    parser.add_argument("--prompts", type=int, help="new prompts of each length")
    parser.add_argument("--repeats", type=int, help="hand-overs of each prompt by each pair")
    parser.add_argument("--update-docs", action="store_true", help="from the last full run")
    return parser


def _workload(args: argparse.Namespace) -> Workload:
    base = QUICK if args.quick else FULL
    return msgspec.structs.replace(
        base,
        lengths=args.lengths or base.lengths,
        prompts=args.prompts or base.prompts,
        repeats=args.repeats or base.repeats,
    )


def _arms(text: str) -> list[Arm]:
    return [Arm(name) for name in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
