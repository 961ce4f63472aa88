# SPDX-License-Identifier: Apache-2.0
"""One rank's files: written, read and removed, by any number of threads and processes.

A file appears whole, by a rename, or not at all. It is not forced to the device: after a crash of
the machine it may be missing or damaged, and what is damaged is found by its checksums.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from vllm_tiered_kv.tiers.disk.direct import O_DIRECT, IoMode, aligned_buffer, is_aligned
from vllm_tiered_kv.tiers.disk.failures import (
    FOREIGN,
    GONE,
    FailureReason,
    Occupied,
    reason_of,
)
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.folders import OpenFolders
from vllm_tiered_kv.tiers.disk.format import (
    HEADER_BYTES,
    MAX_COUNT,
    ChunkFacts,
    ChunkId,
    Reason,
    check_header,
    check_payload,
    checksum,
    encode_header,
    file_bytes,
    padded,
)
from vllm_tiered_kv.tiers.disk.names import (
    TEMP_FOLDER,
    chunk_file,
    shard_folder,
    temp_file,
    valid_namespace,
    valid_rank,
)
from vllm_tiered_kv.tiers.disk.results import Read, ReadStatus, WriteStatus, Written
from vllm_tiered_kv.tiers.disk.transfer import transfer

__all__ = ["RankFolder", "Read", "ReadStatus", "WriteStatus", "Written"]

_ATTEMPTS = 2
_NOT_LINK_NOR_PIPE = os.O_NOFOLLOW | os.O_NONBLOCK

_T = TypeVar("_T")


class _Place(msgspec.Struct, frozen=True):
    """Where a file is, below the rank's folder."""

    chunk: ChunkId
    shard: str
    name: str


