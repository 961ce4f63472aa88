# SPDX-License-Identifier: Apache-2.0
"""Each call of a file system fails, in turn, in each way: a miss at worst, and nothing is left."""

from __future__ import annotations

import errno
import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.unit.disk._files import (
    KEY,
    NAMESPACE,
    NBYTES,
    WatchedFiles,
    mode_of,
    open_descriptors,
    path_of,
    payload_of,
    rank_folder,
    read,
    temp_files,
    write,
)
from vllm_tiered_kv.tiers.disk.direct import IoMode, probe
from vllm_tiered_kv.tiers.disk.entries import NEVER
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.identity_file import write_identity
from vllm_tiered_kv.tiers.disk.scan import (
    remove_vacant,
    scan_root,
)
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus, WriteStatus

CODES = (
    *(errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS),
    *(errno.ESTALE, errno.ENOENT, errno.ENOTDIR),
)


def one(number: int, code: int) -> Callable[[int, str], int | None]:
    """The call of this number fails."""
    return lambda n, name: code if n == number else None


def every(name: str, code: int) -> Callable[[int, str], int | None]:
    """All calls of this name fail."""
    return lambda n, called: code if called == name else None


def damage(root: Path) -> None:
    content = bytearray(path_of(root).read_bytes())
    content[5000] ^= 1
    path_of(root).write_bytes(content)


class Case:
    """A store as it was before, and one call on it."""

    def __init__(
        self, prepare: Callable[[Path], object], call: Callable[[RankFolder], object]
    ) -> None:
        self.prepare = prepare
        self.call = call

    def run(self, root: Path, files: WatchedFiles) -> object:
        """Removes `root` first. Descriptors are counted, but for those that stay open."""
        shutil.rmtree(root, ignore_errors=True)
        self.prepare(root)
        before = open_descriptors()
        folder = rank_folder(root, files=files)
        result = self.call(folder)
        folder.close()
        assert open_descriptors() == before
        return result

    def calls(self, root: Path) -> list[str]:
        files = WatchedFiles()
        self.run(root, files)
        return files.names


def kept(root: Path) -> None:
    folder = rank_folder(root)
    assert write(folder).status is WriteStatus.WRITTEN
    folder.close()


def kept_and_damaged(root: Path) -> None:
    kept(root)
    damage(root)


def status_of_write(folder: RankFolder) -> WriteStatus:
    return write(folder).status


def status_of_read(folder: RankFolder) -> ReadStatus:
    return read(folder)[0].status


def usable(root: Path) -> bool:
    """Once the fault has passed, a chunk can be written, and read if it is there."""
    folder = rank_folder(root)
    write(folder)
    result, payload = read(folder)
    if result.status is not ReadStatus.OK:
        write(folder)
        result, payload = read(folder)
    folder.close()
    return result.status is ReadStatus.OK and payload == payload_of(KEY)


WRITE = Case(lambda root: None, status_of_write)
WRITE_AGAIN = Case(kept, status_of_write)
READ = Case(kept, status_of_read)
READ_DAMAGED = Case(kept_and_damaged, status_of_read)
REMOVE = Case(kept, lambda folder: folder.remove(KEY, 0))


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_write_is_whole_or_leaves_nothing(tmp_path: Path, code: int) -> None:
    root = tmp_path / "root"
    for number, name in enumerate(WRITE.calls(root)):
        status = WRITE.run(root, WatchedFiles(one(number, code)))
        assert status in (WriteStatus.WRITTEN, WriteStatus.FAILED), (number, name)
        assert path_of(root).exists() == (status is WriteStatus.WRITTEN), (number, name)
        assert temp_files(root) == [], (number, name)
        assert usable(root)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_write_of_what_is_there_leaves_it(tmp_path: Path, code: int) -> None:
    root = tmp_path / "root"
    for number, _ in enumerate(WRITE_AGAIN.calls(root)):
        WRITE_AGAIN.run(root, WatchedFiles(one(number, code)))
        folder = rank_folder(root)
        assert read(folder)[0].status is ReadStatus.OK
        folder.close()
        assert temp_files(root) == []


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_read_that_fails_removes_nothing(tmp_path: Path, code: int) -> None:
    root = tmp_path / "root"
    for number, name in enumerate(READ.calls(root)):
        status = READ.run(root, WatchedFiles(one(number, code)))
        assert status in (ReadStatus.OK, ReadStatus.FAILED, ReadStatus.MISSING), (number, name)
        if status is ReadStatus.MISSING:
            assert code in (errno.ENOENT, errno.ENOTDIR), (number, name)
        assert path_of(root).exists(), (number, name)
        assert usable(root)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_damaged_file_is_never_accepted(tmp_path: Path, code: int) -> None:
    root = tmp_path / "root"
    for number, name in enumerate(READ_DAMAGED.calls(root)):
        status = READ_DAMAGED.run(root, WatchedFiles(one(number, code)))
        assert status is not ReadStatus.OK, (number, name)
        assert usable(root)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_a_removal_says_what_became_of_the_file(tmp_path: Path, code: int) -> None:
    root = tmp_path / "root"
    for number, _ in enumerate(REMOVE.calls(root)):
        removed = REMOVE.run(root, WatchedFiles(one(number, code)))
        assert path_of(root).exists() != removed


@pytest.mark.parametrize("case", [WRITE, WRITE_AGAIN, READ, READ_DAMAGED, REMOVE])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOENT, errno.ESTALE], ids=errno.errorcode.get)
def test_a_fault_that_lasts_ends(tmp_path: Path, case: Case, code: int) -> None:
    for name in {*case.calls(tmp_path / "root"), "unlink", "stat", "mkdir"}:
        files = WatchedFiles(every(name, code))
        case.run(tmp_path / "root", files)
        assert len(files.calls) < 60
        assert usable(tmp_path / "root")


