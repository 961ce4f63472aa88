# SPDX-License-Identifier: Apache-2.0
"""Processor time of the processes behind an arm.

vLLM's worker process spins on its queue for a second after every step, in its main thread and in
every arm alike. That second is told apart: it is not work, and it hides how much work there was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

_WINDOW_S = 0.03
_SHARE = 0.15
_WINDOWS = 2


class CpuClock:
    """User and system time of every process in some sessions, all their threads together.

    Args:
        sessions: ids of the sessions, each a server that was started in one of its own.
    """

    def __init__(self, sessions: Iterable[int]) -> None:
        wanted = frozenset(sessions)
        folders = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        found = [folder for folder in folders if _session(folder) in wanted]
        self.processes = tuple(int(folder.name) for folder in found)
        self._spinners = tuple(
            folder / "task" / folder.name / "schedstat" for folder in found if _is_worker(folder)
        )

    def seconds(self) -> float:
        """Time used so far; only differences mean something."""
        return sum(map(_process_ns, self.processes)) / 1e9

    def spinning_seconds(self) -> float:
        """The part of it used by the workers' main threads."""
        return sum(map(_thread_ns, self._spinners)) / 1e9

    def work_seconds(self) -> float:
        """The rest."""
        return self.seconds() - self.spinning_seconds()

    def wait_done(self, timeout_s: float) -> bool:
        """Wait until all but the spinning is over; False when it is not after ``timeout_s``."""
        return _wait(self.work_seconds, timeout_s)

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until the spinning is over, too; False when it is not after ``timeout_s``."""
        return _wait(self.seconds, timeout_s)

    def share(self, window_s: float) -> float:
        """Cores in use over the next ``window_s`` seconds."""
        return _share(self.seconds, window_s)


def _wait(clock: Callable[[], float], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    quiet = 0
    while quiet < _WINDOWS:
        if time.monotonic() > deadline:
            return False
        quiet = quiet + 1 if _share(clock, _WINDOW_S) < _SHARE else 0
    return True


def _share(clock: Callable[[], float], window_s: float) -> float:
    before, started = clock(), time.perf_counter()
    time.sleep(window_s)
    return (clock() - before) / (time.perf_counter() - started)


def _session(folder: Path) -> int:
    try:
        stat = (folder / "stat").read_text()
    except OSError:
        return -1  # ended meanwhile
    # The name in brackets may hold anything; the fields after it are numbers.
    return int(stat.rpartition(")")[2].split()[3])


def _is_worker(folder: Path) -> bool:
    try:
        return (folder / "comm").read_text().startswith("VLLM::Worker")
    except OSError:
        return False


def _process_ns(pid: int) -> int:
    # The kernel's CPU clock of another process: nanoseconds, where /proc counts in ticks of 10 ms.
    try:
        return time.clock_gettime_ns((~pid << 3) | 2)
    except OSError:
        return 0


def _thread_ns(schedstat: Path) -> int:
    try:
        return int(schedstat.read_text().split()[0])
    except OSError:
        return 0