class RankFolder:
    """The files of one rank in one namespace. Thread-safe; no method raises OSError.

    Nothing is opened or made before it is needed. At most 258 file descriptors stay open, and one
    for each call under way.

    Args:
        root: the tier's folder; made if need be. It may be a link; nothing below it may.
        namespace: 1 to 128 digits, lower-case letters and hyphens.
        mode: what `direct.probe` said of the folder.
        clock: seconds, monotonic.

    Raises:
        ValueError: there can't be such a namespace or rank.
    """

    def __init__(
        self,
        root: Path,
        namespace: str,
        rank: int,
        *,
        files: Files,
        mode: IoMode,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not valid_namespace(namespace) or not valid_rank(rank):
            raise ValueError(f"There is no folder for rank {rank} of namespace {namespace!r}.")
        self.root = root
        self.namespace = namespace
        self.rank = rank
        self.mode = mode
        """Buffered from the moment that direct I/O is refused: another file system may be there."""
        self._clock = clock
        self._files = files
        self._lock = threading.Lock()
        self._folders: OpenFolders | None = None
        self._headers = threading.local()

    def write(
        self, key: bytes, group: int, view: memoryview, nbytes: int, facts: ChunkFacts, used_ns: int
    ) -> Written:
        """Keeps a payload, unless a file of its size is there already.

        Args:
            key: 1 to 96 bytes.
            view: bytes that can be written, `padded(nbytes)` of them; those beyond `nbytes` are
                set to zero. Nobody may change them meanwhile: the file would be damaged.
            nbytes: length of the payload.
            used_ns: when the chunk was last used, nanoseconds since the epoch: the file's time.
        """
        place = self._place(key, group)
        if place is None:
            return _not_written(FailureReason.NAME)
        if not _fits(view, nbytes):
            return _not_written(FailureReason.INVALID)
        return self._attempt(
            lambda folders: self._write(folders, place, view, nbytes, facts, used_ns),
            _not_written,
        )

    def read(self, key: bytes, group: int, into: memoryview, nbytes: int) -> Read:
        """Fetches a payload; a file that is not what was written is removed.

        Args:
            into: room for `padded(nbytes)` bytes. Holds anything unless the answer is `OK`.
            nbytes: length of the payload.
        """
        place = self._place(key, group)
        if place is None:
            return _not_read(FailureReason.NAME)
        if not _fits(into, nbytes):
            return _not_read(FailureReason.INVALID)
        return self._attempt(lambda folders: self._read(folders, place, into, nbytes), _not_read)

    def remove(self, key: bytes, group: int) -> bool:
        """Whether there was a file, and it is gone."""
        place = self._place(key, group)
        if place is None:
            return False
        return self._attempt(lambda folders: self._remove(folders, place), lambda _: False)

    def close(self) -> None:
        """Lets go of the folders, once no call is under way; another call opens them again."""
        self._forget(self._folders)

    def _place(self, key: bytes, group: int) -> _Place | None:
        name = chunk_file(key, group)
        if name is None:
            return None
        chunk = ChunkId(self.namespace, self.rank, key, group)
        return _Place(chunk, shard_folder(key), name)

    def _attempt(
        self, call: Callable[[OpenFolders], _T], failed: Callable[[FailureReason], _T]
    ) -> _T:
        """A second time: with folders opened anew if they may be gone, or without `O_DIRECT`."""
        reason = FailureReason.OTHER
        for _ in range(_ATTEMPTS):
            folders = self._acquire()
            try:
                return call(folders)
            except OSError as error:
                reason = reason_of(error)
                if error.errno == errno.EINVAL and self.mode is IoMode.DIRECT:
                    self.mode = IoMode.BUFFERED
                elif error.errno in GONE:
                    self._forget(folders)
                else:
                    if reason is FailureReason.DESCRIPTORS:
                        self._forget(folders)  # others may need those more
                    break
            finally:
                folders.release()
        return failed(reason)

    def _acquire(self) -> OpenFolders:
        with self._lock:
            folders = self._folders
            if folders is None or not folders.acquire():
                folders = OpenFolders(
                    self._files, self.root, self.namespace, self.rank, self._clock
                )
                folders.acquire()
                self._folders = folders
            return folders

    def _forget(self, folders: OpenFolders | None) -> None:
        with self._lock:
            if self._folders is folders:
                self._folders = None
        if folders is not None:
            folders.retire()

    def _write(
        self,
        folders: OpenFolders,
        place: _Place,
        view: memoryview,
        nbytes: int,
        facts: ChunkFacts,
        used_ns: int,
    ) -> Written:
        used_ns = min(max(used_ns, 0), MAX_COUNT)
        shard = _shard(folders, place, make=True)
        size = file_bytes(nbytes)
        if self._exists(shard, place.name, size):
            with contextlib.suppress(OSError):
                self._files.utime(place.name, used_ns, dir_fd=shard)
            return Written(WriteStatus.EXISTED, size)
        view[nbytes:] = bytes(view.nbytes - nbytes)
        encoded = encode_header(place.chunk, nbytes, checksum(view), facts)
        if encoded is None:
            return _not_written(FailureReason.INVALID)
        header = self._header()
        header[:] = encoded
        temp_folder = folders.get(TEMP_FOLDER, make=True)
        temp = temp_file(secrets.token_hex(12))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | self._direct(view)
        fd = self._files.open(temp, flags, dir_fd=temp_folder)
        try:
            try:
                if not transfer(self._files.pwritev, fd, [header, view]):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                with contextlib.suppress(OSError):
                    self._files.utime(fd, used_ns)
            finally:
                # Before the rename: some file systems report a failed write only here.
                self._files.close(fd)
            self._rename(temp, place.name, temp_folder, shard)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.unlink(temp, dir_fd=temp_folder)
            raise
        return Written(WriteStatus.WRITTEN, size)

    def _open(self, shard: int, name: str, flags: int) -> int:
        try:
            return self._files.open(name, flags, dir_fd=shard)
        except OSError as error:
            if error.errno == errno.EINVAL and not self._is_plain(shard, name):
                raise Occupied(*error.args) from None  # the thing has no direct I/O, files may
            raise _of_one_chunk(error) from None

    def _is_plain(self, shard: int, name: str) -> bool:
        return stat.S_ISREG(self._files.stat(name, dir_fd=shard).st_mode)

    def _rename(self, temp: str, name: str, temp_folder: int, shard: int) -> None:
        try:
            self._files.rename(temp, name, src_dir_fd=temp_folder, dst_dir_fd=shard)
        except OSError as error:
            raise _of_one_chunk(error) from None

    def _exists(self, shard: int, name: str, size: int) -> bool:
        try:
            status = self._files.stat(name, dir_fd=shard)
        except FileNotFoundError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size

    def _read(self, folders: OpenFolders, place: _Place, into: memoryview, nbytes: int) -> Read:
        flags = os.O_RDONLY | _NOT_LINK_NOR_PIPE | self._direct(into)
        try:
            fd = self._open(_shard(folders, place), place.name, flags)
        except FileNotFoundError:
            if folders.stale(place.shard):
                raise
            return Read(ReadStatus.MISSING)
        except Occupied:
            return Read(ReadStatus.MISSING)
        try:
            status = self._files.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Read(ReadStatus.MISSING)
            found = self._fetch(fd, status, place, into, nbytes)
            if isinstance(found, Reason):
                # While it is open, no other file can get its number.
                self._remove_damaged(folders, place, status)
                return Read(ReadStatus.DAMAGED, found)
            with contextlib.suppress(OSError):
                self._files.utime(fd, time.time_ns())
            return Read(ReadStatus.OK, None, found, status.st_size)
        finally:
            with contextlib.suppress(OSError):
                self._files.close(fd)

    def _fetch(
        self, fd: int, status: os.stat_result, place: _Place, into: memoryview, nbytes: int
    ) -> ChunkFacts | Reason:
        if status.st_size != file_bytes(nbytes):
            return Reason.SIZE
        header = self._header()
        if not transfer(self._files.preadv, fd, [header, into]):
            return Reason.SHORT
        found = check_header(header, place.chunk, nbytes)
        if isinstance(found, Reason):
            return found
        return check_payload(into, nbytes, found) or found.facts

    def _remove_damaged(self, folders: OpenFolders, place: _Place, damaged: os.stat_result) -> None:
        """Only the file that was read: what has taken its place since may be good.

        It is moved aside before it is looked at, so that nothing can take its place in between.
        """
        files = self._files
        aside = temp_file(secrets.token_hex(12))
        with contextlib.suppress(OSError):
            shard = folders.get(place.shard)
            temp_folder = folders.get(TEMP_FOLDER, make=True)
            files.rename(place.name, aside, src_dir_fd=shard, dst_dir_fd=temp_folder)
            try:
                moved = files.stat(aside, dir_fd=temp_folder)
                same = (moved.st_dev, moved.st_ino) == (damaged.st_dev, damaged.st_ino)
            except OSError:
                same = False
            if same:
                files.unlink(aside, dir_fd=temp_folder)
            else:
                files.rename(aside, place.name, src_dir_fd=temp_folder, dst_dir_fd=shard)

    def _remove(self, folders: OpenFolders, place: _Place) -> bool:
        try:
            self._files.unlink(place.name, dir_fd=folders.get(place.shard))
        except FileNotFoundError:
            if folders.stale(place.shard):
                raise
            return False
        return True

    def _direct(self, view: memoryview) -> int:
        return O_DIRECT if self.mode is IoMode.DIRECT and is_aligned(view) else 0

    def _header(self) -> memoryview:
        """This thread's own."""
        header: memoryview | None = getattr(self._headers, "view", None)
        if header is None:
            header = self._headers.view = aligned_buffer(HEADER_BYTES)
        return header


def _shard(folders: OpenFolders, place: _Place, *, make: bool = False) -> int:
    """The open folder of a chunk's file."""
    folders.get_rank(make=make)  # what stands in its place is not of one chunk
    try:
        return folders.get(place.shard, make=make)
    except OSError as error:
        raise _of_one_chunk(error) from None


def _of_one_chunk(error: OSError) -> OSError:
    return Occupied(*error.args) if error.errno in FOREIGN else error


def _fits(view: memoryview, nbytes: int) -> bool:
    plain = view.format == "B" and view.ndim == 1 and view.contiguous and not view.readonly
    return plain and nbytes > 0 and view.nbytes == padded(nbytes)


def _not_written(reason: FailureReason) -> Written:
    return Written(WriteStatus.FAILED, reason=reason)


def _not_read(reason: FailureReason) -> Read:
    return Read(ReadStatus.FAILED, reason)
