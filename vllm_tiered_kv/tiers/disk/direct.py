# SPDX-License-Identifier: Apache-2.0
"""Whether files bypass the page cache, and memory that may take part in that.

`O_DIRECT` wants memory, offset and length at multiples of the device's block; `ALIGNMENT` is one
of every device in use. Where a file system refuses it, files are read and written as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import OpenFolders
from vllm_tiered_kv.tiers.disk.format import ALIGNMENT
from vllm_tiered_kv.tiers.disk.names import TEMP_FOLDER, temp_file

O_DIRECT: int = getattr(os, "O_DIRECT", 0)

_PROBE_BYTES = 2 * ALIGNMENT
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR})
"""What `O_TMPFILE` says where the file system, or the kernel, does not know it."""


class IoMode(enum.Enum):
    DIRECT = "direct"
    BUFFERED = "buffered"


def aligned_buffer(nbytes: int = ALIGNMENT) -> memoryview:
    """Zeros, at an address that `O_DIRECT` takes; freed with its last view."""
    return memoryview(mmap.mmap(-1, nbytes))


def is_aligned(view: memoryview) -> bool:
    """Whether `O_DIRECT` takes this memory. Not for memory that can't be written."""
    if view.readonly or not view.nbytes or view.nbytes % ALIGNMENT:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGNMENT == 0


def probe(files: Files, root: Path, namespace: str, rank: int) -> IoMode:
    """What works in a rank's folder, which is made if need be: found out with a file there.

    Never raises OSError: whatever fails, the answer is `BUFFERED`.
    """
    if not O_DIRECT:
        return IoMode.BUFFERED
    folders = OpenFolders(files, root, namespace, rank)
    try:
        with contextlib.suppress(OSError):
            if _is_direct(files, folders.get(TEMP_FOLDER, make=True)):
                return IoMode.DIRECT
    finally:
        folders.retire()
    return IoMode.BUFFERED


def try_folder(files: Files, folder: int) -> IoMode:
    """What works in an open folder, found out with a file that is nobody's: it has no name.

    Raises:
        OSError: nothing does.
    """
    with contextlib.suppress(OSError):
        if O_DIRECT and _is_direct(files, folder):
            return IoMode.DIRECT
    with _unnamed(files, folder) as fd:
        if not _writes_and_reads(files, fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
    return IoMode.BUFFERED


def _is_direct(files: Files, folder: int) -> bool:
    with _unnamed(files, folder, O_DIRECT) as fd:
        return _writes_and_reads(files, fd)


def _writes_and_reads(files: Files, fd: int) -> bool:
    """Whether an empty file returns what is written to it; 8 KiB from aligned memory.

    Raises:
        OSError: a call failed.
    """
    written = aligned_buffer(_PROBE_BYTES)
    written[:] = secrets.token_bytes(_PROBE_BYTES)
    read = aligned_buffer(_PROBE_BYTES)
    if files.pwritev(fd, [written[:ALIGNMENT], written[ALIGNMENT:]], 0) != _PROBE_BYTES:
        return False
    if files.preadv(fd, [read[:ALIGNMENT], read[ALIGNMENT:]], 0) != _PROBE_BYTES:
        return False
    return read == written


@contextlib.contextmanager
def _unnamed(files: Files, folder: int, flags: int = 0) -> Iterator[int]:
    fd = _open_unnamed(files, folder, os.O_RDWR | flags)
    try:
        yield fd
    finally:
        files.close(fd)


def _open_unnamed(files: Files, folder: int, flags: int) -> int:
    """Where a file system knows no files without a name, the name goes at once."""
    try:
        return files.open(".", os.O_TMPFILE | flags, dir_fd=folder)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name, changed_ns = temp_file(secrets.token_hex(12)), files.fstat(folder).st_mtime_ns
    try:
        return files.open(name, os.O_CREAT | os.O_EXCL | flags, dir_fd=folder)
    finally:
        with contextlib.suppress(OSError):  # where a flag is refused it may be there all the same
            files.unlink(name, dir_fd=folder)
            files.utime(folder, changed_ns)
