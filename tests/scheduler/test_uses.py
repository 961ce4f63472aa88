# SPDX-License-Identifier: Apache-2.0
"""What a policy is told: a request is one use of each chunk it finds, and adds what it does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.disks import disk, opened
from tests.scheduler.sim import Sim, prompt
from vllm_tiered_kv.policies.lru import LRU

Make = Callable[..., Sim]
CHUNKS = 6
TOKENS = CHUNKS * 16 + 4


class Told(LRU[Any]):
    """An order of eviction that keeps what it was told of each chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Counter[bytes] = Counter()
        self.sizes: dict[bytes, int] = {}
        self.grown = 0

    def add(self, key: Any, item: Any) -> None:
        self.told[getattr(key, "key", key)] += 1
        self.sizes[key] = item.nbytes
        super().add(key, item)

    def use(self, keys: Iterable[Any]) -> None:
        keys = list(keys)
        self.told.update(getattr(key, "key", key) for key in keys)
        super().use(keys)

    def renew(self, keys: Iterable[Any]) -> None:
        super().use(keys)

    def resize(self, key: Any, nbytes: int) -> None:
        self.grown += nbytes > self.sizes[key]
        self.sizes[key] = nbytes

    def take(self) -> list[int]:
        counts = sorted(self.told.values())
        self.told.clear()
        return counts


def watched(engine: Sim) -> tuple[Told, Told]:
    """The policies of both tiers, before anything is stored; what lies on disk is in already."""
    index, catalogue = engine.half.core.index, engine.half.core.disk.agent._catalogue
    index._policy, old, catalogue._policy = Told(), catalogue._policy, Told()
    for key in getattr(old, "_order", ()):
        catalogue._policy._order[key] = None
    return index._policy, catalogue._policy


ONCE = [1] * CHUNKS


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("windows", [(0,), (0, 0)], ids=["one group", "two groups"])
def test_a_request_is_one_use_wherever_its_chunks_are_found(
    sim: Make, tmp_path: Path, windows: tuple[int, ...], ranks: int
) -> None:
    options = {"extra": disk(tmp_path), "windows": windows, "ranks": ranks}
    engine = opened(sim(**options))
    cpu, on_disk = watched(engine)

    def takes() -> tuple[list[int], list[int]]:
        engine.settle()
        return cpu.take(), on_disk.take()

    engine.complete("computed", prompt(TOKENS), 2)
    assert takes() == (ONCE, ONCE)
    engine.complete("on the device", prompt(TOKENS), 2)
    assert takes() == (ONCE, ONCE)
    engine.flush_device()
    engine.complete("in the cpu tier", prompt(TOKENS), 2)
    assert engine.counter("hit_tokens", "cpu") == CHUNKS * 16
    assert takes() == (ONCE, ONCE)
    engine.close()
    engine = opened(sim(**options))
    cpu, on_disk = watched(engine)
    engine.complete("on disk", prompt(TOKENS), 2)
    assert engine.counter("hit_tokens", "disk") == CHUNKS * 16
    assert takes() == (ONCE, ONCE)
    engine.check_quiet()


def test_a_request_that_is_preempted_and_loaded_again_uses_nothing_twice(
    sim: Make, tmp_path: Path
) -> None:
    engine = opened(sim(extra=disk(tmp_path), num_blocks=16, enable_prefix_caching=False))
    cpu, on_disk = watched(engine)
    for i in range(2):
        engine.add(f"r{i}", prompt(TOKENS, i), 60)
    while engine.busy:
        engine.advance()
        engine.settle()  # a store that a preemption voids is another use of its chunk later
    assert sum(request.num_preemptions for request in engine.requests.values()) > 0
    assert engine.counter("hit_tokens", "cpu") > 0
    assert set(cpu.take()) == {1}
    assert set(on_disk.take()) == {1}


def test_the_head_of_a_prefix_that_was_written_is_not_older_than_its_tail(
    sim: Make, tmp_path: Path
) -> None:
    engine = opened(sim(extra=disk(tmp_path)))
    _, on_disk = watched(engine)
    for i in range(3):
        engine.complete(f"r{i}", prompt(TOKENS, i), 2)
        engine.settle()  # its writes have ended before the next prompt's are used
    order = list(on_disk._order)
    places = {node.key: node.position for node in engine.half.core.index._nodes.values()}
    assert [places[key] for key in order] == [*reversed(range(CHUNKS))] * 3


def test_a_chunk_that_is_given_another_part_has_grown(sim: Make, tmp_path: Path) -> None:
    engine = opened(sim(extra=disk(tmp_path), windows=(0, 40)))
    cpu, on_disk = watched(engine)
    for i in range(3):
        engine.complete(f"r{i}", prompt(TOKENS + 7 * i), 2)
    engine.settle()
    nodes = engine.half.core.index._nodes.values()
    assert cpu.sizes == {node: node.num_slots for node in nodes}
    own = engine.half.core.disk.agent._catalogue._own
    assert on_disk.sizes == {key: chunk.nbytes for key, chunk in own.items()}
    assert on_disk.grown
