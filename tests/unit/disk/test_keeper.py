# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.disk._agent import FaultyFiles
from tests.unit.disk._files import KEY, NAMESPACE, mode_of, path_of, rank_folder, write
from vllm_tiered_kv.tiers.disk import keeper as module
from vllm_tiered_kv.tiers.disk.chores import (
    Mark,
    Measure,
    Measured,
    News,
    Prepare,
    Prepared,
    Probe,
    Probed,
    Remove,
    Removed,
    Scan,
    ScanEnded,
    ScanPiece,
    Touch,
    Trouble,
    Unmark,
)
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.keeper import Keeper
from vllm_tiered_kv.tiers.disk.names import parse_mark_file
from vllm_tiered_kv.tiers.disk.survey import PAGE

NAME = FileName(NAMESPACE, 0, 0, KEY)
LEFT, YOUNG = f"{'1' * 24}.tmp", f"{'2' * 24}.tmp"
SCAN = Scan(NAMESPACE, 1, 0.0)


class Bench:
    def __init__(self, root: Path) -> None:
        self.files = FaultyFiles(0)
        self.news: queue.Queue[News] = queue.Queue()
        self.keeper = Keeper(root, self.files, self.news.put)

    def ask(self, chore: Any, until: type[Any]) -> Any:
        """Leave a chore; the first news of this kind."""
        assert self.keeper.ask(chore)
        while not isinstance(news := self.news.get(timeout=30), until):
            continue
        return news


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.files.flow.set()
    assert made.keeper.close(30)


def test_the_folder_is_prepared_and_measured(bench: Bench, tmp_path: Path) -> None:
    news = bench.ask(Prepare(NAMESPACE, {"a": 1}), Prepared)
    assert news.mode is mode_of(tmp_path)
    assert (tmp_path / NAMESPACE / "identity.json").exists()
    status = os.statvfs(tmp_path)
    free = bench.ask(Measure(), Measured).free_bytes
    assert 0 < free <= status.f_blocks * status.f_frsize


@pytest.mark.parametrize("chore", [Prepare(NAMESPACE, {}), SCAN, Measure()])
def test_what_fails_is_told_and_the_thread_goes_on(bench: Bench, chore: Any) -> None:
    bench.files.rate = 1.0
    assert bench.ask(chore, Trouble).chore == chore
    bench.files.rate = 0.0
    bench.ask(Prepare(NAMESPACE, {}), Prepared)


