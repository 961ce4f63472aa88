# SPDX-License-Identifier: Apache-2.0
"""Agent, keeper and ranks together, with real files: what they do when files misbehave."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.disk._agent import (
    FILE,
    PART,
    SPACE,
    FaultyFiles,
    Rig,
    key_of,
    on_disk,
    payload,
    rig,
)
from tests.unit.disk._files import mode_of
from vllm_tiered_kv import errands
from vllm_tiered_kv.protocol import Direction, JobResult, JobStatus
from vllm_tiered_kv.tiers.disk import agent as agent_module
from vllm_tiered_kv.tiers.disk.chores import Measure
from vllm_tiered_kv.tiers.disk.direct import IoMode
from vllm_tiered_kv.tiers.disk.format import ChunkFacts
from vllm_tiered_kv.tiers.disk.orders import OrderResult, Outcome, Part, RankReport, WriteOrder


def written(engine: Rig, *numbers: int) -> None:
    for number in numbers:
        job = engine.write(key_of(number))
        engine.settle()
        assert job is not None
        assert engine.outcomes[job] is Outcome.DONE


def test_what_is_written_is_read_and_found_by_the_next(tmp_path: Path) -> None:
    with rig(tmp_path, ranks=2) as engine:
        engine.open()
        written(engine, 1, 2)
        assert engine.agent.groups(key_of(1)) == 0b11
        assert len(on_disk(tmp_path)) == 8
        assert engine.close()
    with rig(tmp_path, ranks=2) as engine:
        engine.open()
        assert engine.agent.groups(key_of(2)) == 0b11
        job = engine.read(key_of(2))
        engine.settle()
        assert job is not None
        assert engine.outcomes[job] is Outcome.DONE
        assert not engine.wrong


def test_it_says_how_files_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "vllm.tiered_kv")
    files = FaultyFiles(0)
    for refused in (False, True):
        if refused:  # as on a file system without it
            files.errors, files.failing, files.rate = (errno.EINVAL,), frozenset({"preadv"}), 1.0
        with rig(tmp_path / str(refused), files) as engine:
            engine.open()
    said = [r.getMessage().rpartition("; ")[2] for r in caplog.records if "ready" in r.message]
    direct = mode_of(tmp_path) is IoMode.DIRECT
    ways = ("directly" if direct else "through the page cache", "through the page cache")
    assert said == [f"files are read and written {way}" for way in ways]


def test_uses_are_written_down_at_the_end(tmp_path: Path) -> None:
    with rig(tmp_path) as engine:
        engine.open()
        written(engine, 1)
        file = next(tmp_path.rglob("*.0.kv"))
        before = file.stat().st_mtime_ns
        engine.agent.used_now([key_of(1)])
        engine.ask(lambda: None)
        assert engine.close()
        assert file.stat().st_mtime_ns > before


def test_a_store_is_followed_by_its_write_when_every_rank_has_it(tmp_path: Path) -> None:
    with rig(tmp_path, ranks=2) as engine:
        engine.open()
        done = JobResult(7, Direction.STORE, JobStatus.DONE)
        for rank in (0, 1):
            for slot in (0, 1):
                view = engine.view(rank, slot, PART)
                assert view is not None
                view[:] = payload(key_of(7), rank, slot)
        order = WriteOrder(7, key_of(7), (Part(0, 0), Part(1, 1)), ChunkFacts((), 1, 0, 16), 0)
        assert engine.agent.expect(order)
        engine.orders[7] = order
        engine.executors[0].stored(done)
        engine.executors[0].stored(done)
        engine.ask(lambda: None)
        assert 7 in engine.agent._claims
        engine.executors[1].stored(done)
        engine.settle()
        assert engine.outcomes[7] is Outcome.DONE
        assert not engine.agent.settle(7, good=False)
        assert len(on_disk(tmp_path)) == 4


def test_a_store_that_is_not_trusted_is_not_written(tmp_path: Path) -> None:
    with rig(tmp_path) as engine:
        engine.open()
        order = WriteOrder(7, key_of(7), (Part(0, 0),), ChunkFacts((), 1, 0, 16), 0)
        assert engine.agent.expect(order)
        assert engine.agent.settle(7, good=False)
        engine.executors[0].stored(JobResult(7, Direction.STORE, JobStatus.DONE))
        engine.ask(lambda: None)
        assert not on_disk(tmp_path)


def test_claims_are_bounded(tmp_path: Path) -> None:
    with rig(tmp_path, max_queued=2) as engine:
        orders = [
            WriteOrder(i, key_of(i), (Part(0, 0),), ChunkFacts((), 1, 0, 16), 0) for i in range(3)
        ]
        assert [engine.agent.expect(order) for order in orders] == [True, True, False]


def test_nothing_is_offered_from_the_call_on(tmp_path: Path) -> None:
    """The agent's thread may come to it later: it is held here."""
    for say in (lambda e: e.agent.close(), lambda e: e.agent.purge()):
        with rig(tmp_path / str(say)) as engine:
            engine.open()
            written(engine, 1)
            held, go_on = threading.Event(), threading.Event()
            engine.agent._errands.insist(lambda h=held, g=go_on: (h.set(), g.wait(30)))
            assert held.wait(30)
            say(engine)
            assert engine.agent.groups(key_of(1)) == 0
            assert not engine.agent.is_readable
            go_on.set()


