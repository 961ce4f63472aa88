# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.disk._files import (
    KEY,
    NAMESPACE,
    NBYTES,
    USED_NS,
    WatchedFiles,
    open_descriptors,
    path_of,
    rank_folder,
    read,
    write,
)
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Entries, Files
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.identity_file import write_identity
from vllm_tiered_kv.tiers.disk.scan import (
    FolderMade,
    Foreign,
    Found,
    FoundIdentity,
    FoundTemp,
    Item,
    Unreadable,
    remove_vacant,
    scan_root,
)
from vllm_tiered_kv.tiers.disk.store import ReadStatus, WriteStatus

OTHER = "f" * 128
LEFT, HALF = f"{'1' * 24}.tmp", f"identity-{'2' * 24}.tmp"
FOUND = Found(NAMESPACE, 0, KEY, 0, file_bytes(NBYTES), USED_NS)


def scan(root: Path) -> list[Item]:
    return list(scan_root(Files(), root))


def make_temp(root: Path, name: str = LEFT, rank: int = 0) -> Path:
    folder = root / NAMESPACE / f"r{rank}" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(b"half")
    return path


def test_nothing_is_found_where_there_is_nothing(tmp_path: Path) -> None:
    assert scan(tmp_path) == []
    assert scan(tmp_path / "missing") == []


def test_every_file_of_every_namespace_and_rank_is_found(tmp_path: Path) -> None:
    expected: set[Item] = set()
    for namespace in (NAMESPACE, OTHER):
        expected.add(FolderMade(namespace, None))
        for rank in (0, 65535):
            expected.add(FolderMade(namespace, rank))
            expected.add(FolderMade(namespace, rank, "tmp"))
            for key in (b"a", b"b" * 96):
                expected.add(FolderMade(namespace, rank, key[:1].hex()))
                for group in (0, 65535):
                    write(rank_folder(tmp_path, namespace=namespace, rank=rank), key, group)
                    item = (namespace, rank, key, group, file_bytes(NBYTES), USED_NS)
                    expected.add(Found(*item))
    write_identity(Files(), tmp_path, NAMESPACE, {})
    size = (tmp_path / NAMESPACE / "identity.json").stat().st_size
    expected.add(FoundIdentity(NAMESPACE, size))
    items = scan(tmp_path)
    assert len(items) == len(expected)
    assert set(items) == expected


