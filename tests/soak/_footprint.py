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
    """Anonymous and shared memory, in proportion: what it maps of files is not its own, and is
    counted for less while others map it too."""
    threads: int
    descriptors: int


def footprint(pid: int, folder: Path) -> Footprint:
    """The footprint of a process tree now; processes that end meanwhile are left out.

    Args:
        pid: of the first process.
        folder: open directories below it are not counted: a disk tier keeps up to 258 a rank.
    """
    folder = folder.resolve()  # /proc names descriptors without links
    memory, threads, descriptors, count = 0.0, 0, 0, 0
    for process in processes(pid):
        with contextlib.suppress(OSError, ValueError):
            for line in (process / "smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    memory += int(line.split()[1]) / 1024
            threads += len(list((process / "task").iterdir()))
            descriptors += sum(not _is_below(fd, folder) for fd in (process / "fd").iterdir())
            count += 1
    return Footprint(count, memory, threads, descriptors)


def _is_below(descriptor: Path, folder: Path) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile
        target = descriptor.readlink()
        return folder in target.parents and descriptor.is_dir()
    return False


def processes(pid: int) -> list[Path]:
    """The folders in ``/proc`` of a process and all that it started."""
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