def test_one_bad_report_does_not_cost_the_next(tmp_path: Path) -> None:
    with rig(tmp_path) as engine:
        engine.open()
        engine.agent._tier.report = lambda report, real=engine.agent._tier.report: (  # type: ignore[method-assign]
            real(report) if report.rank == 0 else 1 / 0
        )
        engine.executors[0]._send(RankReport(5, (OrderResult(1, Outcome.DONE),)))
        written(engine, 1)
        assert engine.failures["internal"] == 1


def test_too_much_to_do_is_a_miss_and_the_end_still_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rig(tmp_path) as engine:
        engine.open()
        written(engine, 1)
        monkeypatch.setattr(errands, "MAX_ERRANDS", 0)
        assert engine.write(key_of(2)) is None
        assert engine.read(key_of(1)) is None
        engine.agent.close()
        assert engine.ask(lambda: engine.agent._tier.is_degraded)
        assert engine.close()


@pytest.mark.parametrize("thread", ["keeper", "ranks"])
def test_the_end_comes_although_a_file_call_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    monkeypatch.setattr(agent_module, "CLOSE_TIMEOUT", 0.2)
    files = FaultyFiles(0)
    with rig(tmp_path, files) as engine:
        if thread == "ranks":
            engine.open()
        files.flow.clear()
        if thread == "ranks":
            engine.write(key_of(1))
        else:
            engine.agent.open(SPACE, {})
        assert files.waiting.acquire(timeout=30)
        engine.agent.shutdown()
        patience = 0.2 if thread == "ranks" else 30.0
        ended = [executor.close(patience) for executor in engine.executors]
        assert ended == [thread == "keeper"]
        files.flow.set()
        for t in (*engine.executors[0]._threads, engine.agent._keeper._thread):
            t.join(30)
            assert not t.is_alive()


def test_a_hung_call_degrades_the_tier_and_its_return_heals_it(tmp_path: Path) -> None:
    files = FaultyFiles(0)
    with rig(tmp_path, files, io_deadline=0.3) as engine:
        engine.open()
        written(engine, 1)
        files.flow.clear()
        job = engine.read(key_of(1))
        engine.wait(lambda: not engine.agent.is_readable, "nobody noticed")
        assert job not in engine.outcomes
        files.flow.set()
        engine.settle()
        engine.wait(lambda: not engine.agent.is_degraded, "it does not work again")
        written(engine, 2)


