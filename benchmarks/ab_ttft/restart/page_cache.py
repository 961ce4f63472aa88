# SPDX-License-Identifier: Apache-2.0
"""That files come from the device: dropping them from the page cache, and proof of it."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_ATTEMPTS = 5
_LIBC = ctypes.CDLL(None, use_errno=True)


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder in which files come and go."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def drop(folder: Path) -> int:
    """Write every file below a folder out and drop it; returns the pages that stayed.

    Raises:
        OSError: a file could not be read or written out.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    left = 0
    for attempt in range(_ATTEMPTS):
        for path in files:
            _drop_file(path)
        left = sum(map(resident_pages, files))
        if not left:
            break
        time.sleep(0.1 * (attempt + 1))
    return left


def resident_pages(path: Path) -> int:
    """Pages of a file that the page cache holds, by mincore(2).

    Raises:
        OSError: the file cannot be looked at.
    """
    size = path.stat().st_size
    if size == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, dtype=np.uint8)
        pages = np.zeros(-(-size // mmap.PAGESIZE), dtype=np.uint8)
        address, wanted = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        failed = _LIBC.mincore(address, ctypes.c_size_t(size), wanted)
        del view  # or the mapping could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {path}")
    return int(np.count_nonzero(pages & 1))


def device_reads(processes: Iterable[int]) -> int:
    """Bytes these processes have had read from block devices; only differences mean something.

    Direct I/O counts, a hit in the page cache does not (``read_bytes`` in proc_pid_io(5)).
    """
    return sum(map(_read_bytes, processes))


def _drop_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)  # a page that was not written out cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _read_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/io").read_text()
    except OSError:
        return 0  # ended meanwhile
    fields = dict(line.split(": ", 1) for line in text.splitlines())
    return int(fields["read_bytes"])
