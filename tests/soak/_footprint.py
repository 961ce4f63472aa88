# SPDX-License-Identifier: Apache-2.0
"""What a server's processes hold: memory, threads, file descriptors."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec


class Footprint(msgspec.Struct, frozen=True):
    """Sums over a process and all that it started."""

    processes: int
    memory_mib: float
    """Proportional set size: shared pages count once."""
    threads: int
    descriptors: int


def footprint(pid: int) -> Footprint:
    """The footprint of a process tree now; processes that end meanwhile are left out."""
    memory, threads, descriptors, count = 0.0, 0, 0, 0
    for process in _tree(pid):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            rollup = (process / "smaps_rollup").read_text()
            pss = next(line for line in rollup.splitlines() if line.startswith("Pss:"))
            memory += int(pss.split()[1]) / 1024
            threads += len(list((process / "task").iterdir()))
            descriptors += len(list((process / "fd").iterdir()))
            count += 1
    return Footprint(count, memory, threads, descriptors)


def _tree(pid: int) -> list[Path]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name stands in parentheses and may hold anything.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(Path(f"/proc/{one}"))
        todo += children.get(one, [])
    return found
