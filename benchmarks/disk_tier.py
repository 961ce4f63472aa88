# SPDX-License-Identifier: Apache-2.0
"""How much of the disk's rate do chunks reach on their way to files and back?

    python -m benchmarks.disk_tier [--quick] [--folder FOLDER]

Chunks of random bytes are stored and loaded, each a file, by threads that each take the next one
when theirs is done. Arms, in turns:

- `ours`: `RankFolder`, with its checksums, a header and a rename a file; two threads more than
  the others have, as the tier's own do, but no more of them in an I/O call at once;
- `fio`: threads with blocks of the same size, in one file each that is there already;
- `fio, files`: the same with a new file for each block, as the other arms have;
- `vLLM`: what its own file system tier calls, without checksums.

All bypass the page cache (`O_DIRECT`). Where a file system refuses that, what was stored is written
out and dropped from the page cache before it is loaded, untimed. The files of a run are new and
are loaded by the arm that stored them; what was loaded is compared once before anything is timed.

fio is a program of its own (`apt-get install fio`); without it, its arms are left out.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks._report import Report
from benchmarks._threads import in_threads
from vllm_tiered_kv.tiers.disk.direct import IoMode, probe
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import ChunkFacts
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus, WriteStatus

MIB, GIB = 1 << 20, 1 << 30
CHUNKS = (1 * MIB, 4 * MIB)
NAMESPACE = "benchmark"
HASHING = 2
"""Threads beyond those that may be in an I/O call: they hash meanwhile."""
FIO_GOAL = 0.9
VLLM_GOAL = 1.0
FACTS = ChunkFacts(tuple(bytes([i]) * 32 for i in range(8)), 8, 0, 128)


class Case(NamedTuple):
    chunk: int
    threads: int
    total: int
    mode: IoMode

    def __str__(self) -> str:
        return f"{self.chunk // MIB} MiB, depth {self.threads}"

    @property
    def chunks(self) -> int:
        return self.total // self.chunk


class Arm(Protocol):
    """Both give the seconds that all chunks of a case took."""

    def store(self, case: Case, folder: Path) -> float: ...
    def load(self, case: Case, folder: Path) -> float: ...


class Memory:
    """Random bytes in huge pages, as a tier's slots are; a chunk is the same part for every arm."""

    def __init__(self, nbytes: int) -> None:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapping)
        for start in range(0, nbytes, MIB):
            self.view[start : start + MIB] = os.urandom(MIB)

    def chunk(self, case: Case, number: int) -> memoryview:
        return self.view[number * case.chunk : (number + 1) * case.chunk]


def keys(case: Case) -> list[bytes]:
    return [random.Random(number).randbytes(32) for number in range(case.chunks)]


def shares(case: Case) -> list[range]:
    """Which chunks each thread moves."""
    return [range(thread, case.chunks, case.threads) for thread in range(case.threads)]


class Turns(Files):
    """No more than so many transfers at once: the depth that the other arms have."""

    def __init__(self, depth: int) -> None:
        self._turns = threading.Semaphore(depth)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._turns:
            return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._turns:
            return super().pwritev(fd, buffers, offset)


