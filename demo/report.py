# SPDX-License-Identifier: Apache-2.0
"""What the demo prints at its end, and the same as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from demo.arm import Measured
from demo.compare import equal, largest_difference
from tools.serving import Completion

A = "A"
B = "B"


class HitTokens(msgspec.Struct, frozen=True):
    device: int
    cpu: int


class Row(msgspec.Struct, frozen=True):
    """One measured request on one arm."""

    name: str
    arm: str
    ttft_ms: float
    prompt_tokens: int
    hit_tokens: HitTokens
    bytes_loaded: int
    equal: bool
    largest_logprob_difference: float | None
    text: str


class Report(msgspec.Struct, frozen=True):
    """The content of ``demo.json``."""

    ok: bool
    requests: list[Row]
    error: str | None = None
    bytes_stored: int = 0
    seconds: float = 0.0


def rows(
    arm: str, results: list[Measured], references: dict[tuple[int, ...], Completion]
) -> list[Row]:
    """The measured requests of one arm, compared with cold runs of the same prompts."""
    return [
        Row(
            name=result.step.name,
            arm=arm,
            ttft_ms=round(result.completion.ttft_s * 1e3, 1),
            prompt_tokens=result.completion.prompt_tokens,
            hit_tokens=HitTokens(result.device_hits, result.cpu_hits),
            bytes_loaded=result.bytes_loaded,
            equal=equal(references[result.step.prompt], result.completion),
            largest_logprob_difference=largest_difference(
                references[result.step.prompt], result.completion
            ),
            text=result.completion.text,
        )
        for result in results
        if result.step.measured
    ]


def verdict(requests: list[Row]) -> str | None:
    """Why the demo failed; None when it did not."""
    wrong = [f"{row.arm}: {row.name}" for row in requests if not row.equal]
    if wrong:
        return "output differs from a cold run: " + ", ".join(wrong)
    if not any(row.hit_tokens.cpu for row in requests if row.arm == B):
        return "no prompt token came from the CPU tier"
    return None


def write(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def print_table(console: Console, report: Report) -> None:
    """A and B side by side, one line a request."""
    table = Table(title="time to first token (A: no connector, B: TieredKVConnector)")
    table.add_column("request")
    for title in ("prompt tokens", "A ms", "B ms", "B hits: device", "cpu", "MiB loaded"):
        table.add_column(title, justify="right")
    table.add_column("output equal")
    pairs: dict[str, dict[str, Row]] = {}
    for row in report.requests:
        pairs.setdefault(row.name, {})[row.arm] = row
    for name, pair in pairs.items():
        if A not in pair or B not in pair:
            continue
        a, b = pair[A], pair[B]
        table.add_row(
            name,
            f"{b.prompt_tokens:,}",
            f"{a.ttft_ms:,.0f}",
            f"{b.ttft_ms:,.0f}",
            f"{b.hit_tokens.device:,}",
            f"{b.hit_tokens.cpu:,}",
            f"{b.bytes_loaded / 2**20:.1f}",
            "yes" if a.equal and b.equal else "NO",
        )
    console.print(table)
