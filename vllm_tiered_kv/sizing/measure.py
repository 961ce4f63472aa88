# SPDX-License-Identifier: Apache-2.0
"""How fast this machine's memory and disk are, measured in bounded time with bounded bytes.

Memory: copies from one buffer to another, as slots are filled; a GPU's link is not measured. Disk:
chunks through :class:`~.tiers.disk.store.RankFolder`, checksums included and past the page cache,
in a folder of its own that is removed again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import queue
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer, probe
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import ChunkFacts
from vllm_tiered_kv.tiers.disk.results import Read, ReadStatus, WriteStatus, Written
from vllm_tiered_kv.tiers.disk.store import RankFolder

CHUNK_BYTES = 4 << 20
MAX_BYTES = 16 << 30
MAX_SECONDS = 120.0
MAX_THREADS = 16
GRACE = 10.0
"""Seconds beyond the bound for calls under way to end."""

Over = Callable[[], bool]
"""Whether it is time to end."""

_NAMESPACE = "measure"
_FACTS = ChunkFacts((bytes(32),), 1, 0, 1)


class Bounds(msgspec.Struct, frozen=True):
    """How much a measurement may take."""

    nbytes: int = 512 << 20
    """Written and read; memory takes at most a quarter of a GiB."""
    seconds: float = 10.0
    """For each of copying, writing and reading."""
    threads: int = 4


class Speed(msgspec.Struct, frozen=True):
    """Of one way of moving bytes."""

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


class Measured(msgspec.Struct, frozen=True):
    """Of this machine."""

    copy: Speed
    disk_write: Speed
    disk_read: Speed
    disk_mode: IoMode
    """Where it is BUFFERED, the file system refused direct I/O and memory may have answered."""
    threads: int


def measure(folder: Path, bounds: Bounds, files: Files | None = None) -> Measured:
    """Measure memory, and the disk below ``folder``.

    Raises:
        SizingError: the bounds make no sense, there is no room, or the disk fails or does not
            answer in time.
    """
    _check(bounds)
    files = files or Files()
    copied = measure_copy(bounds)
    try:
        with _made(folder):
            room = shutil.disk_usage(folder).free
            if room < 2 * bounds.nbytes:
                raise SizingError(
                    f"{folder} has {room} bytes left; to write {bounds.nbytes} twice as many are "
                    "asked"
                )
            with tempfile.TemporaryDirectory(
                prefix="tiered-kv-measure-", dir=folder, ignore_cleanup_errors=True
            ) as name:
                return _measure_disk(Path(name), bounds, files, copied)
    except OSError as error:
        raise SizingError(f"{folder}: {error.strerror or error}") from None


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder is there; what of it was not before is gone again after the block."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


def measure_copy(bounds: Bounds) -> Speed:
    """Copies by all threads at once, each between buffers of its own.

    Raises:
        SizingError: memory did not answer in time.
    """
    size = min(bounds.nbytes, 256 << 20) // (2 * bounds.threads) // CHUNK_BYTES * CHUNK_BYTES
    size = max(size, CHUNK_BYTES)
    pairs = []
    for _ in range(bounds.threads):
        pair = mmap.mmap(-1, size), mmap.mmap(-1, size)
        pair[0].write(random.randbytes(4096) * (size // 4096))
        pair[1].write(bytes(size))  # its pages are there before they are timed
        pairs.append(pair)
    laps = max(1, bounds.nbytes // (size * bounds.threads))

    def work(thread: int, over: Over) -> int:
        source, target = (ctypes.c_char * size).from_buffer(pairs[thread][0]), pairs[thread][1]
        view = (ctypes.c_char * size).from_buffer(target)
        done = 0
        for _ in range(laps):
            ctypes.memmove(view, source, size)  # without the GIL
            done += size
            if over():
                break
        return done

    return _in_threads(work, bounds, "memory")


def _measure_disk(folder: Path, bounds: Bounds, files: Files, copied: Speed) -> Measured:
    mode = probe(files, folder, _NAMESPACE, 0)
    rank = RankFolder(folder, _NAMESPACE, 0, files=files, mode=mode)
    count = max(1, bounds.nbytes // CHUNK_BYTES)
    names = [random.Random(number).randbytes(32) for number in range(count)]
    buffers = [aligned_buffer(CHUNK_BYTES) for _ in range(bounds.threads)]
    for buffer in buffers:
        buffer[:] = os.urandom(CHUNK_BYTES)
    written = [False] * count

    def write(thread: int, over: Over) -> int:
        done = 0
        for number in range(thread, count, bounds.threads):
            answer = rank.write(names[number], 0, buffers[thread], CHUNK_BYTES, _FACTS, 0)
            if answer.status is not WriteStatus.WRITTEN:
                raise SizingError(f"{folder} cannot be written to: {_why(answer)}")
            written[number] = True
            done += CHUNK_BYTES
            if over():
                break
        return done

    def read(thread: int, over: Over) -> int:
        done = 0
        for number in range(thread, count, bounds.threads):
            if not written[number]:
                continue
            answer = rank.read(names[number], 0, buffers[thread], CHUNK_BYTES)
            if answer.status is not ReadStatus.OK:
                raise SizingError(f"{folder} cannot be read from: {_why(answer)}")
            done += CHUNK_BYTES
            if over():
                break
        return done

    try:
        stored = _in_threads(write, bounds, "the disk")
        if mode is IoMode.BUFFERED:
            _drop_from_cache(folder, files)
        loaded = _in_threads(read, bounds, "the disk")
    finally:
        rank.close()
    return Measured(copied, stored, loaded, mode, bounds.threads)


def _drop_from_cache(folder: Path, files: Files) -> None:
    """As far as the system follows advice."""
    for path in folder.rglob("*.kv"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            files.fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _why(answer: Written | Read) -> str:
    reason = answer.reason.value if answer.reason is not None else answer.status.value
    return str(reason).replace("_", " ")


def _in_threads(work: Callable[[int, Over], int], bounds: Bounds, what: str) -> Speed:
    """Bytes that all threads moved, and seconds from the first begin to the last end.

    A thread that never returns is left behind, as no call of it can be ended.
    """
    ended: queue.SimpleQueue[int | Exception] = queue.SimpleQueue()
    begin = time.monotonic()
    deadline = begin + bounds.seconds
    stopped = threading.Event()

    def over() -> bool:
        return stopped.is_set() or time.monotonic() > deadline

    def run(thread: int) -> None:
        try:
            ended.put(work(thread, over))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            ended.put(error)

    threads = [
        threading.Thread(target=run, args=(number,), name=f"measure-{number}", daemon=True)
        for number in range(bounds.threads)
    ]
    try:
        for thread in threads:
            thread.start()
        moved = _moved(ended, bounds, deadline, what)
    except KeyboardInterrupt:
        stopped.set()  # or they would fill the folder that is being removed
        for thread in threads:
            if thread.is_alive():
                thread.join(GRACE)
        raise
    if not moved:
        raise SizingError(f"{what} moved nothing in {bounds.seconds:g} s")
    return Speed(moved, max(time.monotonic() - begin, 1e-9))


def _moved(
    ended: queue.SimpleQueue[int | Exception], bounds: Bounds, deadline: float, what: str
) -> int:
    moved = 0
    failed: Exception | None = None
    for _ in range(bounds.threads):  # all, also where one failed: they write to the same folder
        try:
            answer = ended.get(timeout=max(0.0, deadline - time.monotonic()) + GRACE)
        except queue.Empty:
            limit = bounds.seconds + GRACE
            raise SizingError(f"{what} did not answer in {limit:g} s") from None
        if isinstance(answer, Exception):
            failed = failed or answer
        else:
            moved += answer
    if failed is not None:
        raise failed
    return moved


def _check(bounds: Bounds) -> None:
    if not CHUNK_BYTES * bounds.threads <= bounds.nbytes <= MAX_BYTES:
        raise SizingError(
            f"a measurement takes from {CHUNK_BYTES * bounds.threads} to {MAX_BYTES} bytes, "
            f"not {bounds.nbytes}"
        )
    if not 0 < bounds.seconds <= MAX_SECONDS:
        raise SizingError(f"a measurement takes at most {MAX_SECONDS:g} s, not {bounds.seconds:g}")
    if not 1 <= bounds.threads <= MAX_THREADS:
        raise SizingError(f"a measurement takes 1 to {MAX_THREADS} threads, not {bounds.threads}")
