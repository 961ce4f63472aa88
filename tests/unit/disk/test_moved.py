# SPDX-License-Identifier: Apache-2.0
"""Folders that are moved, or mounted over, while they are open."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.unit.disk import _files
from tests.unit.disk._files import (
    KEY,
    NAMESPACE,
    WatchedFiles,
    open_descriptors,
    path_of,
    rank_folder,
    read,
    temp_files,
    write,
)
from vllm_tiered_kv.tiers.disk.direct import O_DIRECT, IoMode
from vllm_tiered_kv.tiers.disk.files import Files, StrPath
from vllm_tiered_kv.tiers.disk.folders import CHECK_EVERY
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus, WriteStatus

OTHER = b"other key"
LEVELS = [NAMESPACE, f"{NAMESPACE}/r0", f"{NAMESPACE}/r0/00", f"{NAMESPACE}/r0/tmp"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("level", ["", *LEVELS])
@pytest.mark.parametrize("instead", ["nothing", "a folder", "a copy"])
def test_a_folder_that_was_moved_is_not_followed(tmp_path: Path, level: str, instead: str) -> None:
    root, clock = tmp_path / "root", Clock()
    folder = RankFolder(root, NAMESPACE, 0, files=Files(), mode=IoMode.BUFFERED, clock=clock)
    _files.opened.append(folder)
    write(folder)
    moved = (root / level).rename(tmp_path / "moved")
    if instead == "a folder":
        (root / level).mkdir(0o700)
    elif instead == "a copy":
        shutil.copytree(moved, root / level)
    before = sorted(moved.rglob("*"))
    clock.now += CHECK_EVERY
    found = read(folder)[0].status
    there = level.endswith("tmp") or instead == "a copy"
    assert found is (ReadStatus.OK if there else ReadStatus.MISSING)
    assert write(folder, KEY[:1] + OTHER).status is WriteStatus.WRITTEN
    assert path_of(root, KEY[:1] + OTHER).exists()
    assert sorted(moved.rglob("*")) == before


def test_folders_are_looked_at_anew_seldom(tmp_path: Path) -> None:
    clock, files = Clock(), WatchedFiles()
    folder = RankFolder(tmp_path, NAMESPACE, 0, files=files, mode=IoMode.BUFFERED, clock=clock)
    _files.opened.append(folder)
    write(folder)
    clock.now += CHECK_EVERY
    files.calls.clear()
    read(folder)
    assert files.names.count("open") == 3  # the root, the namespace, the chunk
    files.calls.clear()
    read(folder)
    assert files.names == ["open", "fstat", "preadv", "utime", "close"]
    folder.close()


def test_what_moved_folders_held_is_closed(tmp_path: Path) -> None:
    before, clock = open_descriptors(), Clock()
    folder = RankFolder(
        tmp_path / "root", NAMESPACE, 0, files=Files(), mode=IoMode.BUFFERED, clock=clock
    )
    for i in range(5):
        write(folder)
        (tmp_path / "root").rename(tmp_path / str(i))
        clock.now += CHECK_EVERY
    folder.close()
    assert open_descriptors() == before


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_where_direct_io_is_refused_the_page_cache_takes_over(tmp_path: Path, call: str) -> None:
    """As where another file system has been mounted since it was probed."""

    class Picky(Files):
        def __init__(self) -> None:
            self.direct: set[int] = set()

        def _refuse(self, refuses: bool) -> None:
            if refuses:
                raise OSError(errno.EINVAL, "no direct I/O")

        def open(
            self, name: StrPath, flags: int, mode: int = 0o600, *, dir_fd: int | None = None
        ) -> int:
            self._refuse(call == "open" and bool(flags & O_DIRECT))
            fd = super().open(name, flags & ~O_DIRECT, mode, dir_fd=dir_fd)
            (self.direct.add if flags & O_DIRECT else self.direct.discard)(fd)
            return fd

        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self._refuse(call == "pwritev" and fd in self.direct)
            return super().pwritev(fd, buffers, offset)

        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            self._refuse(call == "preadv" and fd in self.direct)
            return super().preadv(fd, buffers, offset)

    folder = rank_folder(tmp_path, files=Picky(), mode=IoMode.DIRECT)
    assert write(folder).status is WriteStatus.WRITTEN
    assert read(folder)[0].status is ReadStatus.OK
    assert folder.mode is IoMode.BUFFERED
    assert not temp_files(tmp_path)