def test_a_scan_tells_files_and_counts_the_rest(bench: Bench, tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    write(rank_folder(tmp_path, namespace="another", rank=3))
    for space in (NAMESPACE, "another"):
        (tmp_path / space / "r0" / "tmp").mkdir(parents=True, exist_ok=True)
        (tmp_path / space / "r0" / "tmp" / LEFT).write_bytes(bytes(1000))
    assert bench.keeper.ask(SCAN)
    piece, ended = bench.news.get(timeout=30), bench.news.get(timeout=30)
    assert isinstance(piece, ScanPiece)
    assert isinstance(ended, ScanEnded)
    assert {f.name for f in piece.files} == {NAME, FileName("another", 3, 0, KEY)}
    folders = (1 + 5) * PAGE  # two namespaces, and in the other one two ranks, two tmp, a shard
    assert ended.other_bytes == folders + PAGE + 2000
    assert ended.missed == 0
    young = bench.ask(Scan(NAMESPACE, 1, 60.0), ScanEnded)
    assert young.other_bytes == folders + PAGE + 1000  # ours may be under way


def test_a_scan_says_since_when_files_were_used(bench: Bench, tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    for _ in range(2):
        os.utime(path_of(tmp_path))
        piece = bench.ask(SCAN, ScanPiece)
        assert piece.files[0].used_ns >= piece.since_ns
    os.utime(path_of(tmp_path), ns=(0, time.time_ns() - 2 * module.NOTED_LATE_NS))
    piece = bench.ask(SCAN, ScanPiece)
    assert piece.files[0].used_ns < piece.since_ns


def test_a_time_from_the_future_becomes_now(bench: Bench, tmp_path: Path) -> None:
    """Else the file would be the newest for years."""
    write(rank_folder(tmp_path))
    for ahead, stays in ((module.AHEAD_NS // 2, True), (10**18, False)):
        used_ns = time.time_ns() + ahead
        os.utime(path_of(tmp_path), ns=(used_ns, used_ns))
        file = bench.ask(SCAN, ScanPiece).files[0]
        assert file.used_ns == path_of(tmp_path).stat().st_mtime_ns
        assert (file.used_ns == used_ns) is stays


def test_a_mark_covers_what_is_written_after_the_clock_was_set_back(
    bench: Bench, tmp_path: Path
) -> None:
    bench.keeper._since_ns = time.time_ns() + 10**18  # it was ahead when the keeper began
    bench.ask(Prepare(NAMESPACE, {}), Prepared)
    write(rank_folder(tmp_path))
    bench.keeper.ask(Mark(NAMESPACE))
    bench.ask(Probe(0, []), Probed)
    (mark,) = (tmp_path / NAMESPACE).glob("*.mark")
    since_ns = parse_mark_file(mark.name)
    assert since_ns is not None
    assert since_ns <= path_of(tmp_path).stat().st_ctime_ns
    bench.keeper._since_ns -= 10**18  # and once more
    bench.keeper.ask(Mark(NAMESPACE))
    bench.keeper.ask(Unmark(NAMESPACE))
    bench.ask(Probe(0, []), Probed)
    assert not list((tmp_path / NAMESPACE).glob("*.mark"))


def test_a_scan_says_again_what_a_namespace_is(bench: Bench, tmp_path: Path) -> None:
    bench.ask(Prepare(NAMESPACE, {"a": 1}), Prepared)
    file = tmp_path / NAMESPACE / "identity.json"
    said = file.read_bytes()
    shutil.rmtree(tmp_path / NAMESPACE)
    write(rank_folder(tmp_path))
    bench.ask(SCAN, ScanEnded)
    assert file.read_bytes() == said


def test_a_scan_removes_namespaces_that_nobody_uses(bench: Bench, tmp_path: Path) -> None:
    mine, other, dead = (f"{i * 32}-{'f' * 32}" for i in "abc")
    for space in (mine, other):
        bench.ask(Prepare(space, {}), Prepared)
    os.utime(tmp_path / other / "identity.json", ns=(0, 0))
    bench.ask(Scan(other, 1, 0.0), ScanEnded)  # its engine goes on, with nothing in it
    bench.ask(Prepare(dead, {}), Prepared)
    os.utime(tmp_path / dead / "identity.json", ns=(0, 0))
    bench.ask(Scan(mine, 1, 0.0), ScanEnded)
    assert {path.name for path in tmp_path.iterdir()} == {mine, other}


def test_a_scan_says_what_it_could_not_see(bench: Bench, tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    real = bench.files.stat
    bench.files.stat = lambda name, **kw: _fail(real, name, kw)  # type: ignore[method-assign]
    assert bench.ask(SCAN, ScanEnded).missed == 1


def _fail(real: Callable[..., Any], name: Any, kw: Any) -> Any:
    if str(name).endswith(".kv"):
        raise OSError(5, "injected")
    return real(name, **kw)


def test_other_chores_come_in_between_the_pieces_of_a_scan(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH", 1)
    folder = rank_folder(tmp_path)
    for i in range(5):
        write(folder, bytes([i]) * 32)
    bench.files.flow.clear()
    bench.keeper.ask(SCAN)
    bench.keeper.ask(Measure())
    bench.files.flow.set()
    seen = [type(bench.news.get(timeout=30)) for _ in range(8)]
    assert seen.index(Measured) < seen.index(ScanEnded)


def test_removing_and_touching_and_probing(bench: Bench, tmp_path: Path) -> None:
    write(rank_folder(tmp_path))
    gone = FileName(NAMESPACE, 5, 0, KEY)
    bench.keeper.ask(Touch([(NAME, 12345), (gone, 1)]))
    probed = bench.ask(Probe(3, [NAME, gone]), Probed)
    assert [(f.name, f.used_ns) for f in probed.there] == [(NAME, 12345)]
    assert probed.there[0].nbytes == path_of(tmp_path).stat().st_size > file_bytes(1)
    bench.files.failing, bench.files.rate = frozenset({"unlink"}), 1.0
    bench.files.chance.random = lambda: 0.5  # type: ignore[method-assign]
    assert bench.ask(Remove([NAME, gone]), Removed) == Removed([gone], [NAME])
    bench.files.rate = 0.0
    assert bench.ask(Remove([NAME]), Removed) == Removed([NAME], [])
    assert not path_of(tmp_path).exists()


def test_chores_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CHORES", 2)
    bench.files.flow.clear()
    bench.keeper.ask(Measure())
    assert bench.files.waiting.acquire(timeout=30)
    assert [bench.keeper.ask(Measure()) for _ in range(4)] == [True, True, False, False]
    assert bench.keeper.busy_since is not None


def test_a_hung_call_does_not_hold_up_the_end(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.files.flow.clear()
    bench.keeper.ask(Measure())
    assert bench.files.waiting.acquire(timeout=30)
    started = time.monotonic()
    assert not bench.keeper.close(0.1)
    assert bench.keeper._thread in threading.enumerate()
    assert time.monotonic() - started < 30
    bench.files.flow.set()
    bench.keeper._thread.join(30)
    assert not bench.keeper._thread.is_alive()
    assert not bench.keeper.ask(Measure())


@pytest.mark.parametrize("level", ["", NAMESPACE])
@pytest.mark.parametrize(("mode", "warns"), [(0o700, False), (0o770, True), (0o1777, True)])
def test_a_folder_that_others_can_write_to_is_named_once(
    bench: Bench,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    level: str,
    mode: int,
    warns: bool,
) -> None:
    for folder in (tmp_path, tmp_path / NAMESPACE):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o700)
    (tmp_path / level).chmod(mode)
    for _ in range(2):
        bench.ask(Prepare(NAMESPACE, {}), Prepared)
    said = [record for record in caplog.records if "other users" in record.message]
    assert [record.args for record in said] == [(tmp_path / level,)] * warns


def test_a_file_system_that_does_not_say_how_much_is_free(bench: Bench) -> None:
    class Nothing:
        f_blocks = f_bavail = f_frsize = 0

    bench.files.statvfs = lambda fd: Nothing  # type: ignore[assignment,method-assign]
    bench.keeper.ask(Measure())
    bench.ask(Prepare(NAMESPACE, {}), Prepared)
    bench.ask(SCAN, ScanEnded)
    assert bench.news.empty()


def test_what_is_made_is_for_its_owner_alone(bench: Bench, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        bench.ask(Prepare(NAMESPACE, {}), Prepared)
        write(rank_folder(tmp_path))
    finally:
        os.umask(before)
    made = list(tmp_path.rglob("*"))
    assert len(made) == 6
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}


def test_a_scan_removes_what_was_left_behind(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / NAMESPACE / "r0" / "tmp"
    folder.mkdir(parents=True)
    (folder / LEFT).write_bytes(bytes(1000))
    bench.keeper._leftovers.has = lambda temp: temp.name == LEFT  # type: ignore[method-assign]
    (folder / YOUNG).write_bytes(bytes(1000))
    assert bench.ask(SCAN, ScanEnded).other_bytes == PAGE + 1000
    assert [path.name for path in folder.iterdir()] == [YOUNG]
