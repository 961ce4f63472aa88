# SPDX-License-Identifier: Apache-2.0
"""What a process that was killed could not remove is removed by the next, before it offers any."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.unit.disk._agent import SPACE, FaultyFiles, Rig, key_of, on_disk
from tests.unit.disk._files import KEY, NAMESPACE, path_of, rank_folder, write
from vllm_tiered_kv.tiers.disk.failures import FailureReason
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.marks import MARGIN, clear_mark, inherit, set_mark
from vllm_tiered_kv.tiers.disk.names import mark_file, parse_mark_file

OTHER = bytes(reversed(KEY))


def always() -> bool:
    return True


def marks(root: Path, namespace: str = NAMESPACE) -> list[str]:
    return [p.name for p in (root / namespace).glob("*.mark")]


@pytest.mark.parametrize("since_ns", [0, 1, time.time_ns(), 10**19 - 1])
def test_a_mark_says_its_time_in_its_name(since_ns: int) -> None:
    name = mark_file(since_ns)
    assert name is not None
    assert parse_mark_file(name) == since_ns


@pytest.mark.parametrize("since_ns", [-1, 10**19])
def test_no_mark_is_of_a_time_that_cannot_be(since_ns: int) -> None:
    assert mark_file(since_ns) is None


@pytest.mark.parametrize(
    "name", ["distrusted-.mark", "distrusted-1.mark.tmp", "distrusted--1.mark"]
)
def test_other_files_are_no_marks(name: str) -> None:
    assert parse_mark_file(name) is None


def test_what_was_changed_since_goes_and_what_is_older_stays(tmp_path: Path) -> None:
    with_folder = rank_folder(tmp_path)
    write(with_folder, KEY)
    before = path_of(tmp_path, KEY).stat().st_ctime_ns
    while True:  # the file system's clock ticks slowly
        write(with_folder, OTHER)
        if path_of(tmp_path, OTHER).stat().st_ctime_ns > before:
            break
        path_of(tmp_path, OTHER).unlink()
    assert set_mark(Files(), tmp_path, NAMESPACE, before + 1 + int(MARGIN * 1e9)) is None
    assert inherit(Files(), tmp_path, NAMESPACE, always) is None
    assert path_of(tmp_path, KEY).exists()
    assert not path_of(tmp_path, OTHER).exists()
    assert not marks(tmp_path)


def test_the_oldest_mark_counts(tmp_path: Path) -> None:
    write(rank_folder(tmp_path), KEY)
    far = time.time_ns() + int(2 * MARGIN * 1e9)
    assert set_mark(Files(), tmp_path, NAMESPACE, far) is None
    assert set_mark(Files(), tmp_path, NAMESPACE, 0) is None
    assert inherit(Files(), tmp_path, NAMESPACE, always) is None
    assert not path_of(tmp_path, KEY).exists()
    assert not marks(tmp_path)


def test_nothing_is_removed_where_there_is_no_mark(tmp_path: Path) -> None:
    write(rank_folder(tmp_path), KEY)
    assert set_mark(Files(), tmp_path, NAMESPACE, 0) is None
    assert set_mark(Files(), tmp_path, NAMESPACE, 0) is None  # it is there already
    clear_mark(Files(), tmp_path, NAMESPACE, 0)
    assert inherit(Files(), tmp_path, NAMESPACE, always) is None
    assert inherit(Files(), tmp_path, "nothing-here", always) is None
    assert path_of(tmp_path, KEY).exists()


def test_a_mark_stays_until_all_is_removed(tmp_path: Path) -> None:
    folder = rank_folder(tmp_path)
    write(folder, KEY)
    write(folder, OTHER)
    set_mark(Files(), tmp_path, NAMESPACE, 0)
    assert inherit(Files(), tmp_path, NAMESPACE, lambda: False) is not None
    assert marks(tmp_path)
    for failing in ("unlink", "stat", "scandir"):
        files = FaultyFiles(0)
        files.failing, files.rate = frozenset({failing}), 1.0
        assert inherit(files, tmp_path, NAMESPACE, always) is not None
        assert marks(tmp_path)
    assert inherit(Files(), tmp_path, NAMESPACE, always) is None
    assert not on_disk(tmp_path)


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    for call in (
        lambda: set_mark(Files(), tmp_path, "../there", 0),
        lambda: inherit(Files(), tmp_path, "../there", always),
    ):
        assert call() is FailureReason.NAME


def _killed_while_it_purged(root: Path) -> None:
    """An engine that ends with nothing removed; its mark can be made."""
    files = FaultyFiles(0)
    engine = Rig(root, files).open()
    try:
        for number in range(3):
            engine.write(key_of(number))
        engine.settle()
        files.failing, files.rate = frozenset({"unlink"}), 1.0
        engine.agent.purge()
        engine.wait(lambda: marks(root, SPACE), "no mark was made")
    finally:
        engine.close()


def test_the_next_engine_offers_nothing_of_what_was_purged(tmp_path: Path) -> None:
    _killed_while_it_purged(tmp_path)
    assert on_disk(tmp_path)
    engine = Rig(tmp_path, FaultyFiles(0)).open()
    try:
        assert [engine.agent.groups(key_of(number)) for number in range(3)] == [0] * 3
        assert not on_disk(tmp_path)
        assert not marks(tmp_path, SPACE)
        engine.write(key_of(1))
        engine.settle()
        assert engine.agent.groups(key_of(1)) == 0b11
    finally:
        assert engine.close()


def test_it_waits_until_it_can_remove_them(tmp_path: Path) -> None:
    _killed_while_it_purged(tmp_path)
    files = FaultyFiles(0)
    files.failing, files.rate = frozenset({"unlink"}), 1.0
    engine = Rig(tmp_path, files)
    try:
        engine.agent.open(SPACE, {"means": "a test"})
        engine.wait(lambda: engine.failures["disk_folder"], "it went unnoticed")
        assert not engine.agent.is_readable
        files.rate = 0.0
        engine.wait(lambda: engine.agent.is_readable, "it never opened")
        assert not on_disk(tmp_path)
    finally:
        assert engine.close()


def test_a_purge_that_is_through_leaves_no_mark(tmp_path: Path) -> None:
    engine = Rig(tmp_path, FaultyFiles(0)).open()
    try:
        engine.write(key_of(1))
        engine.settle()
        engine.agent.purge()
        engine.wait(lambda: marks(tmp_path, SPACE) or not on_disk(tmp_path), "no mark was made")
        engine.wait(lambda: not on_disk(tmp_path), "it was not removed")
        engine.wait(lambda: not marks(tmp_path, SPACE), "the mark stays")
    finally:
        assert engine.close()
