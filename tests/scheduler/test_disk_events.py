# SPDX-License-Identifier: Apache-2.0
"""KV events of the disk tier: who reads only them knows what the engine could read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored

from tests._kv_subscriber import CPU, STORAGE
from tests.scheduler.disks import disk, files
from tests.scheduler.manual import ManualSim, Pace
from tests.scheduler.sim import BLOCK, prompt
from tests.scheduler.test_events import Watched
from vllm_tiered_kv.tiers.disk import catalogue
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES

FILE_BYTES = 8192


class WatchedDisk(Watched):
    """An engine with a disk tier, and what its events say of it."""

    engine: ManualSim

    def __init__(self, root: Path, **options: Any) -> None:
        given = {"extra": disk(root, **options.pop("disk", {})), **options}
        super().__init__(lambda **kw: ManualSim(**given, **kw))
        self.tick()
        self.engine.let_through()
        assert self.engine.agent.is_readable

    @property
    def disk_log(self) -> Any:
        return self.engine.half.core.disk.events.log

    def on_disk(self, group: int = 0) -> set[Any]:
        """Published names of what can be read of the requests of this engine."""
        core = self.engine.half.core
        count = core.geometry.hashes_per_chunk
        held = set()
        for request in self.engine.requests.values():
            hashes = request.block_hashes
            for end in range(count, len(hashes) + 1, count):
                if core.disk.agent.groups(hashes[end - 1]) >> group & 1:
                    held.update(int.from_bytes(h[-8:], "big") for h in hashes[end - count : end])
        return held

    def catch_up(self) -> None:
        self.engine.let_through()
        super().catch_up()
        for _ in range(1000):
            told = self.disk_log._told.values()
            if not len(self.disk_log) and all(t.epoch == self.disk_log._epoch for t in told):
                return
            self.tick()
        raise AssertionError("events are left over")

    def check_disk(self) -> None:
        """All that was written or used here is known, and nothing that is not there."""
        self.check()
        for group in range(len(self.engine.ranks[0].windows)):
            assert self.exact.held(STORAGE, group) == self.on_disk(group)
            assert self.forgetful.held(STORAGE, group) <= self.on_disk(group)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., WatchedDisk]]:
    made: list[WatchedDisk] = []

    def make(**options: Any) -> WatchedDisk:
        made.append(WatchedDisk(tmp_path, **options))
        return made[-1]

    yield make
    for watched in made:
        watched.engine.close()


def small(chunks: int) -> dict[str, Any]:
    """A folder that holds about so many chunks."""
    return {"capacity": int((FOLDER_BYTES + chunks * FILE_BYTES) / 0.95)}


@pytest.mark.parametrize("chunk_blocks", [1, 3])
@pytest.mark.parametrize("windows", [(0,), (0, 40)])
def test_what_is_written_is_published_with_the_devices_names(
    watch: Any, chunk_blocks: int, windows: tuple[int, ...]
) -> None:
    watched = watch(chunk_blocks=chunk_blocks, windows=windows, num_blocks=96)
    watched.engine.complete("a", prompt(12 * BLOCK + 3), 2)
    watched.check_disk()
    assert len(watched.exact.held(STORAGE)) == 12
    assert watched.exact.held(STORAGE) == watched.exact.held(CPU)


def test_nothing_is_published_before_it_is_written(watch: Any) -> None:
    watched = watch()
    engine = watched.engine
    engine.pace = Pace.NONE
    engine.complete("a", prompt(6 * BLOCK))
    for lane in engine.lanes:
        lane.finish()
    engine._deliver()
    watched.tick()
    assert watched.exact.held(CPU)
    assert not watched.exact.held(STORAGE)
    watched.check_disk()
    assert len(watched.exact.held(STORAGE)) == 6


def test_after_a_restart_chunks_are_announced_when_they_are_used(watch: Any) -> None:
    before = watch()
    before.engine.complete("a", prompt(6 * BLOCK))
    before.engine.complete("b", prompt(6 * BLOCK, 2))
    before.check_disk()
    before.engine.close()
    watched = watch()
    watched.catch_up()
    assert not watched.exact.held(STORAGE)
    watched.engine.complete("a again", prompt(6 * BLOCK))
    watched.check_disk()
    assert len(watched.exact.held(STORAGE)) == 6
    told = watched.events(BlockStored, STORAGE)
    watched.engine.complete("and again", prompt(6 * BLOCK))
    watched.check_disk()
    assert watched.events(BlockStored, STORAGE) == told  # once is enough


def test_what_is_evicted_from_the_folder_is_taken_back(watch: Any) -> None:
    watched = watch(disk=small(10))
    for i in range(4):
        watched.engine.complete(f"r{i}", prompt(6 * BLOCK, i))
        watched.engine.let_through()
    watched.check_disk()
    assert watched.engine.counter("chunks", "evicted", "disk") > 0
    assert 0 < len(watched.exact.held(STORAGE)) <= 10
    assert len(watched.exact.held(CPU)) == 24


def test_a_file_that_is_damaged_or_gone_is_taken_back(watch: Any, tmp_path: Path) -> None:
    watched = watch(capacity_chunks=8)
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check_disk()
    first, second, *_ = files(tmp_path)
    first.unlink()
    second.write_bytes(b"")
    watched.engine.complete("b", prompt(8 * BLOCK, 2), params={"tiered_kv": {"load": False}})
    watched.engine.let_through()
    watched.engine.flush_device()
    watched.engine.complete("a again", prompt(6 * BLOCK), params={"tiered_kv": {"store": False}})
    watched.check_disk()
    assert watched.exact.removed


def test_what_is_gone_unnoticed_is_found(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """More has gone than is noted one by one: all that was announced is looked at again."""
    monkeypatch.setattr(catalogue, "MAX_GONE", 2)
    watched = watch(disk=small(10))
    for i in range(4):
        watched.engine.complete(f"r{i}", prompt(6 * BLOCK, i))
        watched.engine.let_through()
    watched.check_disk()
    assert watched.engine.counter("chunks", "evicted", "disk") > 2


def test_a_reset_takes_all_back(watch: Any) -> None:
    watched = watch()
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check_disk()
    assert watched.exact.held(STORAGE)
    assert watched.engine.scheduler.reset_prefix_cache(reset_connector=True)
    watched.engine.complete("again", prompt(6 * BLOCK))
    watched.check_disk()
    assert not watched.exact.held(STORAGE)


def test_a_reset_of_the_device_alone_takes_back_nothing_of_the_folder(watch: Any) -> None:
    watched = watch()
    watched.engine.complete("a", prompt(6 * BLOCK))
    watched.check_disk()
    held = watched.exact.held(STORAGE)
    watched.engine.flush_device()
    watched.check_disk()
    assert watched.exact.held(STORAGE) == held
    assert not watched.forgetful.held(STORAGE)
    watched.engine.complete("again", prompt(6 * BLOCK))
    watched.check_disk()
    assert watched.forgetful.held(STORAGE) == held


@pytest.mark.parametrize("windows", [(0,), (0, 48)])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(watch: Any, seed: int, windows: tuple[int, ...]) -> None:
    rng = random.Random(f"{seed} {windows}")
    watched = watch(
        windows=windows,
        chunk_blocks=rng.choice([1, 2, 3]),
        num_blocks=96,
        capacity_chunks=rng.choice([12, 30]),
        disk=small(rng.choice([12, 40, 200])),
    )
    watched.disk_log._max_removed_hashes = rng.choice([3, 4096])
    engine = watched.engine
    for i in range(40):
        text = prompt(20 * BLOCK, seed=rng.randrange(5))[: rng.randrange(BLOCK, 20 * BLOCK)]
        engine.add(f"r{i}", text + prompt(3, seed=rng.randrange(100, 103)), rng.randrange(1, 30))
        for _ in range(rng.randrange(6)):
            if engine.scheduler.has_requests():
                engine.step()
                engine.pause()
        if rng.random() < 0.1:
            engine.scheduler.reset_prefix_cache()
        if rng.random() < 0.2:
            engine.run()
            engine.let_through()
            watched.catch_up()
            for group in range(len(windows)):
                assert watched.exact.held(STORAGE, group) <= watched.on_disk(group)
    engine.run()
    watched.catch_up()
    for group in range(len(windows)):
        assert watched.exact.held(STORAGE, group) <= watched.on_disk(group)
    assert watched.exact.named[STORAGE]
    engine.check_quiet()
