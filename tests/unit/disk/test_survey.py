# SPDX-License-Identifier: Apache-2.0
"""What a scan makes of what it meets, whatever the clocks say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.disk._files import KEY, NAMESPACE, rank_folder, write
from vllm_tiered_kv.tiers.disk.chores import Scan
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.identity_file import write_identity
from vllm_tiered_kv.tiers.disk.scan import scan_root
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES
from vllm_tiered_kv.tiers.disk.survey import (
    MAX_SEEN,
    MAX_VACANT,
    TEMP_AGE,
    Leftovers,
    Survey,
)
from vllm_tiered_kv.tiers.disk.walk import FolderMade, Foreign, Found, FoundIdentity, FoundTemp

SECOND = 10**9
NOW = 1_700_000_000 * SECOND


def temp(age: float = 0.0, *, namespace: str = NAMESPACE, name: str = "a.tmp") -> FoundTemp:
    return FoundTemp(namespace, 0, name, 1000, NOW - int(age * SECOND))


def counted(*items: object, young: float = 30.0, ranks: int = 1) -> int:
    survey = Survey(Scan(NAMESPACE, ranks, young), NOW)
    for item in items:
        survey.meet(item)  # type: ignore[arg-type]
    return survey.other


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_counted_is_what_lies_there(tmp_path: Path, ranks: int) -> None:
    """Of another model's folder: its folders once, its files by themselves."""
    for rank in range(ranks):
        for i in range(30):
            write(rank_folder(tmp_path, namespace="another", rank=rank), bytes([i]) * 32)
    write_identity(Files(), tmp_path, "another", {})
    survey = Survey(Scan(NAMESPACE, 1, 0.0), NOW)
    files = [f for item in scan_root(Files(), tmp_path) if (f := survey.meet(item)) is not None]
    assert len(files) == 30 * ranks
    total = survey.other + sum(file.nbytes for file in files)
    real = sum(
        max(4096, path.lstat().st_size) if path.is_dir() else path.lstat().st_size
        for path in tmp_path.rglob("*")
    )
    assert real <= total + ENTRY_BYTES * len(files)
    assert total <= real + 4096  # a small file takes a page


def test_room_that_is_kept_for_our_folders_is_not_counted_again() -> None:
    own = [
        FolderMade(NAMESPACE, 0),
        FolderMade(NAMESPACE, 0, "tmp"),
        FolderMade(NAMESPACE, 0, "3f"),
    ]
    assert counted(*own) == 0
    assert counted(FolderMade(NAMESPACE, None)) == 4096
    assert counted(FolderMade(NAMESPACE, 5), FolderMade("another", 0, "3f")) == 2 * 4096


def test_a_huge_identity_counts() -> None:
    assert counted(FoundIdentity("another", 1 << 30)) == 1 << 30


def test_a_file_beyond_our_bounds_counts() -> None:
    far = Found("another", 60000, KEY, 60000, 5000, NOW)
    assert counted(far) == 5000


@pytest.mark.parametrize(("age", "size"), [(0, 0), (29, 0), (31, 1000), (-5, 1000), (-1e8, 1000)])
def test_only_what_may_be_written_now_is_not_counted(age: float, size: int) -> None:
    assert counted(temp(age)) == size
    assert counted(temp(age, namespace="another")) == 1000


def test_what_is_old_was_left_behind() -> None:
    leftovers = Leftovers()
    leftovers.begin(NOW, 0.0)
    assert leftovers.has(temp(TEMP_AGE))
    assert not leftovers.has(temp(TEMP_AGE - 1))


def test_a_file_from_the_future_grows_old_by_our_own_clock() -> None:
    leftovers, future = Leftovers(), temp(-1e9)
    for now, left in ((0.0, False), (TEMP_AGE - 1, False), (TEMP_AGE, True)):
        leftovers.begin(NOW, now)
        assert leftovers.has(future) is left
    leftovers.begin(NOW, 2 * TEMP_AGE)
    assert not leftovers.has(temp(-2e9))  # somebody has changed it
    leftovers.begin(NOW, 3 * TEMP_AGE)
    assert not leftovers.has(future)  # it was gone for a scan


def test_what_is_remembered_is_bounded() -> None:
    leftovers = Leftovers()
    leftovers.begin(NOW, 0.0)
    for i in range(2 * MAX_SEEN):
        leftovers.has(temp(-1, name=f"{i}.tmp"))
    assert len(leftovers._seen) == MAX_SEEN


def test_namespaces_of_other_models_without_files_are_named() -> None:
    empty, full, odd, own = (f"{i}{'a' * 31}-{'b' * 32}" for i in range(4))
    survey = Survey(Scan(own, 1, 30.0), NOW)
    for namespace in (empty, full, odd, own, "photos"):
        for item in (
            FolderMade(namespace, None),
            FoundIdentity(namespace, 100),
            FolderMade(namespace, 0),
            FolderMade(namespace, 0, "3f"),
        ):
            survey.meet(item)
        if namespace == full:
            survey.meet(Found(full, 0, KEY, 0, 5000, NOW))
        if namespace == odd:
            survey.meet(Foreign(f"{odd}/r0/mine"))
    assert survey.vacant == {empty}
    for i in range(2 * MAX_VACANT):
        survey.meet(FolderMade(f"{i:032x}-{i:032x}", None))
    assert len(survey.vacant) == MAX_VACANT


def test_a_scan_removes_what_was_left_and_counts_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / NAMESPACE / "r0" / "tmp"
    folder.mkdir(parents=True)
    left = folder / f"{'a' * 24}.tmp"
    left.write_bytes(bytes(1000))
    now_ns = left.stat().st_ctime_ns
    leftovers = Leftovers()
    leftovers.begin(now_ns - 10**9, 0.0)
    assert len(list(scan_root(Files(), tmp_path, leftovers.has))) == 4
    leftovers.begin(now_ns + int((TEMP_AGE + 1) * 1e9), 0.0)
    assert len(list(scan_root(Files(), tmp_path, leftovers.has))) == 3
    assert not list(folder.iterdir())