class Ours:
    """`RankFolder`. Its folders are made before the time begins, as they are once in its life."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._rank: RankFolder | None = None

    def store(self, case: Case, folder: Path) -> float:
        files = Turns(case.threads)
        rank = self._rank = RankFolder(folder, NAMESPACE, 0, files=files, mode=case.mode)
        small = memoryview(bytearray(4096))
        for first in range(256):
            rank.write(bytes([first]), 0, small, 4096, FACTS, 0)
        names = keys(case)

        def move(number: int) -> None:
            view = self._memory.chunk(case, number)
            written = rank.write(names[number], 0, view, case.chunk, FACTS, time.time_ns())
            if written.status is not WriteStatus.WRITTEN:
                raise RuntimeError(f"a chunk was not stored: {written}")

        return self._run(case, move)

    def load(self, case: Case, folder: Path) -> float:
        rank = self._rank
        if rank is None:
            raise RuntimeError("nothing was stored")
        names = keys(case)

        def move(number: int) -> None:
            view = self._memory.chunk(case, number)
            found = rank.read(names[number], 0, view, case.chunk)
            if found.status is not ReadStatus.OK:
                raise RuntimeError(f"a chunk was not loaded: {found}")

        seconds = self._run(case, move)
        rank.close()
        return seconds

    def _run(self, case: Case, move: Callable[[int], None]) -> float:
        """Each thread takes the next chunk when its own is done."""
        numbers = iter(range(case.chunks))
        lock = threading.Lock()

        def run() -> None:
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                move(number)

        return in_threads([run] * (case.threads + HASHING))


class Vllm:
    """What the threads of vLLM's tier call, once for all of a thread's chunks."""

    def __init__(self, memory: Memory) -> None:
        from vllm.v1.kv_offload.tiering.fs import io

        self._memory = memory
        self._io = io

    def store(self, case: Case, folder: Path) -> float:
        for first in range(256):
            (folder / f"{first:02x}").mkdir(parents=True)
        return self._run(case, folder, self._io.batch_store_block)

    def load(self, case: Case, folder: Path) -> float:
        return self._run(case, folder, self._io.batch_load_block)

    def _run(self, case: Case, folder: Path, move: Callable[..., object]) -> float:
        paths = [str(folder / key.hex()[:2] / key.hex()) for key in keys(case)]
        direct = case.mode is IoMode.DIRECT

        def run(share: range) -> None:
            offsets = [number * case.chunk for number in share]
            chosen = [paths[number] for number in share]
            move(chosen, self._memory.view, offsets, case.chunk, direct)

        return in_threads([functools.partial(run, share) for share in shares(case)])


class Fio:
    """fio's own measure of as many bytes, by its threads."""

    def __init__(self, *, many_files: bool) -> None:
        self._many_files = many_files

    def store(self, case: Case, folder: Path) -> float:
        if not self._many_files:
            self._run(case, folder, "write")  # lays the files out
        return self._run(case, folder, "write")

    def load(self, case: Case, folder: Path) -> float:
        return self._run(case, folder, "read")

    def _run(self, case: Case, folder: Path, direction: str) -> float:
        folder.mkdir(parents=True, exist_ok=True)
        share = case.chunks // case.threads
        options = {
            "name": "job",
            "directory": str(folder),
            "rw": direction,
            "bs": str(case.chunk),
            "size": str(share * case.chunk),
            "numjobs": str(case.threads),
            "ioengine": "psync",
            "direct": "1" if case.mode is IoMode.DIRECT else "0",
            "fallocate": "none",
            "output-format": "json",
        }
        if self._many_files:
            options |= {
                "nrfiles": str(share),
                "filesize": str(case.chunk),
                "openfiles": "1",
                "file_service_type": "sequential",
                "create_on_open": "1",
            }
        command = ["fio", "--thread", "--group_reporting"]
        command += [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run(command, capture_output=True, check=True, timeout=600)
        result = json.loads(done.stdout)["jobs"][0][direction]
        return float(result["runtime"] / 1e3 * case.total / result["io_bytes"])


def evict(folder: Path) -> None:
    """Writes files out and drops them from the page cache."""
    files = Files()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            files.fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def verify(arm: Arm, case: Case, memory: Memory, folder: Path) -> None:
    """Raises RuntimeError: bytes that were loaded are not those that were stored."""
    before = bytes(memory.view[: case.total])
    arm.store(case, folder)
    memory.view[: case.total] = bytes(case.total)
    arm.load(case, folder)
    if memory.view[: case.total] != before:
        raise RuntimeError("what was loaded is not what was stored")
    shutil.rmtree(folder)


def measure(case: Case, arms: dict[str, Arm], root: Path, report: Report, rounds: int) -> None:
    seconds: dict[tuple[str, str], list[float]] = {}
    order = list(arms)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            folder = root / f"{turn}-{name.replace(' ', '')}"
            stored = arms[name].store(case, folder)
            if case.mode is IoMode.BUFFERED:
                evict(folder)
            loaded = arms[name].load(case, folder)
            shutil.rmtree(folder)
            seconds.setdefault(("store", name), []).append(stored)
            seconds.setdefault(("load", name), []).append(loaded)
    for direction in ("store", "load"):
        ours = seconds[direction, "ours"]
        for name in arms:
            rates = [case.total / s / GIB for s in seconds[direction, name]]
            report.add(f"{direction}, {case}", name, rates, "GiB/s")
        for name, goal in (("fio", FIO_GOAL), ("fio, files", FIO_GOAL), ("vLLM", VLLM_GOAL)):
            if name in arms:
                ratios = [b / a for a, b in zip(ours, seconds[direction, name], strict=True)]
                report.add(f"{direction}, {case}", "ours", ratios, f"of {name}", goal=goal)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disk_tier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer threads, rounds and bytes")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: build/bench")
    options = parser.parse_args()
    quick: bool = options.quick
    total = 256 * MIB if quick else GIB
    rounds = 3 if quick else 9
    parent: Path = options.folder or Path(__file__).resolve().parent.parent / "build" / "bench"
    parent.mkdir(parents=True, exist_ok=True)

    memory = Memory(total)
    arms: dict[str, Arm] = {"ours": Ours(memory)}
    if shutil.which("fio"):
        arms |= {"fio": Fio(many_files=False), "fio, files": Fio(many_files=True)}
    else:
        print("fio is not installed (apt-get install fio): its arms are left out")
    try:
        arms["vLLM"] = Vllm(memory)
    except ImportError:
        print("vLLM is not installed, or has no such tier: its arm is left out")
    with tempfile.TemporaryDirectory(prefix="disk_tier-", dir=parent) as name:
        root = Path(name)
        mode = probe(Files(), root / "probe", NAMESPACE, 0)
        report = Report(
            "disk_tier",
            notes=(
                f"{rounds} rounds; {total // MIB} MiB a run; {mode.value}; in {parent}",
                "ratios are of runs of one round; spread is smallest and largest",
                "a virtual disk's host may hold in memory what is read here",
            ),
        )
        for arm in ("ours", "vLLM"):
            if arm in arms:
                verify(arms[arm], Case(MIB, 2, total, mode), memory, root / "verify")
        for chunk in CHUNKS:
            for threads in (1, 4) if quick else (1, 2, 4, 8):
                case = Case(chunk, threads, total, mode)
                measure(case, arms, root, report, rounds)
        report.finish()


if __name__ == "__main__":
    main()
