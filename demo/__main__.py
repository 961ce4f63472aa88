# SPDX-License-Identifier: Apache-2.0
"""``python -m demo``: run both arms, print the table, write ``build/demo.json``."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from demo import arm, report
from demo.arm import Measured
from demo.report import Report, Row
from demo.scenario import Scenario, Transcript
from tools.serving import Client, RequestFailed, Server, ServerFailed
from tools.tinymodels import build_model

BYTES_STORED = "vllm:tiered_kv_bytes_total"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder for all output")
    parser.add_argument("--capacity", default="2GiB", help="of the CPU tier")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # in a log file nothing is wrapped
    output = args.build / "demo.json"
    signal.signal(signal.SIGTERM, _terminate)  # so that the servers are ended then, too
    try:
        result = run(console, args.build, args.capacity, args.seed)
    except KeyboardInterrupt:
        console.print("interrupted; the servers are stopped")
        return 130
    except (ServerFailed, RequestFailed, TimeoutError) as error:
        report.write(Report(ok=False, requests=[], error=str(error)), output)
        console.print(f"failed: {error}", markup=False)
        return 1
    report.write(result, output)
    report.print_table(console, result)
    console.print(f"{result.seconds:.0f} s in all; details in {output}, logs in {args.build}/demo/")
    if result.error is not None:
        console.print(f"FAILED: {result.error}", markup=False)
        return 1
    console.print("ok: every output equals that of a cold run, and the CPU tier was used")
    return 0


def run(console: Console, build: Path, capacity: str, seed: int) -> Report:
    """Both arms, one after the other: side by side they would compete for the same cores.

    Raises:
        ServerFailed: a server did not start.
        RequestFailed: a request was not answered.
        TimeoutError: a server's counters did not show a finished request.
    """
    started = time.monotonic()
    with console.status("building the model"):
        model = build_model("llama", build / "models" / "llama-float32", seed=seed)
    console.print(f"model: {model}")
    scenario = Scenario(model, seed)
    transcript = Transcript()

    with _server(console, "A, no connector", model, None, build) as (client, show):
        results_a = arm.run_steps(client, scenario, transcript, show, keep_answers=True)
        with console.status("cold runs to compare with"):
            measured = [result.step for result in results_a if result.step.measured]
            references = arm.cold_references(client, measured)

    with _server(console, "B, TieredKVConnector", model, capacity, build) as (client, show):
        results_b = arm.run_steps(client, scenario, transcript, show, keep_answers=False)
        stored = client.metrics().value(BYTES_STORED, tier="cpu", direction="store")

    requests: list[Row] = [
        *report.rows(report.A, results_a, references),
        *report.rows(report.B, results_b, references),
    ]
    error = report.verdict(requests)
    return Report(
        ok=error is None,
        requests=requests,
        error=error,
        bytes_stored=round(stored),
        seconds=round(time.monotonic() - started, 1),
    )


@contextlib.contextmanager
def _server(
    console: Console, title: str, model: Path, capacity: str | None, build: Path
) -> Iterator[tuple[Client, Callable[[Measured], None]]]:
    """A running arm: its client, warmed up, and what prints one line a request."""
    name = title[0]
    log = build / "demo" / f"{name.lower()}.log"

    def show(result: Measured) -> None:
        done = result.completion
        console.print(
            f"  {name}  {result.step.name:<27} {done.prompt_tokens:>6,} tokens"
            f"  first token {done.ttft_s * 1e3:>6,.0f} ms"
            f"  hits: device {result.device_hits:>5,}, cpu {result.cpu_hits:>5,}"
        )

    with contextlib.ExitStack() as stack:
        with console.status(f"starting server {title}"):
            server = stack.enter_context(Server(arm.serve_spec(model, capacity), log))
            client = stack.enter_context(Client(server.url))
            arm.warm_up(client)
        console.print(f"server {title}: {server.url}, log {log}")
        yield client, show


def _terminate(*_: object) -> None:
    sys.exit(143)


if __name__ == "__main__":
    sys.exit(main())
