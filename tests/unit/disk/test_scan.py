# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
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
    remove_found,
    remove_namespace,
    scan_root,
)

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
    list(remove_namespace(Files(), root, NAMESPACE))
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
    assert list(remove_namespace(Files(), tmp_path, NAMESPACE)) == [FOUND]
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


def test_a_namespace_is_removed_with_all_that_is_ours(tmp_path: Path) -> None:
    for namespace in (NAMESPACE, OTHER):
        for rank in (0, 1):
            write(rank_folder(tmp_path, namespace=namespace, rank=rank))
        write_identity(Files(), tmp_path, namespace, {})
    make_temp(tmp_path)
    removed = list(remove_namespace(Files(), tmp_path, NAMESPACE))
    assert len(removed) == 3
    assert not (tmp_path / NAMESPACE).exists()
    assert len([item for item in scan(tmp_path) if isinstance(item, Found)]) == 2
    assert (tmp_path / OTHER / "identity.json").exists()


@pytest.mark.parametrize("namespace", ["", "..", "missing", "a/b"])
def test_a_namespace_that_is_not_there_is_not_removed(tmp_path: Path, namespace: str) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").mkdir()
    assert list(remove_namespace(Files(), tmp_path / "root", namespace)) == []
    assert (tmp_path / "root" / "a").exists()


def test_a_file_that_was_found_is_removed(tmp_path: Path) -> None:
    write(rank_folder(tmp_path, namespace=OTHER, rank=3))
    make_temp(tmp_path)
    (tmp_path / NAMESPACE / HALF).write_bytes(b"")
    files = [item for item in scan(tmp_path) if isinstance(item, (Found, FoundTemp))]
    assert len(files) == 3
    assert [remove_found(Files(), tmp_path, item) for item in files] == [True] * 3
    assert [remove_found(Files(), tmp_path, item) for item in files] == [False] * 3
    assert not [item for item in scan(tmp_path) if isinstance(item, (Found, FoundTemp))]


def test_a_namespace_cannot_lead_out_of_the_root(tmp_path: Path) -> None:
    write(rank_folder(tmp_path, namespace="outside"))
    (tmp_path / "outside" / "root").mkdir()
    item = msgspec.structs.replace(FOUND, namespace="..")
    assert not remove_found(Files(), tmp_path / "outside" / "root", item)
    assert path_of(tmp_path, namespace="outside").exists()


@pytest.mark.parametrize(
    "item",
    [
        msgspec.structs.replace(FOUND, key=b""),
        FoundTemp(NAMESPACE, 0, "../../identity.json", 0, 0),
        FoundTemp(NAMESPACE, None, "identity.json", 0, 0),
    ],
)
def test_nothing_but_a_file_of_ours_is_removed(tmp_path: Path, item: Found | FoundTemp) -> None:
    write(rank_folder(tmp_path))
    write_identity(Files(), tmp_path, NAMESPACE, {})
    before = sorted(tmp_path.rglob("*"))
    assert not remove_found(Files(), tmp_path, item)
    assert sorted(tmp_path.rglob("*")) == before
