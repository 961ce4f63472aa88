# SPDX-License-Identifier: Apache-2.0
"""A slow disk: no file call is made by the engine's own threads, and no look-up holds others up."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.disks import disk, files, opened, wait_until
from tests.scheduler.sim import Sim, prompt
from tests.unit.disk._files import CALLS
from vllm_tiered_kv.tiers.disk import open as opening
from vllm_tiered_kv.tiers.disk.files import Files

CALL = 0.05
"""Seconds each call takes."""
OURS = ("tiered-kv-keeper", "tiered-kv-read", "tiered-kv-write", "tiered-kv-orders")


class SlowFiles(Files):
    """Counts calls by the thread that makes them; can be held."""

    def __init__(self) -> None:
        self.threads: Counter[str] = Counter()
        self.flow = threading.Event()
        self.flow.set()


def _slow(name: str) -> Callable[..., Any]:
    def call(self: SlowFiles, *args: Any, **kwargs: Any) -> Any:
        self.threads[threading.current_thread().name] += 1
        time.sleep(CALL)
        assert self.flow.wait(60)
        return getattr(super(SlowFiles, self), name)(*args, **kwargs)

    return call


for _name in CALLS:
    setattr(SlowFiles, _name, _slow(_name))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowFiles:
    made = SlowFiles()
    monkeypatch.setattr(opening, "open_files", lambda: made)
    return made


def engine_with(sim: Callable[..., Sim], slow: SlowFiles, root: Path) -> Sim:
    engine = sim(extra=disk(root))
    for rank in engine.ranks:
        rank.tiered._worker._open_files = lambda: slow
    return opened(engine)


def test_no_file_call_is_made_on_a_thread_of_the_engine(
    sim: Callable[..., Sim], slow: SlowFiles, tmp_path: Path
) -> None:
    engine = engine_with(sim, slow, tmp_path)
    engine.complete("cold", prompt(40), 2)
    engine.settle()
    wait_until(lambda: len(files(tmp_path)) == 2, "nothing was written")
    engine.close()
    engine = engine_with(sim, slow, tmp_path)
    engine.complete("warm", prompt(40), 2)
    engine.settle()
    assert engine.counter("hit_tokens", "disk") == 32
    engine.check_quiet()
    engine.close()
    assert slow.threads
    assert not [name for name in slow.threads if not name.startswith(OURS)]
    assert all(any(name.startswith(ours) for name in slow.threads) for ours in OURS[:3])


def test_others_are_served_while_one_waits_for_the_disk(
    sim: Callable[..., Sim], slow: SlowFiles, tmp_path: Path
) -> None:
    engine = engine_with(sim, slow, tmp_path)
    engine.complete("cold", prompt(40), 2)
    engine.settle()
    wait_until(lambda: len(files(tmp_path)) == 2, "nothing was written")
    engine.close()
    engine = engine_with(sim, slow, tmp_path)
    engine.complete("connects", [1], 1)
    slow.flow.clear()
    engine.add("waits", prompt(40), 2)
    engine.add("other", prompt(30, 9), 2)
    for _ in range(50):
        engine.advance()
    assert engine.outputs["other"] == engine.expected("other")
    assert not engine.outputs["waits"]
    slow.flow.set()
    engine.run()
    engine.settle()
    assert engine.outputs["waits"] == engine.expected("waits")
    assert engine.counter("hit_tokens", "disk") == 32
    engine.check_quiet()
