# SPDX-License-Identifier: Apache-2.0
"""Threads and processes at the same files."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

from tests.unit.disk._files import (
    KEY,
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
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.store import RankFolder, ReadStatus, WriteStatus

KEYS = [bytes([i]) * 8 for i in range(4)]
ROUNDS = 60


def in_threads(count: int, work: Callable[[int], None]) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - told by the test's thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


def write_and_read_and_remove(folder: RankFolder, number: int) -> None:
    """What is read is whole, whoever wrote it, or it is missing."""
    for turn in range(ROUNDS):
        key = KEYS[(number + turn) % len(KEYS)]
        written = write(folder, key)
        assert written.status in (WriteStatus.WRITTEN, WriteStatus.EXISTED)
        result, payload = read(folder, key)
        assert result.status in (ReadStatus.OK, ReadStatus.MISSING)
        assert result.status is ReadStatus.MISSING or payload == payload_of(key)
        if turn % 3 == 0:
            folder.remove(key, 0)


def all_whole(root: Path) -> bool:
    folder = rank_folder(root)
    for key in KEYS:
        write(folder, key)
    found = [read(folder, key) for key in KEYS]
    folder.close()
    return found == [(found[0][0], payload_of(key)) for key in KEYS] and temp_files(root) == []


def test_threads_share_a_folder(tmp_path: Path) -> None:
    before = open_descriptors()
    folder = rank_folder(tmp_path, mode=mode_of(tmp_path))
    in_threads(6, lambda number: write_and_read_and_remove(folder, number))
    folder.close()
    assert open_descriptors() == before
    assert all_whole(tmp_path)


def _process(root: Path) -> None:
    folder = rank_folder(root, mode=mode_of(root))
    in_threads(2, lambda number: write_and_read_and_remove(folder, number))


def test_processes_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_process, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert all_whole(tmp_path)


def test_writers_of_one_key_who_see_no_file_leave_one_whole_file(tmp_path: Path) -> None:
    """All of them look before any of them writes."""
    writers = 5
    barrier = threading.Barrier(writers, timeout=60)

    class Meeting(Files):
        def stat(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            try:
                return super().stat(*args, **kwargs)  # type: ignore[arg-type]
            finally:
                barrier.wait()

    folder = rank_folder(tmp_path, files=Meeting())
    found: list[WriteStatus] = []
    in_threads(writers, lambda _: found.append(write(folder).status))
    assert found == [WriteStatus.WRITTEN] * writers
    assert len(list(path_of(tmp_path).parent.iterdir())) == 1
    assert temp_files(tmp_path) == []
    assert read(rank_folder(tmp_path)) == (read(rank_folder(tmp_path))[0], payload_of(KEY))


def test_calls_are_made_by_the_thread_that_asks(tmp_path: Path) -> None:
    files = WatchedFiles()
    folder = rank_folder(tmp_path, files=files)
    idents: list[int] = []

    def work(number: int) -> None:
        idents.append(threading.get_ident())
        write(folder)
        read(folder)
        folder.remove(KEY, 0)

    in_threads(1, work)
    assert {ident for _, ident in files.calls} == set(idents)
    assert threading.get_ident() not in idents


def test_a_folder_that_two_threads_open_at_once_is_kept_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(2, timeout=60)
    shard = path_of(tmp_path).parent.name

    class Meeting(Files):
        def open(self, name: object, *args: object, **kwargs: object) -> int:
            if name == shard:
                barrier.wait()
            return super().open(name, *args, **kwargs)  # type: ignore[arg-type]

    write(rank_folder(tmp_path))
    folder = rank_folder(tmp_path, files=Meeting())
    assert read(folder, b"opens the rank's")[0].status is ReadStatus.MISSING
    before = open_descriptors()
    in_threads(2, lambda _: _read_ok(folder))
    assert open_descriptors() == before + 1


def _read_ok(folder: RankFolder) -> None:
    assert read(folder)[0].status is ReadStatus.OK
