# SPDX-License-Identifier: Apache-2.0
"""Every call to a file system that the disk tier makes.

Tests put another `Files` in its place: to let a call fail, or to see which thread makes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

StrPath = str | os.PathLike[str]


class Entry(Protocol):
    """What is used of a directory's entry; its other members would be calls of their own."""

    @property
    def name(self) -> str: ...


class Entries(AbstractContextManager["Entries"], Protocol):
    """Entries of one directory, fetched as they are asked for."""

    def __iter__(self) -> Entries: ...
    def __next__(self) -> Entry: ...
    def close(self) -> None: ...


class Files:
    """Thin methods over `os`. Each may raise OSError; descriptors are closed on exec."""

    def open(
        self, name: StrPath, flags: int, mode: int = 0o600, *, dir_fd: int | None = None
    ) -> int:
        return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def stat(self, name: StrPath, *, dir_fd: int | None = None) -> os.stat_result:
        """Of the name itself: a link is not followed."""
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def rename(
        self,
        src: StrPath,
        dst: StrPath,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        """Puts `src` in the place of `dst` at once."""
        os.rename(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    def unlink(self, name: StrPath, *, dir_fd: int | None = None) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def rmdir(self, name: StrPath, *, dir_fd: int | None = None) -> None:
        os.rmdir(name, dir_fd=dir_fd)

    def mkdir(self, name: StrPath, mode: int = 0o700, *, dir_fd: int | None = None) -> None:
        os.mkdir(name, mode, dir_fd=dir_fd)

    def scandir(self, fd: int) -> Entries:
        """Reads from a copy of `fd`, at the position that both share."""
        return os.scandir(fd)

    def utime(self, target: int | StrPath, ns: int, *, dir_fd: int | None = None) -> None:
        """Sets both times, in nanoseconds since the epoch, of a descriptor or a name."""
        if isinstance(target, int):
            os.utime(target, ns=(ns, ns))
            return
        os.utime(target, ns=(ns, ns), dir_fd=dir_fd, follow_symlinks=False)

    def statvfs(self, fd: int) -> os.statvfs_result:
        return os.statvfs(fd)

    def fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
        """Does nothing on systems without it."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, offset, length, advice)
