# SPDX-License-Identifier: Apache-2.0
"""The SHA-256 of one file that loads, read only if nobody has told it already."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
import time
from pathlib import Path

from vllm_tiered_kv.identity.memory import DigestMemory, FileKey

BLOCK_BYTES = 8 << 20
"""A read; large enough that hashing, which lets other threads run, is most of the time."""
ATTEMPTS = 3
"""Times a file is read when it changes meanwhile."""
SETTLED_NS = 2_000_000_000
"""A file that changed this recently is not remembered: it could change again within the
resolution of its file system's clock and look the same."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class Cancelled(Exception):
    """The digest is no longer wanted."""


class Unreadable(Exception):
    """A file that has no digest; the message says why."""


class FileHasher:
    """Digests of files, one after the other.

    Args:
        memory: what earlier starts have read.
        cancelled: set it to stop within one block.
        unchanged_since_ns: a file that changed later may not be what the engine loaded;
            nanoseconds since the epoch. None: not checked. The hub's cache is exempt: the
            engine itself may have just filled it, and its files are never rewritten.
    """

    def __init__(
        self,
        memory: DigestMemory,
        cancelled: threading.Event,
        unchanged_since_ns: int | None = None,
    ) -> None:
        self._memory = memory
        self._cancelled = cancelled
        self._unchanged_since_ns = unchanged_since_ns
        self._buffer = bytearray(0)
        self.bytes_read = 0
        """Over all files; what was remembered or named by its content is not read."""

    def digest(self, path: Path) -> tuple[int, str]:
        """``(size in bytes, 64 hexadecimal digits)``.

        Raises:
            Cancelled: on request.
            Unreadable: no plain file, changed since the engine started, or changing still.
            OSError: it cannot be read.
        """
        blob = hub_blob(path)
        if blob is not None and _SHA256.fullmatch(blob.name):
            return blob.stat().st_size, blob.name
        if blob is None:
            self._check_age(path.lstat().st_ctime_ns, path)  # a link may be pointed elsewhere
        real = blob or Path(os.path.realpath(path))
        for _ in range(ATTEMPTS):
            key = _key(real)
            if blob is None:
                self._check_age(key.changed_ns, path)
            known = self._memory.get(key)
            if known is not None:
                return key.size, known
            read_at = time.time_ns()
            found = self._read(real)
            if _key(real) == key:
                if key.changed_ns < read_at - SETTLED_NS:
                    self._memory.put(key, found)
                    self._memory.save()
                return key.size, found
        raise Unreadable(f"{path} keeps changing while it is read")

    def check_root(self, root: Path) -> None:
        """Refuse a folder that was put in the place of another since the engine started.

        Raises:
            Unreadable: it, or the link that leads to it, changed.
        """
        real = Path(os.path.realpath(root))
        if real.parent.name == "snapshots" and (real.parent.parent / "blobs").is_dir():
            return
        for status in (root.lstat(), real.stat()):
            self._check_age(max(status.st_mtime_ns, status.st_ctime_ns), root)

    def _check_age(self, changed_ns: int, path: Path) -> None:
        if self._unchanged_since_ns is not None and changed_ns > self._unchanged_since_ns:
            raise Unreadable(f"{path} changed after this engine started")

    def _read(self, path: Path) -> str:
        if not self._buffer:
            self._buffer = bytearray(BLOCK_BYTES)
        hasher = hashlib.sha256()
        view = memoryview(self._buffer)
        # Not to wait for the other end if a pipe took the file's place.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Unreadable(f"{path} is not a plain file")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while True:
                if self._cancelled.is_set():
                    raise Cancelled
                count = file.readinto(view)
                if not count:
                    return hasher.hexdigest()
                hasher.update(view[:count])
                self.bytes_read += count


def hub_blob(path: Path) -> Path | None:
    """The file behind an entry of a hub snapshot; None for any other path.

    A snapshot's entry is a link into ``blobs`` of the same repository, whose files are never
    rewritten. Large ones are named by their SHA-256; names of 40 digits are git's and say
    nothing about the content by themselves.
    """
    if not path.is_symlink():
        return None
    real = Path(os.path.realpath(path))
    snapshots = real.parent.parent / "snapshots"
    folder = Path(os.path.realpath(path.parent))
    return real if real.parent.name == "blobs" and folder.is_relative_to(snapshots) else None


def _key(path: Path) -> FileKey:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unreadable(f"{path} is not a plain file")
    return FileKey.of(str(path), status)


def process_start_ns() -> int | None:
    """When this process started, nanoseconds since the epoch; None where unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # the 22nd field; two precede the closing parenthesis
        since_boot_ns = ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
        return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME) + since_boot_ns
    except (OSError, ValueError, IndexError, AttributeError):
        return None
