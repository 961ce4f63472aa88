# SPDX-License-Identifier: Apache-2.0
"""What a look-up waits for on disk, and what becomes of it: every file is read by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput

from tests.scheduler.disks import disk, files
from tests.scheduler.manual import ManualSim, Pace
from tests.scheduler.sim import BLOCK, prompt
from vllm_tiered_kv.tiers.disk.orders import Outcome

Make = Callable[..., ManualSim]


@pytest.fixture
def sim(tmp_path: Path) -> Iterator[Make]:
    """Makes engines of one folder; ``disk_options`` are those of the tier."""
    made: list[ManualSim] = []

    def make(disk_options: dict[str, Any] | None = None, **options: Any) -> ManualSim:
        extra = {**disk(tmp_path, **(disk_options or {})), **options.pop("extra", {})}
        engine = ManualSim(extra=extra, **options)
        made.append(engine)
        engine.complete("opens", [1], 1)
        engine.let_through()
        assert engine.agent.is_readable
        return engine

    yield make
    for engine in made:
        engine.close()


def fill(make: Make, *prompts: list[int], **options: Any) -> None:
    """An engine that leaves these prompts in the folder and ends."""
    engine = make(**options)
    for i, tokens in enumerate(prompts):
        engine.complete(f"fill {i}", tokens, 1)
        engine.let_through()
    engine.check_quiet()
    engine.close()


def hold(engine: ManualSim) -> None:
    """Step until look-ups wait for files that nobody has read."""
    engine.pace = Pace.NONE
    for _ in range(4):
        engine.step()
    engine.agent.think()


def queued(engine: ManualSim) -> int:
    return sum(len(executor.orders) for executor in engine.agent.executors.values())


def go_on(engine: ManualSim) -> None:
    engine.pace = Pace.ALL
    engine.let_through()
    engine.run()
    engine.let_through()


def disk_tokens(engine: ManualSim) -> float:
    return engine.counter("hit_tokens", "disk")


def test_requests_of_one_prefix_share_its_reads(sim: Make) -> None:
    fill(sim, prompt(100))
    engine = sim()
    for i in range(3):
        engine.add(f"r{i}", [*prompt(96), 5 + i])
    hold(engine)
    assert queued(engine) == 6
    go_on(engine)
    assert engine.counter("chunks", "loaded", "disk") == 6
    assert disk_tokens(engine) == 96
    engine.check_quiet()


def test_what_one_request_gives_up_is_still_read_for_another(sim: Make) -> None:
    fill(sim, prompt(100))
    engine = sim()
    engine.add("first", prompt(100))
    engine.add("second", [*prompt(96), 7])
    hold(engine)
    engine.abort("first")
    engine.agent.think()
    go_on(engine)
    assert engine.counter("chunks", "loaded", "disk") == 6
    assert engine.hit_tokens + disk_tokens(engine) == 96
    engine.check_quiet()


def test_an_abort_calls_its_reads_off(sim: Make) -> None:
    fill(sim, prompt(100))
    engine = sim()
    engine.add("r", prompt(100))
    hold(engine)
    engine.abort("r")
    go_on(engine)
    assert engine.counter("chunks", "loaded", "disk") == 0
    engine.check_quiet()


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.DROPPED])
def test_a_read_that_fails_shortens_the_hit(sim: Make, outcome: Outcome) -> None:
    fill(sim, prompt(100))
    engine = sim()
    engine.add("r", prompt(100), 4)
    hold(engine)
    engine.agent.executors[0].do(3, outcome)
    go_on(engine)
    assert disk_tokens(engine) == 3 * BLOCK
    assert engine.outputs["r"] == engine.expected("r")
    engine.check_quiet()


def test_a_look_up_does_not_wait_for_ever(sim: Make) -> None:
    fill(sim, prompt(100))
    engine = sim()
    engine.add("r", prompt(100), 4)
    hold(engine)
    for _ in range(2):
        engine.agent.executors[0].do(0)
    engine.agent.hear(0)
    engine.agent.hear(0)
    engine.now += 11
    engine.step()
    assert queued(engine) == 4
    assert engine.requests["r"].num_computed_tokens == 2 * BLOCK
    go_on(engine)
    assert engine.outputs["r"] == engine.expected("r")
    assert disk_tokens(engine) == 2 * BLOCK
    engine.check_quiet()


@pytest.mark.parametrize("capacity", [4, 6, 12])
def test_many_look_ups_wait_in_a_small_cpu_tier(sim: Make, capacity: int) -> None:
    """They hold at most their share of it, and all are answered."""
    prompts = [prompt(100, seed) for seed in range(8)]
    fill(sim, *prompts)
    engine = sim(capacity_chunks=capacity)
    for i, tokens in enumerate(prompts):
        engine.add(f"r{i}", tokens, 2)
    hold(engine)
    assert 0 < engine.half.core.disk.lookups.held <= 0.75 * capacity
    go_on(engine)
    for i in range(8):
        assert engine.outputs[f"r{i}"] == engine.expected(f"r{i}")
    assert disk_tokens(engine) > 0
    engine.check_quiet()


def test_a_long_prompt_is_ordered_piece_by_piece(sim: Make) -> None:
    tokens = prompt(150 * BLOCK + 1)
    fill(sim, tokens, num_blocks=400, capacity_chunks=1024)
    engine = sim(num_blocks=400)
    engine.add("r", tokens)
    engine.pace = Pace.NONE
    engine.step()
    assert len(engine.half.core.disk.lookups) == 64
    go_on(engine)
    assert disk_tokens(engine) == 150 * BLOCK
    engine.check_quiet()


def test_hits_are_told_apart_by_where_they_came_from(sim: Make) -> None:
    fill(sim, prompt(100))
    engine = sim()
    engine.complete("a", prompt(50))
    engine.let_through()
    assert engine.sources == {CacheHitSource.DISK: 48}
    engine.flush_device()
    engine.complete("b", prompt(100))
    engine.let_through()
    assert engine.sources == {CacheHitSource.DISK: 96, CacheHitSource.HOST: 48}
    assert (engine.hit_tokens, disk_tokens(engine)) == (48, 96)
    engine.check_quiet()


def test_requests_that_want_no_part_of_it(sim: Make) -> None:
    fill(sim, prompt(100))
    before = files(Path(sim().agent.settings.root))
    engine = sim()
    engine.complete("no load", prompt(100), params={"tiered_kv": {"load": False}})
    engine.complete("no store", prompt(100, 2), params={"tiered_kv": {"store": False}})
    engine.let_through()
    assert disk_tokens(engine) == 0
    assert files(Path(engine.agent.settings.root)) == before
    engine.check_quiet()


def test_a_reset_while_files_are_read_and_written(sim: Make) -> None:
    """What is on its way is not offered, and what follows neither reads nor writes."""
    fill(sim, prompt(100))
    engine = sim()
    engine.complete("new", prompt(100, 2))
    engine.add("r", prompt(100), 4)
    hold(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    for rank in engine.ranks:
        rank.set_version(1)
    go_on(engine)
    assert disk_tokens(engine) == 0
    assert engine.outputs["r"] == engine.expected("r")
    before = files(Path(engine.agent.settings.root))
    engine.complete("after", prompt(100, 3))
    engine.let_through()
    assert files(Path(engine.agent.settings.root)) == before
    engine.check_quiet()


def test_a_reset_that_is_trusted_changes_nothing(sim: Make) -> None:
    trusting = {"extra": {"trust_after_reset": True}}
    fill(sim, prompt(100), **trusting)
    engine = sim(**trusting)
    engine.add("r", prompt(100))
    hold(engine)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    go_on(engine)
    assert disk_tokens(engine) == 96
    engine.check_quiet()


def test_what_is_purged_is_never_read_again(sim: Make) -> None:
    """Not even before the agent has heard of it, nor while its files are still there."""
    engine = sim()
    engine.complete("r", prompt(100))
    engine.let_through()
    root = Path(engine.agent.settings.root)
    assert len(files(root)) == 6
    engine.flush_device()
    engine.half.update(_foreign_failure(), ())
    assert engine.counter("failures", "foreign") == 1
    engine.add("again", prompt(100), 4)
    hold(engine)
    for _ in range(4):
        engine.step()
    assert queued(engine) == 0
    go_on(engine)
    assert disk_tokens(engine) == 0
    engine.complete("third", prompt(100))
    engine.let_through()
    engine.check_quiet()


def _foreign_failure() -> Any:
    return KVConnectorOutput(invalid_block_ids={3})


def test_a_shared_folder_is_asked_for_what_others_write(sim: Make) -> None:
    late = sim({"shared": True})
    fill(sim, prompt(300), num_blocks=64)
    late.complete("r", prompt(300))
    late.let_through()
    assert disk_tokens(late) == 288
    late.check_quiet()


def test_a_folder_that_is_not_shared_is_not_asked(sim: Make) -> None:
    late = sim()
    fill(sim, prompt(100))
    late.complete("r", prompt(100))
    late.let_through()
    assert disk_tokens(late) == 0
    late.check_quiet()


def test_a_look_up_waits_only_a_little_for_a_shared_folder(sim: Make) -> None:
    late = sim({"shared": True})
    fill(sim, prompt(100))
    late.pace = Pace.NONE
    late.add("r", prompt(100))
    for _ in range(5):
        assert late.step().total_num_scheduled_tokens == 0
    late.now += 0.3
    assert late.step().total_num_scheduled_tokens == 100
    go_on(late)
    assert disk_tokens(late) == 0
    late.check_quiet()


@pytest.mark.parametrize("length", [6 * BLOCK - 1, 6 * BLOCK, 6 * BLOCK + 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_that_end_about_a_chunks_end(sim: Make, length: int, depth: int) -> None:
    fill(sim, prompt(length), depth=depth)
    engine = sim(depth=depth)
    engine.complete("r", prompt(length), 5)
    engine.let_through()
    assert disk_tokens(engine) == length // BLOCK * BLOCK
    assert engine.outputs["r"] == engine.expected("r")
    engine.check_quiet()


@pytest.mark.parametrize("depth", [1, 2])
def test_chunked_prefill_and_preemption(sim: Make, depth: int) -> None:
    options = {"depth": depth, "num_blocks": 20, "max_num_batched_tokens": 48}
    prompts = [prompt(120, seed) for seed in range(3)]
    fill(sim, *prompts, **options)
    engine = sim(**options)
    for i, tokens in enumerate(prompts):
        engine.add(f"r{i}", tokens, 60)
    go_on(engine)
    assert sum(r.num_preemptions for r in engine.requests.values()) > 0
    assert disk_tokens(engine) > 0
    for i in range(3):
        assert engine.outputs[f"r{i}"] == engine.expected(f"r{i}")
    engine.check_quiet()


def test_chunks_are_written_when_seen_often_enough(sim: Make) -> None:
    engine = sim({"store_after": 2})
    root = Path(engine.agent.settings.root)
    engine.complete("once", prompt(100))
    engine.let_through()
    assert not files(root)
    engine.complete("twice", prompt(100))
    engine.let_through()
    assert len(files(root)) == 6
    engine.check_quiet()


def test_short_prompts_are_not_written(sim: Make) -> None:
    engine = sim({"min_tokens": 100})
    root = Path(engine.agent.settings.root)
    engine.complete("short", prompt(99))
    engine.let_through()
    assert not files(root)
    engine.complete("long", prompt(101))
    engine.let_through()
    assert len(files(root)) == 6
    engine.check_quiet()


def test_a_slot_that_is_written_from_is_nobody_elses(sim: Make) -> None:
    """A store that all ranks have made, voided before the scheduler half has heard of its end."""
    engine = sim(windows=(0, 40), num_blocks=40, capacity_chunks=24)
    engine.pace = Pace.NONE
    engine.add("r", prompt(100))
    while engine.scheduler.has_requests():
        engine.advance()
    for lane in engine.lanes:
        lane.finish()  # copied and reported, to the agent at once
    agent = engine.agent
    while agent.reports:
        agent.hear(0)
    assert not agent._claims
    assert queued(engine) > 0
    ledger = engine.half.core.ledger
    for store in list(ledger.stores.values()):
        for block in store.blocks:  # vLLM hands it out before the side channel has arrived
            ledger.void_readers(block)
    engine._deliver()
    engine.half.drain()
    assert not ledger.stores
    written = {p.slot for e in agent.executors.values() for o in e.orders for p in o.parts}
    assert not written & set(engine.half.core.index._slots._returned)
    go_on(engine)
    engine.check_quiet()
