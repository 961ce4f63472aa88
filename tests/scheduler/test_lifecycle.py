# SPDX-License-Identifier: Apache-2.0
"""Aborts, preemptions, resets, failures and shutdown, with work under way."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.scheduler.sim import BLOCK, Runner, Sim, prompt
from vllm_tiered_kv import compat

Make = Callable[..., Sim]


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def warmed(sim: Make, length: int = 160, **options: object) -> Sim:
    """An engine whose CPU tier holds ``prompt(length)`` and whose device holds nothing."""
    engine = sim(**options)
    engine.complete("cold", prompt(length), 1)
    engine.settle()
    engine.flush_device()
    return engine


def step_until_load_is_held(engine: Sim, request_id: str) -> None:
    engine.gate.hold("load")
    engine.add(request_id, prompt(160), 4)
    deadline = time.monotonic() + 10
    while not engine.gate.entered["load"].wait(0.001):
        engine.step()
        assert time.monotonic() < deadline


# -- aborts ------------------------------------------------------------------------


def test_abort_while_a_load_is_under_way(sim: Make, depth: int) -> None:
    engine = warmed(sim, depth=depth)
    step_until_load_is_held(engine, "gone")
    engine.abort("gone")
    engine.step()
    assert engine.free_blocks < engine.free_at_start  # its blocks are still being written
    engine.gate.release("load")
    engine.run()
    engine.check_quiet()
    assert engine.complete("after", prompt(160), 1).cpu in (0, 160)


def test_abort_while_stores_are_under_way(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.gate.hold("store")
    engine.add("a", prompt(160), 50)
    for _ in range(4):
        engine.step()
    engine.abort("a")
    engine.run()
    assert engine.free_blocks == engine.free_at_start  # a store holds no block
    assert engine.half.core.index.pinned > 0
    engine.gate.release("store")
    engine.check_quiet()
    assert engine.complete("b", prompt(160), 1).output


def test_abort_with_a_load_and_stores_under_way(sim: Make, depth: int) -> None:
    engine = warmed(sim, depth=depth)
    engine.gate.hold("store")
    engine.add("storing", prompt(100, seed=5), 30)
    for _ in range(3):
        engine.step()
    step_until_load_is_held(engine, "loading")
    engine.abort("loading")
    engine.abort("storing")
    engine.gate.release("load")
    engine.run()
    engine.gate.release("store")
    engine.check_quiet()


@pytest.mark.parametrize("steps", range(8))
def test_abort_after_any_step(sim: Make, depth: int, steps: int) -> None:
    engine = warmed(sim, depth=depth, max_num_batched_tokens=48)
    engine.add("x", prompt(160) + prompt(100, seed=3), 20)
    for _ in range(steps):
        engine.step()
        time.sleep(0.001)
    if "x" in engine.scheduler.requests:
        engine.abort("x")
    engine.run()
    engine.check_quiet()
    cold = sim(connector=False).complete("x", prompt(160) + prompt(100, seed=3), 20)
    again = engine.complete("y", prompt(160) + prompt(100, seed=3), 20)
    assert again.output == cold.output


# -- preemption ----------------------------------------------------------------------


def test_preemption_with_stores_and_loads_under_way(sim: Make, depth: int) -> None:
    engine = sim(num_blocks=28, max_num_seqs=4, depth=depth, max_num_batched_tokens=128)
    prompts = [prompt(120, seed=i) for i in range(4)]
    preempted = 0
    for turn in range(3):
        for i, tokens in enumerate(prompts):
            engine.add(f"t{turn}r{i}", tokens, 60)
        while engine.scheduler.has_requests():
            output = engine.step()
            preempted += len(output.preempted_req_ids or ())
            if not output.total_num_scheduled_tokens:
                time.sleep(0.0005)
        engine.run()
    assert preempted > 0
    for i in range(4):
        assert engine.outputs[f"t0r{i}"] == engine.outputs[f"t2r{i}"]
    engine.check_quiet()


def test_a_block_handed_on_while_it_is_stored_is_never_offered(sim: Make, depth: int) -> None:
    engine = sim(num_blocks=12, depth=depth)
    engine.gate.hold("store")
    engine.complete("a", prompt(9 * BLOCK), 1)
    engine.complete("b", prompt(9 * BLOCK, seed=1), 1)  # overwrites a's blocks
    engine.gate.release("store")
    engine.settle()
    engine.check_pool()  # would find b's bytes under a's keys
    assert engine.counter("chunks", "dropped", "cpu") > 0
    engine.flush_device()
    engine.complete("again", prompt(9 * BLOCK), 1)
    engine.check_quiet()


def test_stores_never_hold_blocks_back(sim: Make) -> None:
    engine = sim(num_blocks=12)
    engine.gate.hold("store")
    for i in range(6):
        engine.complete(f"r{i}", prompt(9 * BLOCK, seed=i), 3)
    assert engine.free_blocks == engine.free_at_start
    engine.gate.release("store")
    engine.check_quiet()


# -- resets ----------------------------------------------------------------------------


def test_a_device_reset_succeeds_while_stores_are_under_way(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.gate.hold("store")
    engine.complete("a", prompt(160), 1)
    assert engine.half.core.ledger.stores
    assert engine.scheduler.reset_prefix_cache()
    engine.gate.release("store")
    engine.check_quiet()


def test_nothing_from_before_a_connector_reset_is_served(sim: Make, depth: int) -> None:
    engine = warmed(sim, depth=depth)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.complete("after", prompt(160), 1).cpu == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("new", prompt(160), 1).cpu == 160
    engine.check_quiet()


def test_what_was_stored_outlives_a_reset_the_user_trusts(sim: Make, depth: int) -> None:
    engine = warmed(sim, depth=depth, extra={"trust_after_reset": True})
    engine.gate.hold("store")
    engine.complete("b", prompt(160, seed=1), 1)
    assert engine.half.core.ledger.stores
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.complete("after", prompt(160), 1).cpu == 160
    engine.gate.release("store")
    engine.settle()
    engine.flush_device()
    assert engine.complete("b again", prompt(160, seed=1), 1).cpu == 160
    engine.check_quiet()


def test_stores_under_way_at_a_connector_reset_are_dropped(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.gate.hold("store")
    engine.complete("a", prompt(160), 1)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.gate.release("store")
    engine.settle()
    assert len(engine.half.core.index) == 0
    assert engine.half.core.index.used_slots == 0
    assert engine.complete("b", prompt(160), 1).cpu == 0
    engine.check_quiet()


def test_a_reset_with_a_load_under_way_succeeds_on_retry(sim: Make, depth: int) -> None:
    engine = warmed(sim, depth=depth)
    step_until_load_is_held(engine, "loading")
    assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.gate.release("load")
    engine.run()
    assert engine.hit_tokens == 0  # what was loaded is from before the reset
    assert engine.counter("failures", "load_stale") == 1
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.complete("after", prompt(160), 1).cpu == 0
    engine.check_quiet()


def test_a_load_that_ended_in_the_step_of_a_reset_counts_as_failed() -> None:
    """The good news is already on its way to the scheduler when the reset comes."""
    engine = Sim(depth=2)
    try:
        engine.complete("cold", prompt(160), 1)
        engine.settle()
        engine.flush_device()
        engine.add("x", prompt(160), 4)
        deadline = time.monotonic() + 10
        while True:
            engine.schedule()
            engine.execute()
            if engine._in_flight[-1][2].kv_connector_output.finished_recving:
                break
            engine.process()
            assert time.monotonic() < deadline
        while len(engine._in_flight) > 1:
            engine.process()
        engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.process()
        engine.run()
        assert engine.hit_tokens == 0
        assert engine.counter("failures", "load_stale") == 1
        assert len(engine.outputs["x"]) == 4
        engine.check_quiet()
    finally:
        engine.close()


def test_a_request_that_lived_through_a_reset_stores_nothing_of_before(sim: Make) -> None:
    engine = sim()
    engine.add("old", prompt(100), 80)
    for _ in range(5):
        engine.step()
    engine.settle()
    engine.half.reset()
    engine.run()
    engine.settle()
    assert engine.half.core.index.used_slots == 0
    engine.check_quiet()


# -- failures -----------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(0,), (0, 40)], ids=["one group", "two groups"])
def test_a_failing_load_is_recomputed_and_its_chunks_forgotten(
    sim: Make, depth: int, windows: tuple[int, ...]
) -> None:
    engine = warmed(sim, depth=depth, windows=windows, num_blocks=128)
    want = sim(connector=False, windows=windows, num_blocks=128).complete("x", prompt(160), 5)
    engine.gate.fail.add("load")
    got = engine.complete("x", prompt(160), 5)
    assert got.output == want.output
    assert got.cpu == 0
    assert engine.counter("failures", "copy_load") >= 1
    assert engine.counter("chunks", "failed", "cpu") > 0
    engine.check_quiet()
    engine.gate.fail.clear()
    engine.settle()
    engine.flush_device()
    assert engine.complete("y", prompt(160), 5).cpu > 0  # stored again by the recompute
    engine.check_quiet()


def test_a_failing_store_is_a_later_miss(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.gate.fail.add("store")
    engine.complete("a", prompt(160), 5)
    engine.settle()
    assert engine.half.core.index.used_slots == 0
    assert engine.counter("failures", "store") >= 1
    engine.gate.fail.clear()
    engine.flush_device()
    assert engine.complete("b", prompt(160), 5).cpu == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("c", prompt(160), 5).cpu == 160
    engine.check_quiet()


def test_a_load_that_waits_past_its_deadline_is_recomputed(sim: Make) -> None:
    engine = warmed(sim, extra={"load_deadline": 0.05})
    engine.gate.hold("load")
    engine.add("first", prompt(160), 2)
    engine.add("second", prompt(90, seed=7), 2)
    for _ in range(3):
        engine.step()
    # Both lanes' threads are held by the first; what is queued behind it grows too old.
    worker = engine.worker._worker
    lane = worker._lanes[next(d for d in worker._lanes if d.value == "load")]
    lane._clock = lambda: time.monotonic() + 1
    engine.gate.release("load")
    engine.run()
    assert len(engine.outputs["first"]) == 2
    engine.check_quiet()


def test_the_fail_policy_stores_no_garbage(sim: Make) -> None:
    engine = warmed(sim, policy="fail", windows=(0, 40), num_blocks=128)
    engine.gate.fail.add("load")
    engine.add("x", prompt(160), 5)
    engine.run()
    engine.gate.fail.clear()
    engine.check_quiet()


def test_an_engine_without_memory_for_its_pool_serves_without_us(
    sim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_tiered_kv.worker import half

    def no_memory(*_: object, **__: object) -> None:
        raise half.PoolError("no memory")

    monkeypatch.setattr(half, "HostPool", no_memory)
    engine = sim()
    assert len(engine.complete("a", prompt(100), 5).output) == 5
    assert engine.counter("failures", "pool") == 1
    engine.flush_device()
    assert engine.complete("b", prompt(100), 5).cpu == 0
    engine.check_quiet()


@pytest.mark.parametrize("method", ["ready_run", "get", "reserve", "touch"])
def test_a_mistake_of_ours_costs_a_hit_and_not_the_engine(
    sim: Make, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = warmed(sim)
    want = engine.outputs["cold"]

    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(engine.half.core.index, method, broken)
    got = engine.complete("x", prompt(160) + prompt(40, seed=2), 1)
    assert len(got.output) == 1
    assert engine.counter("failures", "internal") >= 1
    monkeypatch.undo()
    engine.flush_device()
    assert engine.complete("y", prompt(160), 1).output == want


# -- the end ----------------------------------------------------------------------------------


def test_shutdown_with_work_under_way(sim: Make) -> None:
    engine = warmed(sim)
    engine.gate.hold("store")
    engine.add("storing", prompt(100, seed=5), 30)
    for _ in range(3):
        engine.step()
    step_until_load_is_held(engine, "loading")
    engine.gate.release("load")
    engine.gate.release("store")
    engine.worker.shutdown()
    engine.worker.shutdown()
    engine.scheduler.shutdown()


def test_results_asked_for_before_stores_are_submitted(sim: Make, depth: int) -> None:
    engine = warmed(sim, depth=depth, runner=Runner.RESULTS_FIRST)
    assert engine.complete("warm", prompt(160), 4).cpu == 160
    engine.check_quiet()


def test_many_requests_in_random_order_leak_nothing(sim: Make, depth: int) -> None:
    engine = sim(num_blocks=40, capacity_chunks=24, depth=depth, max_num_batched_tokens=100)
    for i in range(60):
        tokens = prompt(16 * (i % 7), seed=0) + prompt(5 + 13 * (i % 5), seed=i % 6)
        engine.add(f"r{i}", tokens, 1 + i % 20, priority=0)
        if i % 3 == 0:
            engine.step()
        if i % 11 == 5 and f"r{i - 2}" in engine.scheduler.requests:
            engine.abort(f"r{i - 2}")
        if i % 17 == 16:
            engine.half.reset()
    engine.run()
    engine.check_quiet()


@pytest.mark.parametrize("place", ["first", "second"])
def test_two_of_us_in_one_engine_are_refused(sim: Make, place: str) -> None:
    """vLLM's block pool keeps one watcher a block: one of the two would never hear of its reuse."""
    other = {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu": {"capacity": "1MiB"}},
    }
    with pytest.raises(compat.UnsupportedModel, match="two TieredKVConnectors"):
        sim(beside={place: other})
    sim()  # another engine is none of its business
