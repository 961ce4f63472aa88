# SPDX-License-Identifier: Apache-2.0
"""Folders as no tier has left them, and calls that do not return: serving goes on, and ends."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.disk._agent import (
    FILE,
    SPACE,
    FaultyFiles,
    Rig,
    key_of,
    on_disk,
    rig,
)
from vllm_tiered_kv.tiers.disk import agent as agent_module
from vllm_tiered_kv.tiers.disk import keeper as keeper_module
from vllm_tiered_kv.tiers.disk.orders import Outcome
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES, FOLDER_BYTES

KEY = key_of(1)
CHUNK = f"{SPACE}/r0/{KEY.hex()[:2]}/{KEY.hex()}.0.kv"


def works(engine: Rig, key: bytes = KEY) -> bool:
    """Whether a chunk can be written and read."""
    for ask in (engine.write, engine.read):
        job = ask(key)
        engine.settle()
        if job is None or engine.outcomes[job] is not Outcome.DONE:
            return False
    assert not engine.wrong
    return True


# -- what lies there at start --------------------------------------------------------------


def file(path: Path) -> None:
    path.write_bytes(b"mine")


def huge(path: Path) -> None:
    with path.open("wb") as opened:
        opened.truncate(1 << 40)


def old(path: Path) -> None:
    path.write_bytes(bytes(FILE))
    os.utime(path, ns=(-(10**18), -(10**18)))


def from_the_future(path: Path) -> None:
    path.write_bytes(bytes(FILE))
    os.utime(path, ns=(10**19, 10**19))


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def unreadable(path: Path) -> None:
    path.write_bytes(bytes(FILE))
    path.chmod(0)


def socket(path: Path) -> None:
    os.mknod(path, 0o600 | stat.S_IFSOCK)


THINGS = [file, huge, old, from_the_future, link, loop, unreadable, socket, os.mkfifo, os.mkdir]
PLACES = [
    CHUNK,
    CHUNK.replace(".0.kv", ".63.kv"),
    CHUNK.replace(".0.kv", ".65535.kv"),
    f"{SPACE}/identity.json",
    f"{SPACE}/r0/tmp/{'1' * 24}.tmp",
    f"{SPACE}/identity-{'1' * 24}.tmp",
    f"{SPACE}/r0/zz",
    f"{SPACE}/r65535",
    f"{SPACE}/r99999",
    "another-1/identity.json",
    "another-1/r0",
    "..kv",
    "x" * 255,
    os.fsdecode(b"\xff\xfe"),
    "UPPER",
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda make: str(make.__name__))
def test_a_thing_in_any_place_keeps_nobody_from_working(
    tmp_path: Path, thing: Callable[[Path], object]
) -> None:
    for place in PLACES:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        thing(tmp_path / place)
    with rig(tmp_path, capacity=(1 << 50)) as engine:
        engine.open()
        assert works(engine, key_of(2))
        works(engine, KEY)  # its file may be a folder
        engine.rescan()
        assert works(engine, key_of(3))
        assert not engine.agent.is_degraded
        assert not engine.failures["internal"]


def test_a_folder_with_very_many_entries_that_are_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / SPACE / "r0" / "tmp"
    folder.mkdir(parents=True)
    for i in range(20_000):
        os.close(os.open(folder / f"{i}.x", os.O_CREAT | os.O_WRONLY))
    with rig(tmp_path) as engine:
        engine.open()
        assert works(engine)
        assert not engine.failures["disk_hung"]
    assert len(list(folder.glob("*.x"))) == 20_000


ROOTS: dict[str, Callable[[Path], object]] = {
    "a file": file,
    "a loop": loop,
    "a pipe": os.mkfifo,
    "a dangling link": lambda path: path.symlink_to("nowhere/at/all"),
    "the namespace is a file": lambda path: (path.mkdir(), file(path / SPACE)),
    "the namespace is a link": lambda path: (path.mkdir(), (path / SPACE).symlink_to("/tmp")),
    "the rank is a file": lambda path: (
        (path / SPACE).mkdir(parents=True),
        file(path / SPACE / "r0"),
    ),
    "tmp is a link": lambda path: (
        (path / SPACE / "r0").mkdir(parents=True),
        (path / SPACE / "r0" / "tmp").symlink_to("/tmp"),
    ),
}


@pytest.mark.parametrize("how", ROOTS)
def test_a_folder_that_cannot_be_used_degrades_the_tier_until_it_can(
    tmp_path: Path, how: str
) -> None:
    root = tmp_path / "root"
    ROOTS[how](root)
    before = set(Path("/tmp").glob("*.tmp"))
    with rig(root) as engine:
        engine.agent.open(SPACE, {})
        for number in range(20):  # it may open, and find out with the first writes
            if engine.agent.is_degraded:
                break
            engine.write(key_of(number))
            engine.settle()
            engine.wait(lambda: engine.agent.is_degraded or engine.agent.is_readable, "neither")
        assert engine.agent.is_degraded
        for path in (root, root / SPACE, root / SPACE / "r0", root / SPACE / "r0" / "tmp"):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                path.unlink()
        engine.wait(lambda: engine.agent.is_readable and not engine.agent.is_degraded, "not healed")
        assert works(engine)
        assert not engine.failures["internal"]
    if "/tmp" in how or "link" in how:
        assert set(Path("/tmp").glob("*.tmp")) <= before


# -- calls that do not return --------------------------------------------------------------

HELD = ["open", "close", "stat", "fstat", "preadv", "pwritev", "rename", "unlink", "scandir"]
HELD += ["utime", "statvfs", "mkdir"]


@pytest.mark.parametrize("call", HELD)
def test_the_end_comes_although_any_call_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(agent_module, "CLOSE_TIMEOUT", 0.2)
    monkeypatch.setattr(keeper_module, "BREATH", 0.0)
    files = FaultyFiles(0)
    with rig(tmp_path, files) as engine:
        engine.open()
        assert works(engine)
        threads = [t for executor in engine.executors for t in executor._threads]
        threads += [engine.agent._keeper._thread, engine.agent._thread]
        files.holding = frozenset({call})
        files.flow.clear()
        for i in range(30):
            engine.write(key_of(i))
            engine.read(KEY)
            engine.agent.used_now([KEY])
        engine.agent.purge()
        tier = engine.agent._tier
        engine.agent._errands.insist(lambda: tier._begin_scan(0.0))
        engine.agent._errands.insist(tier.flush)
        engine.agent._errands.insist(lambda: setattr(tier._upkeep, "_measure_at", 0.0))
        assert files.waiting.acquire(timeout=60)
        assert all(thread.is_alive() for thread in threads)
        engine.agent.shutdown()
        for executor in engine.executors:
            executor.close(0.2)
        files.flow.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), thread
        assert not engine.failures["internal"]


# -- two engines on one folder -------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[Rig]]:
    capacity = 20 * (FILE + ENTRY_BYTES) + FOLDER_BYTES + (1 << 14)
    with (
        rig(tmp_path, capacity=capacity, shared=True) as one,
        rig(tmp_path, capacity=capacity, shared=True) as other,
    ):
        yield [one, other]


def test_two_engines_evict_from_one_folder_at_once(tmp_path: Path, pair: list[Rig]) -> None:
    for engine in pair:
        engine.open()

    def use(engine: Rig, first: int) -> None:
        for i in range(60):
            for key in (key_of((first + i) % 100), key_of(i % 10)):
                engine.write(key)
                engine.settle()
                engine.read(key)
                engine.settle()

    threads = [threading.Thread(target=use, args=(e, 50 * i)) for i, e in enumerate(pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    capacity = pair[0].agent.settings.capacity
    assert sum(on_disk(tmp_path).values()) <= 2 * capacity  # each keeps it by what it has seen
    for engine in pair:
        engine.rescan()
        engine.wait(lambda engine=engine: engine.agent.used <= capacity, "too much")
        engine.wait(lambda engine=engine: not engine.agent._tier._removal._leaving, "never ends")
        assert engine.agent.evicted
        assert not engine.wrong
        assert not engine.failures["internal"]
        assert works(engine)
    assert sum(on_disk(tmp_path).values()) <= capacity
    assert not list(tmp_path.rglob("*.tmp"))
