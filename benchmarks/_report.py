# SPDX-License-Identifier: Apache-2.0
"""One way to report a measurement: a table to read and a JSON file to keep.

    report = Report("name")
    report.add("look-up", "ours", seconds, "s", goal=0.01, at_most=True)
    report.finish()

A value is the median of its samples and the spread their smallest and largest. Goals are recorded,
not enforced: a missed one is for the reader to see, and the program still ends well.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

FOLDER = Path(__file__).resolve().parent.parent / "build" / "bench"


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One figure. `met` says whether `goal` was reached, where there is a goal."""

    metric: str
    arm: str
    value: float
    unit: str
    spread: tuple[float, float]
    goal: float | None = None
    met: bool | None = None


class Document(msgspec.Struct, frozen=True):
    """What the JSON file holds."""

    name: str
    taken: str
    machine: dict[str, str]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]


class Report:
    """Collects rows; `finish()` prints them and writes `FOLDER/NAME.json`."""

    def __init__(self, name: str, notes: Sequence[str] = ()) -> None:
        self.name = name
        self.notes = tuple(notes)
        self.rows: list[Row] = []

    def add(
        self,
        metric: str,
        arm: str,
        samples: Sequence[float],
        unit: str,
        *,
        goal: float | None = None,
        at_most: bool = False,
    ) -> Row:
        """Adds the median of `samples`; the goal is a least value unless `at_most`.

        Raises:
            statistics.StatisticsError: there are no samples.
        """
        value = statistics.median(samples)
        met = None if goal is None else value <= goal if at_most else value >= goal
        row = Row(metric, arm, value, unit, (min(samples), max(samples)), goal, met)
        self.rows.append(row)
        return row

    def finish(self) -> Path:
        """Prints the table and writes the file.

        Raises:
            OSError: the file could not be written.
        """
        _print_table(self.name, self.rows)
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / f"{self.name}.json"
        taken = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        document = Document(self.name, taken, machine_facts(), self.notes, tuple(self.rows))
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
        goals = [row.met for row in self.rows if row.met is not None]
        print(f"{sum(goals)} of {len(goals)} goals met; rows in {path}")
        return path


def machine_facts() -> dict[str, str]:
    """What a figure depends on besides the code."""
    facts = {
        "cpu": _field(Path("/proc/cpuinfo"), "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "l3": _text(Path("/sys/devices/system/cpu/cpu0/cache/index3/size")),
        "memory": _field(Path("/proc/meminfo"), "MemTotal"),
        "load": f"{os.getloadavg()[0]:.2f}",
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
    }
    try:
        import torch
    except ImportError:
        return facts
    facts["torch"] = str(torch.__version__)
    if torch.cuda.is_available():
        facts["gpu"] = str(torch.cuda.get_device_name())
    return facts


def _field(path: Path, name: str) -> str:
    for line in _text(path).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return "unknown"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return "unknown"


def _print_table(title: str, rows: Sequence[Row]) -> None:
    header = ("metric", "arm", "value", "unit", "spread", "goal", "met")
    lines = [_cells(row) for row in rows]
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(header, lines)
        return
    table = Table(title=title)
    for name in header:
        table.add_column(name, no_wrap=True)
    for line in lines:
        table.add_row(*line)
    # Wide enough where the output is not a terminal, so that nothing is cut off.
    console = Console()
    console.print(table) if console.is_terminal else Console(width=140).print(table)


def _print_plain(header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    for line in (header, *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cells(row: Row) -> tuple[str, ...]:
    low, high = row.spread
    goal = "" if row.goal is None else _number(row.goal)
    met = {None: "", True: "yes", False: "NO"}[row.met]
    spread = f"{_number(low)} to {_number(high)}"
    return (row.metric, row.arm, _number(row.value), row.unit, spread, goal, met)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
