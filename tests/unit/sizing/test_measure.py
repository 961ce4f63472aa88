# SPDX-License-Identifier: Apache-2.0
"""Measuring memory and disk: what is moved, what is left behind, and disks that fail or hang."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.measure import (
    CHUNK_BYTES,
    MAX_BYTES,
    Bounds,
    measure,
)
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.files import Files

BOUNDS = Bounds(nbytes=6 * CHUNK_BYTES, seconds=60.0, threads=2)


class Counting(Files):
    """Counts bytes, and fails or waits from some byte on."""

    def __init__(self) -> None:
        self.written = self.read = 0
        self.fails_at: int | None = None
        self.hangs: threading.Event | None = None

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.fails_at is not None and self.written >= self.fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = super().pwritev(fd, buffers, offset)
        self.written += done
        return done

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self.hangs is not None and self.written > 4 * CHUNK_BYTES:
            self.hangs.wait(60)
        done = super().preadv(fd, buffers, offset)
        self.read += done
        return done


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_all_bytes_are_moved_and_nothing_is_left(tmp_path: Path) -> None:
    files = Counting()
    found = measure(tmp_path / "new" / "folder", BOUNDS, files)
    assert found.copy.nbytes >= BOUNDS.nbytes
    assert found.disk_write.nbytes == found.disk_read.nbytes == BOUNDS.nbytes
    assert min(found.copy.rate, found.disk_write.rate, found.disk_read.rate) > 0
    assert files.written >= BOUNDS.nbytes <= files.read
    assert found.disk_mode in IoMode
    assert list(tmp_path.iterdir()) == []


def test_time_bounds_what_is_moved(tmp_path: Path) -> None:
    short = Bounds(nbytes=128 * CHUNK_BYTES, seconds=1e-6, threads=2)
    found = measure(tmp_path, short)
    assert found.copy.nbytes < short.nbytes
    # Each thread sees that its time is over after its first chunk.
    assert found.disk_write.nbytes == found.disk_read.nbytes == 2 * CHUNK_BYTES


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    files = Counting()
    files.fails_at = 2 * CHUNK_BYTES
    with pytest.raises(SizingError, match="cannot be written to: no space"):
        measure(tmp_path, BOUNDS, files)
    assert list(tmp_path.iterdir()) == []


class Interrupting(Files):
    """Somebody presses Ctrl-C while the first chunk is written."""

    def __init__(self) -> None:
        self.pressed = threading.Lock()

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        by_a_thread = threading.current_thread() is not threading.main_thread()
        if by_a_thread and self.pressed.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGINT)
        return super().pwritev(fd, buffers, offset)


def test_an_interrupt_leaves_neither_files_nor_threads(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    endless = Bounds(nbytes=MAX_BYTES // 16, seconds=60.0, threads=2)
    try:
        with pytest.raises(KeyboardInterrupt):
            measure(tmp_path / "new", endless, Interrupting())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not [each for each in threading.enumerate() if each.name.startswith("measure-")]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_does_not_answer(
    tmp_path: Path, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.sizing.measure.GRACE", 1.0)
    files = Counting()
    files.hangs = released
    with pytest.raises(SizingError, match="the disk did not answer in 3 s"):
        measure(tmp_path, Bounds(nbytes=6 * CHUNK_BYTES, seconds=2.0, threads=2), files)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SizingError, match="file/below: Not a directory"):
        measure(tmp_path / "file" / "below", BOUNDS)


@pytest.mark.parametrize(
    ("bounds", "reason"),
    [
        (Bounds(nbytes=CHUNK_BYTES, threads=2), "takes from 8388608 to"),
        (Bounds(nbytes=MAX_BYTES + 1), f"to {MAX_BYTES} bytes"),
        (Bounds(seconds=0.0), "at most 120 s, not 0"),
        (Bounds(seconds=121.0), "not 121"),
        (Bounds(threads=17), "1 to 16 threads, not 17"),
    ],
)
def test_bounds_that_make_no_sense(tmp_path: Path, bounds: Bounds, reason: str) -> None:
    with pytest.raises(SizingError, match=reason):
        measure(tmp_path, bounds)


def test_room_is_asked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total, used, _ = shutil.disk_usage(tmp_path)
    usage = type(shutil.disk_usage(tmp_path))(total, used, 2 * BOUNDS.nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    files = Counting()
    with pytest.raises(SizingError, match="bytes left"):
        measure(tmp_path, BOUNDS, files)
    assert files.written == 0