@pytest.mark.parametrize(
    ("name", "code", "reason"),
    [
        ("open", errno.ENOSPC, FailureReason.NO_SPACE),
        ("pwritev", errno.ENOSPC, FailureReason.NO_SPACE),
        ("rename", errno.ENOSPC, FailureReason.NO_SPACE),
        ("close", errno.EDQUOT, FailureReason.NO_SPACE),
        ("pwritev", errno.EIO, FailureReason.IO),
        ("rename", errno.ESTALE, FailureReason.IO),
        ("open", errno.EROFS, FailureReason.READ_ONLY),
        ("rename", errno.EACCES, FailureReason.PERMISSION),
        ("rename", errno.ENOENT, FailureReason.GONE),
        ("open", errno.EMFILE, FailureReason.DESCRIPTORS),
        ("open", errno.ENAMETOOLONG, FailureReason.NAME),
        ("rename", errno.EISDIR, FailureReason.OCCUPIED),
        ("pwritev", errno.EINVAL, FailureReason.OTHER),
    ],
)
def test_the_reason_of_a_failed_write_is_told(
    tmp_path: Path, name: str, code: int, reason: FailureReason
) -> None:
    files = WatchedFiles()
    folder = rank_folder(tmp_path, files=files)
    write(folder, KEY[:1] + b"opens the folders")
    files.fault = every(name, code)
    written = write(folder)
    assert (written.status, written.reason) == (WriteStatus.FAILED, reason)


class ShortFiles(WatchedFiles):
    """Moves at most `most` bytes a call."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, _first(buffers, self._most), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, _first(buffers, self._most), offset)


def _first(buffers: Sequence[memoryview], most: int) -> list[memoryview]:
    parts = []
    for buffer in buffers:
        parts.append(buffer[:most])
        most = max(0, most - len(parts[-1]))
    return [part for part in parts if part]


@pytest.mark.parametrize(
    ("mode", "most"),
    [
        *itertools.product(IoMode, (4096, 8192, 12288)),
        *itertools.product([IoMode.BUFFERED], (5000, 9999)),
    ],
)
def test_short_reads_and_writes_go_on(tmp_path: Path, most: int, mode: IoMode) -> None:
    if mode is IoMode.DIRECT and mode_of(tmp_path) is not mode:
        pytest.skip("no O_DIRECT here")
    folder = rank_folder(tmp_path, files=ShortFiles(most), mode=mode)
    assert write(folder).status is WriteStatus.WRITTEN
    assert path_of(tmp_path).stat().st_size == file_bytes(NBYTES)
    result, payload = read(folder)
    assert (result.status, payload) == (ReadStatus.OK, payload_of(KEY))


@pytest.mark.parametrize("most", [0, 100])
def test_a_file_that_cannot_be_written_on_is_given_up(tmp_path: Path, most: int) -> None:
    """Less than a multiple of the alignment gets no further with `O_DIRECT`."""
    folder = rank_folder(tmp_path, files=ShortFiles(most))
    written = write(folder)
    assert (written.status, written.reason) == (WriteStatus.FAILED, FailureReason.IO)
    assert temp_files(tmp_path) == []


def test_a_file_that_ends_early_is_damaged(tmp_path: Path) -> None:
    """It got shorter after its size was read."""

    class Shrinking(Files):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            with path_of(tmp_path).open("r+b") as file:
                file.truncate(8192)
            return super().preadv(fd, buffers, offset)

    kept(tmp_path)
    assert read(rank_folder(tmp_path, files=Shrinking()))[0].status is ReadStatus.DAMAGED
    assert not path_of(tmp_path).exists()
    assert usable(tmp_path)


# What is not a call on a chunk


def everything(root: Path, files: Files) -> None:
    """Calls that say nothing of a failure but by what they did."""
    probe(files, root, NAMESPACE, 0)
    write_identity(files, root, NAMESPACE, {"model": "tiny"})
    list(scan_root(files, root))
    path_of(root).unlink(missing_ok=True)
    list(scan_root(files, root, lambda _: True))
    remove_vacant(files, root, NAMESPACE, NEVER)


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
def test_scans_sweeps_and_probes_survive_any_fault(tmp_path: Path, code: int) -> None:
    files = WatchedFiles()
    kept(tmp_path)
    everything(tmp_path, files)
    assert list(tmp_path.iterdir()) == []
    before = open_descriptors()
    for number in range(len(files.calls)):
        kept(tmp_path)
        everything(tmp_path, WatchedFiles(one(number, code)))
        assert open_descriptors() == before, (number, files.names[number])
        everything(tmp_path, Files())
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["open", "pwritev", "preadv", "close", "unlink"])
def test_where_a_probe_fails_files_are_buffered(tmp_path: Path, name: str) -> None:
    files = WatchedFiles(every(name, errno.EINVAL))
    mode = probe(files, tmp_path, NAMESPACE, 0)
    if name in ("open", "pwritev", "preadv"):
        assert mode is IoMode.BUFFERED
    else:
        assert mode in IoMode


def test_a_probe_that_reads_something_else_is_buffered(tmp_path: Path) -> None:
    class Wrong(Files):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            count = super().preadv(fd, buffers, offset)
            buffers[0][0] ^= 1
            return count

    assert probe(Wrong(), tmp_path, NAMESPACE, 0) is IoMode.BUFFERED
    assert temp_files(tmp_path) == []
