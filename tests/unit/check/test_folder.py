# SPDX-License-Identifier: Apache-2.0
"""What is said of the disk tier's folder, and that it stays as it is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.disk._files import FACTS, KEY, NAMESPACE, NBYTES
from vllm_tiered_kv.check.findings import Finding, Level
from vllm_tiered_kv.check.folder import Folder, Held, judge, look
from vllm_tiered_kv.check.mounts import Mount, find_mount
from vllm_tiered_kv.config import DiskOptions, parse_options
from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer, try_folder
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import file_bytes, padded
from vllm_tiered_kv.tiers.disk.store import RankFolder

GIB = 1 << 30


def options(path: Path, **changes: Any) -> DiskOptions:
    disk = {"path": str(path), "capacity": "1MiB", "min_free": 1, **changes}
    found = parse_options({"disk": disk}).disk
    assert found is not None
    return found


def check(path: Path, **changes: Any) -> list[Finding]:
    disk = options(path, **changes)
    return judge(disk, look(disk))


def tree(root: Path) -> dict[str, tuple[int, ...]]:
    """All that would show that something was made, changed or removed again."""
    found = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        found[str(path)] = (status.st_mode, status.st_uid, status.st_size, status.st_mtime_ns)
    return found


def worst(findings: list[Finding]) -> Level:
    levels = [one.level for one in findings]
    return max(levels, key=[Level.OK, Level.WARNING, Level.ERROR].index)


def test_a_folder_that_is_there_and_one_that_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    before = tree(tmp_path)
    assert worst(check(folder)) is Level.OK
    missing = check(tmp_path / "not" / "there")
    assert worst(missing) is Level.OK
    assert f"it will be made below {tmp_path} " in missing[0].says
    assert tree(tmp_path) == before


def test_what_is_in_it_is_counted_and_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    rank = RankFolder(tmp_path, NAMESPACE, 0, files=Files(), mode=IoMode.BUFFERED)
    buffer = aligned_buffer(padded(NBYTES))
    rank.write(KEY, 0, buffer, NBYTES, FACTS, 1_700_000_000_000_000_000)
    rank.close()
    (tmp_path / NAMESPACE / "r0" / "tmp" / f"{'0' * 24}.tmp").write_text("left behind")
    before = tree(tmp_path)
    found = look(options(tmp_path))
    assert found.held == Held(file_bytes(NBYTES), 1, complete=True)
    assert tree(tmp_path) == before
    (over,) = [one for one in check(tmp_path, capacity=4096) if one.what == "disk.capacity"]
    assert over.level is Level.WARNING
    assert "what is over goes when an engine starts" in over.says


@pytest.mark.parametrize("below", ["", "new/kv"])
def test_a_folder_that_may_not_be_written_to(read_only: Path, below: str) -> None:
    (finding,) = check(read_only / below)
    assert finding.level is Level.ERROR
    assert f"{read_only}: may not be written to by user {os.geteuid()}" in finding.says


def test_what_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for path, why in (
        (file, "Not a directory"),
        (file / "kv", "Not a directory"),
        (link, "a link that leads nowhere"),
    ):
        (finding,) = check(path)
        assert finding.level is Level.ERROR
        assert why in finding.says


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    folder, link = tmp_path / "kv", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    assert worst(check(link)) is Level.OK


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(mode)
    findings = check(folder)
    assert worst(findings) is Level.WARNING
    assert any("other users may write to" in one.says for one in findings)
    assert folder.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(
    ("changes", "what", "level", "says"),
    [
        ({}, "disk.capacity", Level.OK, "10 GiB; 20 GiB are free"),
        ({"free": None}, "disk.capacity", Level.OK, "cannot be told"),
        ({"free": 5 * GIB}, "disk.capacity", Level.WARNING, "holds 4 GiB at most"),
        ({"free": 10 * GIB}, "disk.capacity", Level.WARNING, "holds 9 GiB at most"),
        ({"free": 11 * GIB}, "disk.capacity", Level.OK, "11 GiB are free"),
        ({"free": GIB}, "disk.min_free", Level.ERROR, "nothing can be written: 1 GiB are free"),
        (
            {"free": GIB, "held": Held(10 * GIB, 7, complete=True)},
            "disk.capacity",
            Level.OK,
            "1 GiB are free, and 10 GiB in 7 files",
        ),
        (
            {"free": GIB, "held": Held(GIB, 7, complete=False)},
            "disk.capacity",
            Level.OK,
            "at least 1 GiB in 7 files",
        ),
        ({"io": IoMode.BUFFERED}, "disk", Level.OK, "refuses O_DIRECT"),
        ({"mount": Mount("/x", "tmpfs")}, "disk.path", Level.WARNING, "tmpfs is memory"),
        ({"mount": Mount("/", "overlay")}, "disk.path", Level.WARNING, "mount a volume"),
    ],
)
def test_room_and_kind(changes: dict[str, Any], what: str, level: Level, says: str) -> None:
    disk = options(Path("/x/kv"), capacity="10GiB", min_free="1GiB")
    facts = {
        "nearest": "/x",
        "mount": Mount("/x", "ext4"),
        "total": 100 * GIB,
        "free": 20 * GIB,
        "io": IoMode.DIRECT,
        "held": Held(0, 0, complete=True),
        **changes,
    }
    findings = judge(disk, Folder(**facts))
    assert any(one.what == what and one.level is level and says in one.says for one in findings)


def test_mounts(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        rf"30 22 0:26 / {tmp_path}/a\040b rw - xfs /dev/sdb rw" + "\n"
        rf"31 22 0:27 / {tmp_path}/a rw - nfs server:/a rw" + "\n"
        rf"32 22 0:28 / {tmp_path}/a rw - tmpfs over rw" + "\n"
        "nonsense\n"
    )
    for folder, expected in (
        ("a b/c", Mount(f"{tmp_path}/a b", "xfs")),
        ("a/c", Mount(f"{tmp_path}/a", "tmpfs")),
        ("ab", Mount("/", "ext4")),
    ):
        assert find_mount(tmp_path / folder, table) == expected
    assert find_mount(tmp_path, tmp_path / "absent") is None


class NoUnnamed(Files):
    """A file system without files that have no name; direct I/O is refused too late."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def open(self, name: Any, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        fd = super().open(name, flags, mode, dir_fd=dir_fd)
        if self.refuses and flags & os.O_DIRECT:
            self.close(fd)
            raise OSError(22, "Invalid argument")
        return fd


@pytest.mark.parametrize("refuses", [True, False])
def test_without_unnamed_files_nothing_stays_either(tmp_path: Path, refuses: bool) -> None:
    files, before = NoUnnamed(refuses), tree(tmp_path)
    folder = files.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        mode = try_folder(files, folder)
    finally:
        files.close(folder)
    assert mode is IoMode.BUFFERED or not refuses
    assert tree(tmp_path) == before


def test_a_file_system_that_takes_nothing(tmp_path: Path) -> None:
    class Full(Files):
        def pwritev(self, fd: int, buffers: Any, offset: int) -> int:
            raise OSError(28, "No space left on device")

    disk = options(tmp_path)
    (finding,) = judge(disk, look(disk, Full()))
    assert finding.level is Level.ERROR
    assert "nothing can be written there: No space left on device" in finding.says
