# SPDX-License-Identifier: Apache-2.0
"""A rank's folders, kept open: a call needs no path, and no link below the root is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from vllm_tiered_kv.tiers.disk.files import Files, StrPath
from vllm_tiered_kv.tiers.disk.names import rank_folder

_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_RANK = ""

CHECK_EVERY = 5.0
"""Seconds after which it is seen whether a folder that is open is where it was."""


def open_folder(files: Files, name: StrPath, parent: int, *, make: bool = False) -> int:
    """A folder within an open one.

    Raises:
        OSError: ENOENT, ENOTDIR for a link or anything else that is no folder, or another.
    """
    flags = _FOLDER | os.O_NOFOLLOW
    try:
        return files.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):
        files.mkdir(name, dir_fd=parent)
    return files.open(name, flags, dir_fd=parent)


def open_root(files: Files, root: Path, *, make: bool = False) -> int:
    """The root, which may be a link, as may what leads to it.

    Raises:
        OSError: ENOENT, ENOTDIR or another.
    """
    try:
        return files.open(root, _FOLDER)
    except FileNotFoundError:
        if not make:
            raise
    _make_with_parents(files, root)
    return files.open(root, _FOLDER)


def open_path(
    files: Files,
    root: Path,
    parts: Iterable[str],
    opened: contextlib.ExitStack,
    *,
    make: bool = False,
) -> int:
    """A folder some levels below the root; it and those above it are closed with `opened`.

    Raises:
        OSError: as `open_root` and `open_folder`.
    """
    folder = open_root(files, root, make=make)
    opened.callback(close, files, folder)
    for part in parts:
        folder = open_folder(files, part, folder, make=make)
        opened.callback(close, files, folder)
    return folder


def is_open_to_others(status: os.stat_result, user: int) -> bool:
    """Whether somebody else than this user, or root, may write to a folder."""
    foreign = status.st_uid not in (0, user)
    return foreign or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def close(files: Files, fd: int) -> None:
    """Close a folder, or a file that was read; nothing hangs on its answer."""
    with contextlib.suppress(OSError):
        files.close(fd)


def _make_with_parents(files: Files, folder: Path) -> None:
    try:
        files.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make_with_parents(files, folder.parent)
        with contextlib.suppress(FileExistsError):
            files.mkdir(folder)


class OpenFolders:
    """The folders of one rank that have been used; at most 258 descriptors.

    They stay open until `retire()`, and then until the last user has released them, so that no
    thread meets a descriptor that has become another file's. Thread-safe.
    """

    def __init__(
        self,
        files: Files,
        root: Path,
        namespace: str,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._files = files
        self._root = root
        self._namespace = namespace
        self._rank = rank
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._checked: dict[str, float] = {}
        self._users = 0
        self._retired = False

    def acquire(self) -> bool:
        """Whether the folders may be used until `release()`; not after `retire()`."""
        with self._lock:
            if self._retired:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            closing = self._take_if_unused()
        self._close(closing)

    def retire(self) -> None:
        """Close them when nobody uses them. May be called again."""
        with self._lock:
            self._retired = True
            closing = self._take_if_unused()
        self._close(closing)

    def get(self, name: str, *, make: bool = False) -> int:
        """The folder of this name within the rank's; made if need be and asked for.

        Raises:
            OSError: see `open_folder`; ESTALE if one that is open is not in its place any more.
        """
        rank = self.get_rank(make=make)
        fd = self._fds.get(name)
        if fd is None:
            return self._keep(name, open_folder(self._files, name, rank, make=make))
        if self._is_due(name):
            self._check(name, fd, rank, name)
        return fd

    def stale(self, name: str) -> bool:
        """Whether this folder, or the rank's if this one is not open, was deleted.

        Raises:
            OSError: it can't be told.
        """
        fd = self._fds.get(name, self._fds.get(_RANK))
        return fd is not None and self._files.fstat(fd).st_nlink == 0

    def get_rank(self, *, make: bool = False) -> int:
        """The rank's folder; see `get`."""
        fd, name = self._fds.get(_RANK), rank_folder(self._rank)
        if fd is not None and not self._is_due(_RANK):
            return fd
        try:
            namespace = self._open_namespace(make=make and fd is None)
        except FileNotFoundError:
            if fd is None:
                raise
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from None
        try:
            if fd is None:
                return self._keep(_RANK, open_folder(self._files, name, namespace, make=make))
            self._check(_RANK, fd, namespace, name)
        finally:
            self._close([namespace])
        return fd

    def _open_namespace(self, *, make: bool) -> int:
        root = open_root(self._files, self._root, make=make)
        try:
            return open_folder(self._files, self._namespace, root, make=make)
        finally:
            self._close([root])

    def _is_due(self, name: str) -> bool:
        return self._clock() - self._checked.get(name, 0.0) >= CHECK_EVERY

    def _check(self, which: str, fd: int, parent: int, name: str) -> None:
        """Whoever has moved an open folder does not want to have it filled where it is now.

        Raises:
            OSError: ESTALE if another folder, or none, is in its place; or what `stat` raises.
        """
        try:
            there = self._files.stat(name, dir_fd=parent)
        except FileNotFoundError:
            there = None
        here = self._files.fstat(fd)
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        self._checked[which] = self._clock()

    def _keep(self, name: str, fd: int) -> int:
        """Two threads may have opened the same folder: the first one's stays."""
        with self._lock:
            kept = self._fds.setdefault(name, fd)
            self._checked.setdefault(name, self._clock())
        if kept != fd:
            self._close([fd])
        return kept

    def _take_if_unused(self) -> list[int]:
        if not self._retired or self._users:
            return []
        fds = list(self._fds.values())
        self._fds.clear()
        return fds

    def _close(self, fds: list[int]) -> None:
        for fd in fds:
            with contextlib.suppress(OSError):
                self._files.close(fd)
