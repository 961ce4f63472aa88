# SPDX-License-Identifier: Apache-2.0
"""The object store with real threads and files: what is kept, and what happens when files fail."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.disk._agent import FaultyFiles
from tests.unit.objects._rig import (
    LAYOUT,
    NBYTES,
    HostMemory,
    Rig,
    file_of,
    object_id,
    on_disk,
    payload,
    rig,
    total,
)
from vllm_tiered_kv.config import Size
from vllm_tiered_kv.tiers.disk.format import HEADER_BYTES, file_bytes
from vllm_tiered_kv.tiers.objects.tasks import Wanted

FILE = file_bytes(NBYTES)


def test_what_is_stored_is_found_and_loaded_also_after_a_restart(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        assert host.finds(1, 2) == (False, False)
        assert host.loads(1) == (False,)
        assert host.stores(1, 2, 3) == (True, True, True)
        assert host.finds(1, 9, 3) == (True, False, True)
        assert host.loads(1, 9, 3) == (True, False, True)
        assert set(host.sizes) == {file_of(n) for n in (1, 2, 3)}
        assert host.store.status().counts["stored"] == 3
    assert len(on_disk(tmp_path)) == 3
    with rig(tmp_path) as host:
        assert host.finds(1, 2, 3) == (True, True, True)
        assert host.finds(1, layout=None) == (True,)
        assert host.finds(1, layout="bfloat16[2,1125]") == (False,)
        assert host.loads(1, 2, 3) == (True, True, True)


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    root = tmp_path / "made" / "by us"
    with rig(root) as host:
        host.stores(1)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    assert not list(root.rglob("*.tmp"))


def test_stored_again_it_is_written_once(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(1)
        task = host.submit_store([1])
        assert host.wait(task) == (True,)
        assert host.results[task].nbytes == 0
        assert host.store.status().counts["existed"] == 1


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[HEADER_BYTES + 100] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def swap(file: Path) -> None:
    other = next(one for one in on_disk(file.parents[3]) if one != file)
    shutil.copyfile(other, file)


@pytest.mark.parametrize("damage", [flip, cut, swap])
def test_a_damaged_file_is_a_miss_and_is_written_anew(tmp_path: Path, damage: object) -> None:
    with rig(tmp_path) as host:
        host.stores(1, 2)
        file = next(path for path in on_disk(tmp_path) if object_id(1).key.hex() in path.name)
        assert callable(damage)
        damage(file)
        assert host.finds(1) == (True,)  # nobody has looked into it
        assert host.loads(1, 2) == (False, True)
        assert not file.exists()
        assert host.finds(1) == (False,)
        assert file_of(1) not in host.sizes
        assert host.stores(1) == (True,)
        assert host.loads(1) == (True,)
        assert host.kinds == ["disk_damaged"]


def test_a_file_that_has_vanished_is_a_miss(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(1)
        on_disk(tmp_path)[0].unlink()
        assert host.loads(1) == (False,)
        assert host.finds(1) == (False,)
        assert host.stores(1) == (True,)
        assert host.loads(1) == (True,)


def test_the_folder_holds_no_more_than_its_capacity(tmp_path: Path) -> None:
    capacity = 9 << 20
    with rig(tmp_path, capacity=Size(capacity)) as host:
        stored = 0
        for first in range(0, 60, 4):
            stored += sum(host.stores(*range(first, first + 4), nbytes=256 << 10))
            assert total(tmp_path) <= capacity
        assert stored > 40
        assert host.store.status().evicted > 20
        # What was stored last is there, and the host knows of what went.
        assert host.loads(59, nbytes=256 << 10) == (True,)
        host.until(lambda: len(host.sizes) == len(on_disk(tmp_path)))


def test_folders_that_come_after_a_scan_count_as_well(tmp_path: Path) -> None:
    capacity = 9 << 20
    with rig(tmp_path, capacity=Size(capacity)) as host:
        tier = host.store._tier
        layouts = ("a", "b", "c")
        for layout in layouts:  # a namespace each, of which a scan sees one folder
            assert host.wait(host.submit_store([0], 4096, layout)) == (True,)
        host.store._put(tier._begin_scan, 1e9)
        host.until(lambda: tier._quota.doubtful == 0)
        for first in range(0, 900, 50):
            for layout in layouts:
                host.wait(host.submit_store(range(first, first + 50), 4096, layout))
            assert total(tmp_path) <= capacity
        assert host.store.status().evicted > 0
        assert len(list(tmp_path.glob("*/r0/??"))) > 700


def test_a_folder_in_an_objects_place_is_that_objects_affair(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(0)
        for number in range(1, 9):
            name = file_of(number)
            shard = tmp_path / name.namespace / "r0" / name.key[:1].hex()
            (shard / f"{name.key.hex()}.{name.group}.kv").mkdir(parents=True)
            assert host.stores(number) == (False,)
        assert host.store.status().failures["disk_write"] == 8
        assert not host.store.status().is_degraded
        assert host.loads(0) == (True,)
        assert host.stores(9) == (True,)


def test_what_was_looked_up_stays_until_it_is_unlocked(tmp_path: Path) -> None:
    nbytes = 512 << 10
    with rig(tmp_path, capacity=Size(9 << 20)) as host:
        host.stores(0, nbytes=nbytes)
        assert host.wait(host.submit_look_up([0])) == (True,)
        assert host.store.delete([object_id(0)], 10.0)
        for number in range(1, 40):
            host.stores(number, nbytes=nbytes)
        assert host.loads(0, nbytes=nbytes) == (True,)
        host.unlock(0)
        for number in range(40, 80):
            host.stores(number, nbytes=nbytes)
        assert host.finds(0) == (False,)


def test_deleted_it_is_gone_when_the_call_returns(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(1, 2, 3)
        assert host.store.delete([object_id(1), object_id(3), object_id(7)], 10.0)
        assert len(on_disk(tmp_path)) == 1
        assert host.finds(1, 2, 3) == (False, True, False)
        assert set(host.sizes) == {file_of(2)}
        assert host.store.delete([object_id(1)], 10.0)


def test_an_object_that_is_too_large_is_not_kept_and_nothing_goes_for_it(tmp_path: Path) -> None:
    with rig(tmp_path, capacity=Size(16 << 20)) as host:
        host.stores(1)
        assert host.stores(2, nbytes=5 << 20) == (False,)
        assert host.finds(1, 2) == (True, False)
        assert host.store.status().counts["dropped_stores"] == 1


def test_a_folder_that_cannot_be_had_is_a_miss_and_tried_again(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    root.write_text("a file")
    host = Rig(root, FaultyFiles(0))
    try:
        host.until(lambda: host.store.status().is_degraded)
        assert host.finds(1) == (False,)
        assert host.stores(1) == (False,)
        assert host.loads(1) == (False,)
        root.unlink()
        host.until(lambda: not host.store.status().is_degraded)
        assert host.is_scanned.wait(30)
        assert host.stores(1) == (True,)
        assert host.loads(1) == (True,)
    finally:
        assert host.close()
    host.check()


@pytest.mark.parametrize("call", ["pwritev", "rename", "open"])
def test_a_write_that_fails_harms_nothing_that_is_there(tmp_path: Path, call: str) -> None:
    files = FaultyFiles(1)
    # Not one after which it is tried again: a rename that was done all the same is found then.
    files.errors = (errno.EIO,)
    with rig(tmp_path, files) as host:
        host.stores(1)
        files.failing = frozenset({call})
        files.rate = 1.0
        assert host.stores(2) == (False,)
        files.rate = 0.0
        assert host.loads(1) == (True,)
        host.until(lambda: not host.store.status().is_degraded)
        assert host.stores(2) == (True,)
        assert host.loads(2) == (True,)


def test_a_rename_that_was_done_and_failed_all_the_same_is_found(tmp_path: Path) -> None:
    class Late(FaultyFiles):
        def rename(self, *args: Any, **kwargs: Any) -> None:
            super().rename(*args, **kwargs)
            if object_id(1).key.hex() in args[1]:
                raise OSError(errno.ESTALE, "the server's answer was lost")

    with rig(tmp_path, Late(1)) as host:
        assert host.stores(1) == (True,)
        assert host.loads(1) == (True,)


def test_a_read_that_fails_says_nothing_about_the_file(tmp_path: Path) -> None:
    files = FaultyFiles(1)
    with rig(tmp_path, files) as host:
        host.stores(1, 2)
        files.failing = frozenset({"preadv"})
        files.rate = 1.0
        assert host.loads(1) == (False,)
        assert host.loads(2) == (False,)
        assert host.loads(1) == (False,)
        host.until(lambda: host.store.status().is_degraded)  # three in a row
        assert host.finds(1) == (False,)
        files.rate = 0.0
        assert len(on_disk(tmp_path)) == 2
        host.until(lambda: not host.store.status().is_degraded)
        assert host.loads(1, 2) == (True, True)


def test_a_read_that_hangs_ends_as_a_miss_and_never_touches_the_memory(tmp_path: Path) -> None:
    files = FaultyFiles(0)
    with rig(tmp_path, files, io_deadline=0.3) as host:
        host.stores(1)
        files.flow.clear()
        task = host.submit_load([1])
        assert files.waiting.acquire(timeout=30)
        assert host.wait(task) == (False,)  # with the call still out
        assert host.store.status().is_degraded
        assert host.finds(1) == (False,)
        files.flow.set()
        host.until(lambda: host.store.status().figures["hung"] == 0)
        assert host.memory[task][0].content == bytes(NBYTES)
        host.until(lambda: not host.store.status().is_degraded)
        assert host.loads(1) == (True,)


def test_a_write_that_hangs_is_given_up_and_counted_when_it_comes_through(tmp_path: Path) -> None:
    files = FaultyFiles(0)
    with rig(tmp_path, files, io_deadline=0.3) as host:
        host.stores(1)
        files.flow.clear()
        task = host.submit_store([2])
        assert files.waiting.acquire(timeout=30)
        assert host.wait(task) == (False,)
        host.memory[task][0].content[:] = b"x" * NBYTES  # the host's again
        files.flow.set()
        host.until(lambda: not host.store.status().is_degraded)
        host.until(lambda: host.finds(2) == (True,))
        assert host.loads(2) == (True,)


def test_closed_while_a_call_hangs(tmp_path: Path) -> None:
    files = FaultyFiles(0)
    host = Rig(tmp_path, files)
    assert host.is_scanned.wait(30)
    host.stores(1)
    files.flow.clear()
    tasks = [host.submit_load([1]), host.submit_store([2])]
    for _ in tasks:
        assert files.waiting.acquire(timeout=30)
    assert not host.close(0.5)  # threads are left behind
    assert [host.wait(task) for task in tasks] == [(False,), (False,)]
    files.flow.set()
    host.until(lambda: not any(t.name.startswith("tiered-kv-read") for t in threading.enumerate()))
    host.check()


def test_closed_it_waits_for_a_copy(tmp_path: Path) -> None:
    host = Rig(tmp_path, FaultyFiles(0))
    assert host.is_scanned.wait(30)
    memory = HostMemory(payload(1))
    copying, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        copying.set()
        assert go_on.wait(30)

    memory.while_copying = pause
    host.memory[77] = [memory]
    assert host.store.store(77, [Wanted(file_of(1), memory)], {})
    assert copying.wait(30)
    closer = threading.Thread(target=host.close)
    closer.start()
    host.until(lambda: host.store._closing)
    assert 77 not in host.results
    go_on.set()
    closer.join(30)
    assert not closer.is_alive()
    assert 77 in host.results
    host.check()


def test_memory_that_is_no_longer_the_objects_is_not_stored(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        memory = HostMemory(payload(1))
        memory.is_valid = False
        assert host.store.store(77, [Wanted(file_of(1), memory)], {})
        assert host.wait(77) == (False,)
        assert not on_disk(tmp_path)


def test_stores_that_come_too_fast_are_dropped_tail_first(tmp_path: Path) -> None:
    files = FaultyFiles(0)
    with rig(tmp_path, files, max_queued_bytes=3 * NBYTES, writers=1) as host:
        files.flow.clear()
        first = host.submit_store([0])
        assert files.waiting.acquire(timeout=30)
        second = host.submit_store(range(1, 9))
        host.until(lambda: host.store.status().counts["dropped_stores"] > 0)
        files.flow.set()
        assert host.wait(first) == (True,)
        done = host.wait(second)
        kept = done.count(True)
        assert 3 <= kept <= 5  # queued, or with a thread already
        assert done == (True,) * kept + (False,) * (8 - kept)


class HeldScan(FaultyFiles):
    """Folders are listed only once a test lets it; but for the marks, before the scan."""

    def __init__(self) -> None:
        super().__init__(0)
        self.began, self.may_go_on = threading.Event(), threading.Event()
        self._listed_marks = False

    def scandir(self, fd: int) -> Any:
        if not self._listed_marks:
            self._listed_marks = True
            return super().scandir(fd)
        self.began.set()
        assert self.may_go_on.wait(30)
        return super().scandir(fd)


def test_found_while_the_folder_is_being_scanned(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(1)
    files = HeldScan()
    host = Rig(tmp_path, files)
    try:
        assert files.began.wait(30)
        assert host.loads(1) == (True,)  # by its name
        assert host.finds(1) == (True,)
        assert not host.is_scanned.is_set()
        files.may_go_on.set()
        assert host.is_scanned.wait(30)
        assert host.finds(1, 2) == (True, False)
    finally:
        files.may_go_on.set()
        host.close()
    host.check()


def test_what_another_process_writes_is_found_where_that_is_asked_for(tmp_path: Path) -> None:
    with rig(tmp_path, shared=True) as one, rig(tmp_path, shared=True) as other:
        one.stores(1)
        assert other.finds(1, 2) == (True, False)
        assert other.loads(1) == (True,)
    with rig(tmp_path) as one, rig(tmp_path) as other:
        one.stores(2)
        assert other.finds(2) == (False,)  # until the next scan


def test_a_page_of_what_is_there(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(*range(7))
        names = sorted(file_of(n) for n in range(7))
        page = host.store.page((), 3, lambda _: True)
        assert page == [(name, FILE) for name in names[:3]]
        rest = host.store.page(page[-1][0], 10, lambda _: True)
        assert rest == [(name, FILE) for name in names[3:]]
        assert host.store.page((), 10, lambda _: False) == []


def test_a_head_stays_longer_than_its_tail(tmp_path: Path) -> None:
    nbytes = 512 << 10
    with rig(tmp_path, capacity=Size(9 << 20)) as host:
        host.stores(*range(8), nbytes=nbytes)
        host.stores(*range(100, 110), nbytes=nbytes)
        found = host.finds(*range(8))
        kept = found.count(True)
        assert 0 < kept < 8
        assert found == (True,) * kept + (False,) * (8 - kept)


def test_last_uses_are_written_down(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(1, 2)
        before = {file: file.stat().st_mtime_ns for file in on_disk(tmp_path)}
        host.finds(1, 2)
    after = {file: file.stat().st_mtime_ns for file in on_disk(tmp_path)}
    assert all(after[file] > before[file] for file in after)
    head = next(file for file in after if object_id(1).key.hex() in file.name)
    assert after[head] == max(after.values())


def test_layouts_do_not_meet(tmp_path: Path) -> None:
    with rig(tmp_path) as host:
        host.stores(1)
        other = HostMemory(bytes(NBYTES))
        file = file_of(1, LAYOUT.replace("float32", "int32"))
        assert host.store.load(99, [Wanted(file, other)])
        assert host.wait(99) == (False,)
        assert on_disk(tmp_path)  # it is not damaged: it is another one