def test_a_folder_is_told_before_what_is_in_it(tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    items = scan(tmp_path)
    assert items[:2] == [FolderMade(NAMESPACE, None), FolderMade(NAMESPACE, 0)]
    assert items[items.index(FOUND) - 1] == FolderMade(NAMESPACE, 0, "00")


def test_a_file_that_is_being_written_is_told_as_such(tmp_path: Path) -> None:
    path = make_temp(tmp_path)
    (tmp_path / NAMESPACE / HALF).write_bytes(b"")
    items = [item for item in scan(tmp_path) if isinstance(item, FoundTemp)]
    assert sorted(items, key=lambda item: item.name) == [
        FoundTemp(NAMESPACE, 0, LEFT, 4, path.stat().st_ctime_ns),
        FoundTemp(NAMESPACE, None, HALF, 0, (tmp_path / NAMESPACE / HALF).stat().st_ctime_ns),
    ]


SHARD = f"{NAMESPACE}/r0/00"


@pytest.mark.parametrize(
    "path",
    [
        "File.txt",
        f"{NAMESPACE}/notes.txt",
        f"{NAMESPACE}/r0/notes.txt",
        f"{SHARD}/notes.txt",
        f"{SHARD}/ff.0.kv",  # of another shard
        f"{SHARD}/00.0.kv.tmp",
        f"{NAMESPACE}/backup.tmp",
        f"{NAMESPACE}/r0/tmp/notes.tmp",
        f"{NAMESPACE}/r0/tmp/00.0.kv",
        "namespace",  # a file where a folder should be
        f"{NAMESPACE}/r7",
        f"{NAMESPACE}/r0/ab",
    ],
)
@pytest.mark.parametrize("make", ["file", "link", "pipe"])
def test_what_is_not_ours_is_told_and_left(tmp_path: Path, path: str, make: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    write(rank_folder(root))
    write(rank_folder(outside))
    make_temp(outside)
    before = sorted(outside.rglob("*"))
    place = root / path
    if make == "file":
        place.write_bytes(b"mine")
    elif make == "link":
        place.symlink_to(outside)
    else:
        os.mkfifo(place)
    items = scan(root)
    assert [item for item in items if isinstance(item, Foreign)] == [Foreign(path)]
    assert [item for item in items if isinstance(item, Found)] == [FOUND]
    list(scan_root(Files(), root, lambda _: True))
    assert os.path.lexists(place)
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/hosts")])
@pytest.mark.parametrize("path", [f"{SHARD}/00.1.kv", f"{NAMESPACE}/r0/tmp/{LEFT}"])
def test_what_only_has_a_files_name_is_not_ours(
    tmp_path: Path, path: str, make: Callable[[Path], None]
) -> None:
    write(rank_folder(tmp_path))
    make(tmp_path / path)
    assert Foreign(path) in scan(tmp_path)


def test_a_name_that_is_no_unicode_is_foreign(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff")).mkdir()
    assert scan(tmp_path) == [Foreign(os.fsdecode(b"\xff"))]


def test_entries_that_vanish_are_passed_over(tmp_path: Path) -> None:
    """Each entry is gone when it is looked at."""

    class Vanishing(Files):
        def stat(self, name: object, *, dir_fd: int | None = None) -> os.stat_result:
            os.unlink(str(name), dir_fd=dir_fd)
            return super().stat(str(name), dir_fd=dir_fd)

    write(rank_folder(tmp_path))
    make_temp(tmp_path)
    found = list(scan_root(Vanishing(), tmp_path))
    assert all(isinstance(item, FolderMade) for item in found)


def test_a_folder_that_vanishes_is_passed_over(tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    scanning = scan_root(Files(), tmp_path)
    assert next(scanning) == FolderMade(NAMESPACE, None)
    shutil.rmtree(tmp_path / NAMESPACE)
    assert list(scanning) == []


def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    class Failing(Files):
        def scandir(self, fd: int) -> Entries:
            if os.path.samestat(os.fstat(fd), path_of(tmp_path).parent.stat()):
                raise PermissionError(13, "no")
            return super().scandir(fd)

    write(rank_folder(tmp_path))
    items = list(scan_root(Failing(), tmp_path))
    assert Unreadable(SHARD, FailureReason.PERMISSION) in items


def test_a_scan_can_stop_and_leaves_nothing_open(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path)
    for first in range(10):
        write(folder, bytes([first]) * 2)
    folder.close()
    before = open_descriptors()
    scanning = scan_root(Files(), tmp_path)
    for _ in range(5):
        next(scanning)
    assert open_descriptors() - before <= 8  # four folders, and an iterator over each
    scanning.close()  # type: ignore[attr-defined]
    assert open_descriptors() == before


def test_a_scan_opens_folders_only(tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    make_temp(tmp_path)
    files = WatchedFiles()
    list(scan_root(files, tmp_path))
    assert set(files.names) == {"open", "close", "scandir", "stat"}
    assert files.names.count("open") == 5  # the root, its namespace, the rank, and two in it


def test_what_was_left_behind_is_removed(tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    paths = [make_temp(tmp_path), make_temp(tmp_path, rank=1), tmp_path / NAMESPACE / HALF]
    paths[2].write_bytes(b"")
    found = [item for item in scan(tmp_path) if isinstance(item, FoundTemp)]
    left = next(item for item in found if item.rank == 1)
    told = list(scan_root(Files(), tmp_path, lambda item: item == left))
    assert {item for item in told if isinstance(item, FoundTemp)} == {*found} - {left}
    assert [path.exists() for path in paths] == [True, False, True]
    list(scan_root(Files(), tmp_path, lambda _: True))
    assert not any(path.exists() for path in paths)
    assert path_of(tmp_path).exists()


MODEL = f"{'a' * 32}-{'b' * 32}"
LONG_AGO, LATER = 10**9, 2 * 10**9


def vacant(root: Path, namespace: str = MODEL, used_ns: int = LONG_AGO) -> Path:
    """A namespace from which all chunks have gone."""
    for rank in (0, 1):
        write(rank_folder(root, namespace=namespace, rank=rank))
        path_of(root, namespace=namespace, rank=rank).unlink()
    write_identity(Files(), root, namespace, {})
    os.utime(root / namespace / "identity.json", ns=(used_ns, used_ns))
    return root / namespace


def test_a_namespace_that_holds_nothing_is_removed(tmp_path: Path) -> None:
    folder, other = vacant(tmp_path), vacant(tmp_path, f"{'c' * 32}-{'d' * 32}")
    assert remove_vacant(Files(), tmp_path, MODEL, LATER)
    assert not folder.exists()
    assert (other / "identity.json").exists()
    assert not remove_vacant(Files(), tmp_path, MODEL, LATER)


def test_what_was_left_of_its_removal_is_removed(tmp_path: Path) -> None:
    folder = vacant(tmp_path)
    (folder / "identity.json").unlink()
    os.utime(folder, ns=(LONG_AGO, LONG_AGO))
    assert remove_vacant(Files(), tmp_path, MODEL, LATER)
    assert not folder.exists()


@pytest.mark.parametrize(
    "what", ["r1/00/00.0.kv", f"r0/tmp/{LEFT}", "notes.txt", "r7/mine", "distrusted-5.mark"]
)
def test_a_namespace_that_holds_anything_stays(tmp_path: Path, what: str) -> None:
    folder = vacant(tmp_path)
    (folder / what).parent.mkdir(exist_ok=True)
    (folder / what).write_bytes(b"")
    assert not remove_vacant(Files(), tmp_path, MODEL, LATER)
    assert (folder / what).exists()


@pytest.mark.parametrize("namespace", ["photos", "..", "", "lmcache", f"{MODEL}a"])
def test_only_models_namespaces_are_removed(tmp_path: Path, namespace: str) -> None:
    folder = vacant(tmp_path, "photos")
    assert not remove_vacant(Files(), tmp_path, namespace, LATER)
    assert (folder / "identity.json").exists()


def test_a_namespace_that_is_used_stays(tmp_path: Path) -> None:
    folder = vacant(tmp_path, used_ns=LATER)
    assert not remove_vacant(Files(), tmp_path, MODEL, LATER)
    assert len(list(folder.rglob("*"))) == 7


def test_whoever_uses_a_namespace_while_it_is_removed_keeps_its_identity(tmp_path: Path) -> None:
    folder = vacant(tmp_path)

    class Meanwhile(Files):
        def rmdir(self, name: object, *, dir_fd: int | None = None) -> None:
            os.utime(folder / "identity.json")
            super().rmdir(str(name), dir_fd=dir_fd)

    assert not remove_vacant(Meanwhile(), tmp_path, MODEL, LATER)
    assert (folder / "identity.json").exists()
    assert write(rank_folder(tmp_path, namespace=MODEL)).status is WriteStatus.WRITTEN


def test_a_writer_whose_empty_folders_are_removed_goes_on(tmp_path: Path) -> None:
    writer = rank_folder(tmp_path, namespace=MODEL)
    write(writer)
    path_of(tmp_path, namespace=MODEL).unlink()
    os.utime(tmp_path / MODEL, ns=(LONG_AGO, LONG_AGO))
    assert remove_vacant(Files(), tmp_path, MODEL, LATER)
    assert write(writer).status is WriteStatus.WRITTEN
    assert read(writer)[0].status is ReadStatus.OK
