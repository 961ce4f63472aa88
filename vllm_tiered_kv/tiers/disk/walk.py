# SPDX-License-Identifier: Apache-2.0
"""The walk over the tier's folder: what is there, in typed items. Opens folders, never a file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from vllm_tiered_kv.tiers.disk.failures import FailureReason, reason_of
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import open_folder, open_root
from vllm_tiered_kv.tiers.disk.names import (
    IDENTITY_FILE,
    TEMP_FOLDER,
    is_shard_folder,
    is_temp_file,
    parse_chunk_file,
    parse_mark_file,
    parse_rank_folder,
    rank_folder,
    shard_folder,
    valid_namespace,
)


class Found(msgspec.Struct, frozen=True):
    """A file that is named as a chunk's part. Its content was not looked at."""

    namespace: str
    rank: int
    key: bytes
    group: int
    size: int
    """Bytes of the file."""
    mtime_ns: int
    """When it was last used."""


class FoundTemp(msgspec.Struct, frozen=True):
    """A file that is being written, or that a process which ended left behind."""

    namespace: str
    rank: int | None
    """None for a temporary file of the namespace itself."""
    name: str
    size: int
    changed_ns: int
    """When anything about it last changed; unlike the time of use, nobody can set it."""


class FoundIdentity(msgspec.Struct, frozen=True):
    """The file that says what a namespace is."""

    namespace: str
    size: int


class FoundMark(msgspec.Struct, frozen=True):
    """The file that says what of a namespace is being removed; see `marks`."""

    namespace: str


class FolderMade(msgspec.Struct, frozen=True):
    """A folder that is named as ours are, told before what is in it."""

    namespace: str
    rank: int | None
    """None for the namespace's folder."""
    name: str = ""
    """Of a folder in the rank's."""


class Foreign(msgspec.Struct, frozen=True):
    """Something that we didn't make, such as a link. What is in it was not looked at."""

    path: str
    """Below the root; may hold what is no valid Unicode."""


class Unreadable(msgspec.Struct, frozen=True):
    """Something whose content or size can't be told now; `path` is "" for the root."""

    path: str
    reason: FailureReason


Item = Found | FoundTemp | FoundIdentity | FoundMark | FolderMade | Foreign | Unreadable


class Step(msgspec.Struct, frozen=True):
    item: Item
    folder: int
    """The open folder it is in, until the next step."""
    name: str


class Left(msgspec.Struct, frozen=True):
    """All that is in a folder of ours was told."""

    folder: int
    """The open folder it is in, until the next step."""
    name: str


Steps = Generator[Step | Left, None, None]


class Walk:
    """Depth first, as it is asked for: at most four folders are open.

    What vanishes or appears meanwhile may be told or not. Never raises OSError.
    """

    def __init__(self, files: Files) -> None:
        self._files = files

    def root(self, root: Path) -> Steps:
        try:
            top = open_root(self._files, root)
        except FileNotFoundError:
            return
        except OSError as error:
            yield Step(Unreadable("", reason_of(error)), -1, "")
            return

        def inside(top: int, name: str) -> Steps:
            return self.namespace(top, name) if valid_namespace(name) else _foreign(top, "", name)

        try:
            yield from self._entries(top, "", inside)
        finally:
            self._close(top)

    def namespace(self, top: int, namespace: str) -> Steps:
        def inside(folder: int, name: str) -> Steps:
            rank = parse_rank_folder(name)
            if rank is not None:
                return self._rank(folder, namespace, rank)
            if is_temp_file(name):
                return self._temp(folder, namespace, namespace, None, name)
            if name == IDENTITY_FILE:
                return self._identity(folder, namespace)
            if parse_mark_file(name) is not None:
                return self._file(folder, namespace, name, lambda _: FoundMark(namespace))
            return _foreign(folder, namespace, name)

        return self._folder(top, "", namespace, inside, FolderMade(namespace, None))

    def _rank(self, folder: int, namespace: str, rank: int) -> Steps:
        path = f"{namespace}/{rank_folder(rank)}"

        def inside(folder: int, name: str) -> Steps:
            if name == TEMP_FOLDER:
                return self._folder(folder, path, name, temp, FolderMade(namespace, rank, name))
            if not is_shard_folder(name):
                return _foreign(folder, path, name)
            shard = f"{path}/{name}"
            return self._folder(
                folder,
                path,
                name,
                lambda fd, file: self._chunk(fd, shard, namespace, rank, file),
                FolderMade(namespace, rank, name),
            )

        def temp(folder: int, name: str) -> Steps:
            return self._temp(folder, f"{path}/{TEMP_FOLDER}", namespace, rank, name)

        return self._folder(
            folder, namespace, rank_folder(rank), inside, FolderMade(namespace, rank)
        )

    def _chunk(self, folder: int, path: str, namespace: str, rank: int, name: str) -> Steps:
        chunk = parse_chunk_file(name)
        if chunk is None or shard_folder(chunk.key) != path[-2:]:
            return _foreign(folder, path, name)
        return self._file(
            folder,
            path,
            name,
            lambda status: Found(
                namespace, rank, chunk.key, chunk.group, status.st_size, status.st_mtime_ns
            ),
        )

    def _temp(self, folder: int, path: str, namespace: str, rank: int | None, name: str) -> Steps:
        if not is_temp_file(name):
            return _foreign(folder, path, name)
        return self._file(
            folder,
            path,
            name,
            lambda status: FoundTemp(namespace, rank, name, status.st_size, status.st_ctime_ns),
        )

    def _identity(self, folder: int, namespace: str) -> Steps:
        return self._file(
            folder,
            namespace,
            IDENTITY_FILE,
            lambda status: FoundIdentity(namespace, status.st_size),
        )

    def _file(
        self, folder: int, path: str, name: str, item: Callable[[os.stat_result], Item]
    ) -> Steps:
        try:
            status = self._files.stat(name, dir_fd=folder)
        except FileNotFoundError:
            return
        except OSError as error:
            yield Step(Unreadable(f"{path}/{name}", reason_of(error)), folder, name)
            return
        if stat.S_ISREG(status.st_mode):
            yield Step(item(status), folder, name)
        else:
            yield Step(Foreign(f"{path}/{name}"), folder, name)

    def _folder(
        self,
        parent: int,
        path: str,
        name: str,
        inside: Callable[[int, str], Steps],
        item: FolderMade,
    ) -> Steps:
        here = f"{path}/{name}" if path else name
        try:
            folder = open_folder(self._files, name, parent)
        except FileNotFoundError:
            return
        except OSError as error:
            reason = reason_of(error)
            foreign = reason is FailureReason.FOREIGN
            yield Step(Foreign(here) if foreign else Unreadable(here, reason), parent, name)
            return
        try:
            yield Step(item, parent, name)
            yield from self._entries(folder, here, inside)
        finally:
            self._close(folder)
        yield Left(parent, name)

    def _entries(self, folder: int, path: str, inside: Callable[[int, str], Steps]) -> Steps:
        try:
            with self._files.scandir(folder) as entries:
                for entry in entries:
                    yield from inside(folder, entry.name)
        except OSError as error:
            yield Step(Unreadable(path, reason_of(error)), folder, "")

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._files.close(fd)


def _foreign(folder: int, path: str, name: str) -> Steps:
    yield Step(Foreign(f"{path}/{name}" if path else name), folder, name)