def test_a_folder_that_is_deleted_is_made_anew(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with rig(root) as engine:
        engine.open()
        written(engine, 1)
        shutil.rmtree(root)
        job = engine.read(key_of(1))
        engine.settle()
        assert job is not None
        assert engine.outcomes[job] is not Outcome.DONE
        engine.wait(lambda: not engine.agent.is_degraded, "it does not work again")
        written(engine, 2)
        assert len(on_disk(root)) == 2


def test_what_another_model_uses_outlives_what_nobody_does(tmp_path: Path) -> None:
    with rig(tmp_path) as engine, rig(tmp_path) as other:
        other.agent.open("another-1", {})
        other.wait(lambda: other.agent.is_readable, "it did not open")
        written(other, 1, 2)
        for path in (tmp_path / "another-1").rglob("*.kv"):
            os.utime(path, ns=(1, 1))  # it was long ago
        engine.open()
        written(engine, *range(5))
        other.read(key_of(1))
        other.settle()
        engine.rescan()
        written(engine, *range(5, 18))
        engine.wait(lambda: not engine.agent._tier._removal._leaving, "files never leave")
        assert engine.agent.evicted
        left = {path.name[: len(key_of(0).hex())] for path in tmp_path.glob("another-1/*/*/*.kv")}
        assert left == {key_of(1).hex()}


class SmallFiles(FaultyFiles):
    """A file system of so many bytes: what does not fit is not written."""

    def __init__(self, root: Path, size: int) -> None:
        super().__init__(0)
        self.root, self.size = root, size

    @property
    def free(self) -> int:
        return self.size - sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if sum(buffer.nbytes for buffer in buffers) > self.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwritev(fd, buffers, offset)

    def statvfs(self, fd: int) -> Any:
        return SimpleNamespace(f_blocks=self.size, f_bavail=self.free, f_frsize=1)


def test_a_file_system_that_others_fill_is_read_and_its_chunks_make_room(tmp_path: Path) -> None:
    files = SmallFiles(tmp_path, 40 * FILE)
    with rig(tmp_path, files, min_free=8 * FILE) as engine:
        engine.open()
        written(engine, *range(10))
        (tmp_path / "others").write_bytes(bytes(files.free))
        job = engine.write(key_of(20))
        engine.settle()
        assert job is not None
        assert engine.outcomes[job] is Outcome.FAILED
        engine.wait(lambda: files.free >= 8 * FILE, "no room is made")
        engine.wait(lambda: not engine.agent.is_degraded, "it does not work again")
        written(engine, 21)
        assert engine.close()
        assert len(on_disk(tmp_path)) <= 12

        left = len(on_disk(tmp_path))
        (tmp_path / "others").write_bytes(bytes(files.size))  # what was free, and more
        with rig(tmp_path, files, min_free=1) as second:  # it begins like that
            second.open()
            assert second.agent.is_degraded
            assert not second.agent.is_writable
            job = second.read(key_of(21))
            second.settle()
            assert job is None or second.outcomes[job] is not Outcome.FAILED
            second.wait(lambda: len(on_disk(tmp_path)) < left, "nothing goes")
            (tmp_path / "others").unlink()
            second.wait(lambda: second.agent.is_writable, "it does not work again")
            written(second, 22)
            assert not second.wrong


def test_files_beyond_a_smaller_capacity_go_without_a_request(tmp_path: Path) -> None:
    with rig(tmp_path) as engine:
        engine.open()
        written(engine, *range(10))
        smaller = engine.agent.settings.capacity - 25 * FILE
        assert engine.close()
    with rig(tmp_path, capacity=smaller) as engine:
        engine.open()
        engine.wait(lambda: engine.agent.used <= smaller and engine.agent.evicted, "too much")
        engine.wait(lambda: not engine.agent._tier._removal._leaving, "files never leave")
        assert sum(on_disk(tmp_path).values()) == engine.catalogue.used <= smaller


def test_what_may_be_wrong_is_removed_before_the_end(tmp_path: Path) -> None:
    """The next start would offer it."""
    files = FaultyFiles(0)
    with rig(tmp_path, files) as engine:
        engine.open()
        written(engine, *range(8))
        files.holding = frozenset({"statvfs"})
        files.flow.clear()
        keeper = engine.agent._keeper
        assert keeper.ask(Measure())
        assert files.waiting.acquire(timeout=30)
        engine.agent.purge()
        engine.ask(lambda: None)
        ending = threading.Thread(target=engine.agent.shutdown)
        ending.start()
        engine.wait(lambda: keeper._closing, "it does not end")
        files.flow.set()
        ending.join(30)
        keeper._thread.join(30)
        assert not on_disk(tmp_path)
