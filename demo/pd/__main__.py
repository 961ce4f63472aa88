# SPDX-License-Identifier: Apache-2.0
"""``python -m demo.pd``: run both arms, print the table, write ``build/demo-pd.json``."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from demo.compare import equal, largest_difference
from demo.pd import servers
from demo.scenario import BLOCK_TOKENS, PUSH_OUT_TOKENS, Scenario
from tools.serving import Client, Completion, RequestFailed, ServerFailed
from tools.serving.router import RouterFailed
from tools.tinymodels import build_model

LENGTHS = (512, 2000, 3900)
TURN_TOKENS = 12 * BLOCK_TOKENS
QUESTION_TOKENS = 200
ANSWER_TOKENS = 32
_HITS = "vllm:tiered_kv_hit_tokens_total"
_BYTES = "vllm:tiered_kv_bytes_total"


class Row(msgspec.Struct, frozen=True):
    """One prompt, handed over and on a single server."""

    name: str
    prompt_tokens: int
    ttft_ms: float
    """Through the router: prefill, hand-over and the first token of decode."""
    single_ttft_ms: float
    itl_ms: float
    """Mean time between tokens."""
    single_itl_ms: float
    pulled_tokens: int
    cpu_tokens: int
    """Found in the decode server's own CPU tier."""
    bytes_pulled: int
    equal: bool
    largest_logprob_difference: float | None


class Report(msgspec.Struct, frozen=True):
    """The content of ``demo-pd.json``."""

    ok: bool
    requests: list[Row]
    error: str | None = None
    seconds: float = 0.0


class Measured(msgspec.Struct, frozen=True):
    """One prompt through the router, and what the decode server counted."""

    name: str
    prompt: tuple[int, ...]
    completion: Completion
    pulled: int
    cpu: int
    nbytes: int


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.pd", description=__doc__)
    parser.add_argument("--build", type=Path, default=Path("build"), help="folder for all output")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended, too
    try:
        result = run(console, args.build, args.seed)
    except KeyboardInterrupt:
        console.print("interrupted; the servers are stopped")
        return 130
    except (ServerFailed, RequestFailed, RouterFailed, TimeoutError) as error:
        result = Report(ok=False, requests=[], error=str(error))
    output = args.build / "demo-pd.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    if result.requests:
        show(console, result)
    console.print(f"details in {output}, logs in {args.build}/demo/")
    if result.error is not None:
        console.print(f"FAILED: {result.error}", markup=False)
        return 1
    console.print("ok: every output equals the single server's, and every prompt was handed over")
    return 0


def run(console: Console, build: Path, seed: int) -> Report:
    """Both arms, one after the other.

    Raises:
        ServerFailed, RouterFailed: one did not start.
        RequestFailed: a request was not answered.
        TimeoutError: the prefill server does not hand over.
    """
    started = time.monotonic()
    model = build_model("llama", build / "models" / "llama-float32", seed=seed)
    scenario = Scenario(model, seed)
    console.print("two servers and vllm-router: prefill hands over to decode")
    with servers.pair(model, build) as pair:
        measured = [
            measure(pair, f"{tokens:,} tokens", scenario.text(f"prompt {tokens}", tokens))
            for tokens in LENGTHS
        ]
        measured += second_turn(pair, scenario)
    console.print("a single server: the same prompts")
    with servers.single(model, build) as client:
        rows = [compare(client, each, i) for i, each in enumerate(measured)]
    error = verdict(rows)
    return Report(error is None, rows, error, round(time.monotonic() - started, 1))


def measure(pair: servers.Pair, name: str, prompt: tuple[int, ...]) -> Measured:
    """Send one prompt through the router."""
    before = pair.consumer.metrics()
    completion = pair.router.complete(prompt, max_tokens=ANSWER_TOKENS)
    after = pair.consumer.metrics()

    def grown(metric: str, **labels: str) -> int:
        return round(after.value(metric, **labels) - before.value(metric, **labels))

    return Measured(
        name,
        prompt,
        completion,
        grown(_HITS, tier="peer"),
        grown(_HITS, tier="cpu"),
        grown(_BYTES, tier="peer", direction="load"),
    )


def second_turn(pair: servers.Pair, scenario: Scenario) -> list[Measured]:
    """A conversation whose first turn the decode server finds in its own CPU tier."""
    opening = scenario.text("turn 1", TURN_TOKENS)
    first = measure(pair, "first turn", opening)
    pair.router.complete(scenario.text("other", PUSH_OUT_TOKENS), max_tokens=2)  # pushed out
    history = (*opening, *first.completion.token_ids)
    second = (*history, *scenario.text("turn 2", QUESTION_TOKENS))
    return [first, measure(pair, "second turn", second)]


def compare(client: Client, measured: Measured, number: int) -> Row:
    """The same prompt on a single server that has nothing cached of it."""
    alone = client.complete(measured.prompt, max_tokens=ANSWER_TOKENS, cache_salt=f"alone-{number}")
    return Row(
        name=measured.name,
        prompt_tokens=measured.completion.prompt_tokens,
        ttft_ms=round(measured.completion.ttft_s * 1e3, 1),
        single_ttft_ms=round(alone.ttft_s * 1e3, 1),
        itl_ms=_itl_ms(measured.completion),
        single_itl_ms=_itl_ms(alone),
        pulled_tokens=measured.pulled,
        cpu_tokens=measured.cpu,
        bytes_pulled=measured.nbytes,
        equal=equal(alone, measured.completion),
        largest_logprob_difference=largest_difference(alone, measured.completion),
    )


def verdict(rows: list[Row]) -> str | None:
    """Why the demo failed; None when it did not."""
    if wrong := [row.name for row in rows if not row.equal]:
        return "output differs from a single server's: " + ", ".join(wrong)
    if missing := [row.name for row in rows if not row.pulled_tokens]:
        return "not handed over: " + ", ".join(missing)
    if not rows[-1].cpu_tokens:
        return "the second turn found nothing in the decode server's CPU tier"
    if rows[-1].pulled_tokens + rows[-1].cpu_tokens != rows[-1].prompt_tokens:
        return "the second turn's prompt came neither from the tier nor from prefill as a whole"
    return None


def show(console: Console, report: Report) -> None:
    table = Table(title="prefill handed over to decode, beside a single server")
    table.add_column("request")
    for title in (
        "prompt tokens",
        "TTFT ms",
        "single",
        "ITL ms",
        "single",
        "handed over",
        "MiB",
        "own CPU tier",
    ):
        table.add_column(title, justify="right")
    table.add_column("equal")
    for row in report.requests:
        table.add_row(
            row.name,
            f"{row.prompt_tokens:,}",
            f"{row.ttft_ms:,.0f}",
            f"{row.single_ttft_ms:,.0f}",
            f"{row.itl_ms:.1f}",
            f"{row.single_itl_ms:.1f}",
            f"{row.pulled_tokens:,}",
            f"{row.bytes_pulled / 2**20:.1f}",
            f"{row.cpu_tokens:,}",
            "yes" if row.equal else "NO",
        )
    console.print(table)


def _itl_ms(completion: Completion) -> float:
    gaps = max(1, len(completion.token_ids) - 1)
    return round((completion.total_s - completion.ttft_s) / gaps * 1e3, 2)


if __name__ == "__main__":
    sys.exit(main())
