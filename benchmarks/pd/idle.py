# SPDX-License-Identifier: Apache-2.0
"""Processor time of engines that nothing is asked of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

Name = TypeVar("Name")

_KINDS = (("VLLM::Worker", "worker"), ("VLLM::EngineCor", "engine"))
OTHERS = "server"
"""The process that speaks HTTP, and its helpers."""


class Use(msgspec.Struct, frozen=True):
    """Nanoseconds of processor time of one kind of process."""

    all: int = 0
    beside_main: int = 0
    """Of it, what no main thread has used: a connector's threads are among these."""

    def __add__(self, other: Use) -> Use:
        return Use(self.all + other.all, self.beside_main + other.beside_main)

    def __sub__(self, other: Use) -> Use:
        return Use(self.all - other.all, self.beside_main - other.beside_main)


def used(processes: Iterable[int]) -> dict[str, Use]:
    """What these processes have used since they began, by kind."""
    total: dict[str, Use] = {}
    for pid in processes:
        kind = _kind(pid)
        total[kind] = total.get(kind, Use()) + _use(pid)
    return total


def shares(
    before: Mapping[str, Use], after: Mapping[str, Use], seconds: float
) -> dict[str, tuple[float, float]]:
    """Percent of a core by kind of process: in all, and without main threads."""
    return {
        kind: (
            (now - before.get(kind, Use())).all / seconds / 1e7,
            (now - before.get(kind, Use())).beside_main / seconds / 1e7,
        )
        for kind, now in after.items()
    }


def watch(
    groups: Mapping[Name, Sequence[int]], seconds: float
) -> dict[Name, dict[str, tuple[float, float]]]:
    """:func:`shares` of each group of processes over the next ``seconds``, all at once."""
    before, started = {name: used(pids) for name, pids in groups.items()}, time.perf_counter()
    time.sleep(seconds)
    after, passed = {name: used(pids) for name, pids in groups.items()}, time.perf_counter()
    return {name: shares(before[name], after[name], passed - started) for name in groups}


def _use(pid: int) -> Use:
    use = Use()
    for thread in Path(f"/proc/{pid}/task").glob("[0-9]*"):
        try:
            ran = int((thread / "schedstat").read_text().split()[0])
        except OSError:
            continue  # ended meanwhile
        use += Use(ran, 0 if thread.name == str(pid) else ran)
    return use


def _kind(pid: int) -> str:
    try:
        name = Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return OTHERS
    return next((kind for start, kind in _KINDS if name.startswith(start)), OTHERS)
