# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters are told apart by their weights, whatever their names and paths say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from tests.scheduler.adapters import AdapterSim
from tests.scheduler.tokens import BLOCK, prompt

Make = Callable[..., AdapterSim]


@pytest.fixture
def sim() -> Iterator[Make]:
    """Makes engines with adapters that are closed when the test ends."""
    made: list[AdapterSim] = []

    def make(**options: Any) -> AdapterSim:
        engine = AdapterSim(**options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a digest comes in time."""
    monkeypatch.setattr("vllm_tiered_kv.scheduler.loads.ADAPTER_PATIENCE", 60.0)


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def lora(number: int, path: str = "/adapters/one", *, in_place: bool = False) -> LoRARequest:
    return LoRARequest("one", number, path, load_inplace=in_place)


def stored_with(engine: AdapterSim, number: int, weights: int, **options: object) -> None:
    """Load an adapter, run ``prompt(100)`` with it, and empty the device."""
    engine.load_adapter(number, weights)
    engine.complete(f"cold {number} {weights}", prompt(100), 1, lora=lora(number), **options)
    engine.settle()
    engine.flush_device()


def test_the_first_request_waits_for_the_digest_and_is_stored(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    stored_with(engine, 1, weights=7)
    assert engine.counter("lookups", "wait") == 1
    assert engine.complete("warm", prompt(100), 1, lora=lora(1)).cpu == 96
    assert engine.counter("lookups", "wait") == 1
    engine.check_quiet()


def test_an_adapter_and_the_base_model_do_not_share(sim: Make) -> None:
    engine = sim()
    stored_with(engine, 1, weights=7)
    assert engine.complete("base", prompt(100), 1).cpu == 0
    engine.check_quiet()


def test_loaded_again_with_the_same_weights_it_finds_its_own(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    stored_with(engine, 1, weights=7)
    engine.load_adapter(2, weights=7)
    assert engine.complete("again", prompt(100), 1, lora=lora(2)).cpu == 96
    engine.check_quiet()


def test_overwritten_and_loaded_again_it_finds_nothing(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    stored_with(engine, 1, weights=7)
    stored_with(engine, 2, weights=8)
    assert engine.hit_tokens == 0
    assert engine.complete("new", prompt(100), 1, lora=lora(2)).cpu == 96
    engine.settle()
    engine.flush_device()
    stored_with(engine, 3, weights=7)  # the old weights are back, and so is their KV
    assert engine.hit_tokens == 192
    engine.check_quiet()


def test_what_follows_a_stale_device_hit_is_not_kept(sim: Make, depth: int) -> None:
    """vLLM's device cache knows adapters by name and path: it serves the old weights' blocks."""
    engine = sim(depth=depth)
    engine.load_adapter(1, weights=7)
    engine.complete("old", prompt(100), 1, lora=lora(1))
    engine.settle()
    engine.load_adapter(2, weights=8)
    longer = prompt(100) + prompt(60, seed=5)
    # The very first request with it may not know yet that the content differs.
    engine.complete("first", prompt(40, seed=6), 1, lora=lora(2))
    engine.settle()
    kept = len(engine.half.core.index)
    assert engine.complete("stale", longer, 1, lora=lora(2), stale=7).device == 96
    engine.settle()
    assert len(engine.half.core.index) == kept
    assert engine.counter("failures", "adapter") == 1
    engine.flush_device()
    assert engine.complete("clean", longer, 1, lora=lora(2)).cpu == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", longer, 1, lora=lora(2)).cpu == 160
    engine.check_quiet()


def test_the_first_request_with_new_weights_may_be_the_one_with_the_stale_hit(
    sim: Make, depth: int
) -> None:
    engine = sim(depth=depth)
    engine.load_adapter(1, weights=7)
    engine.complete("old", prompt(100), 1, lora=lora(1))
    engine.settle()
    kept = len(engine.half.core.index)
    engine.load_adapter(2, weights=8)
    engine.complete("stale", prompt(100) + prompt(60, seed=5), 1, lora=lora(2), stale=7)
    engine.settle()
    assert len(engine.half.core.index) == kept
    engine.check_quiet()


def test_a_reset_of_both_caches_ends_the_mistrust(sim: Make) -> None:
    engine = sim()
    stored_with(engine, 1, weights=7)
    stored_with(engine, 2, weights=8)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.complete("cold", prompt(100), 1, lora=lora(2))
    engine.settle()
    longer = prompt(100) + prompt(60, seed=5)
    assert engine.complete("grown", longer, 1, lora=lora(2)).device == 96
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", longer, 1, lora=lora(2)).cpu == 160
    assert engine.counter("failures", "adapter") == 0
    engine.check_quiet()


def test_weights_exchanged_under_a_running_request(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.load_adapter(1, weights=7)
    engine.add("running", prompt(100), 80, lora=lora(1))
    while len(engine.outputs["running"]) < 20:
        engine.step()
    engine.load_adapter(1, weights=8)  # in place, from wherever
    engine.run()
    engine.settle()
    engine.flush_device()
    history = prompt(100) + engine.outputs["running"]
    # With the new weights nothing is found; with the old ones what they alone had computed.
    assert engine.complete("new", history, 1, lora=lora(1)).cpu == 0
    engine.settle()
    engine.flush_device()
    engine.load_adapter(2, weights=7)
    engine.complete("settling", prompt(40, seed=6), 1, lora=lora(2))
    old = engine.complete("old", history, 1, lora=lora(2))
    assert 96 <= old.cpu <= (100 + 20) // BLOCK * BLOCK + BLOCK
    engine.check_quiet()


def test_weights_exchanged_while_a_load_is_planned(sim: Make) -> None:
    """The ranks refuse a load for weights they no longer have."""
    engine = sim()
    stored_with(engine, 1, weights=7)
    engine.add("late", prompt(100), 4, lora=lora(1))
    engine.schedule()
    engine.load_adapter(1, weights=8)
    engine.execute()
    engine.process()
    engine.run()
    assert engine.hit_tokens == 0
    assert engine.counter("failures", "load_dropped") == 1
    engine.settle()
    engine.flush_device()
    engine.load_adapter(2, weights=7)
    assert engine.complete("old", prompt(100), 1, lora=lora(2)).cpu == 96
    engine.check_quiet()


def test_an_adapter_loaded_in_place_is_left_alone(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    stored_with(engine, 1, weights=7)
    engine.load_adapter(1, weights=8)
    for i in range(2):
        found = engine.complete(f"in place {i}", prompt(100), 1, lora=lora(1, in_place=True))
        assert found.cpu == 0
        engine.settle()
        engine.flush_device()
    assert engine.counter("chunks", "stored", "cpu") == 6
    # Its number is not trusted without the flag either; a new one is.
    assert engine.complete("number", prompt(100), 1, lora=lora(1)).cpu == 0
    engine.flush_device()
    engine.load_adapter(2, weights=7)
    assert engine.complete("old", prompt(100), 1, lora=lora(2)).cpu == 96
    assert engine.counter("failures", "adapter") == 3
    engine.check_quiet()


def test_an_adapter_pushed_out_of_memory_and_read_again(sim: Make, depth: int) -> None:
    """Nobody knows what the files hold now until the rank has read them."""
    engine = sim(depth=depth)
    stored_with(engine, 1, weights=7)
    del engine.adapters[1]
    engine.complete("other", prompt(40, seed=3), 1)  # the rank sees that it is gone
    engine.settle()
    engine.flush_device()

    engine.add("pushed out", prompt(100), 1, lora=lora(1))
    while not engine.outputs["pushed out"]:
        if engine.schedule().num_scheduled_tokens and 1 not in engine.adapters:
            engine.load_adapter(1, weights=9)
        engine.execute()
        if len(engine._in_flight) >= depth:
            engine.process()
    engine.run()
    assert engine.hit_tokens == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("nine", prompt(100), 1, lora=lora(1)).cpu == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("nine again", prompt(100), 1, lora=lora(1)).cpu == 96
    engine.check_quiet()


def test_without_sight_of_the_adapters_nothing_is_kept(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.worker._worker.adapters.registered = None
    stored_with(engine, 1, weights=7)
    assert engine.complete("again", prompt(100), 1, lora=lora(1)).cpu == 0
    assert len(engine.half.core.index) == 0
    engine.check_quiet()


def test_a_digest_that_takes_too_long_is_not_waited_for(
    sim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.scheduler.loads.ADAPTER_PATIENCE", 0.0)
    engine = sim()
    stored_with(engine, 1, weights=7)
    assert len(engine.half.core.index) == 0
    monkeypatch.setattr("vllm_tiered_kv.scheduler.loads.ADAPTER_PATIENCE", 60.0)
    stored_with(engine, 2, weights=7)
    assert engine.complete("known now", prompt(100), 1, lora=lora(2)).cpu == 96
    engine.check_quiet()


def test_a_reset_of_the_device_alone_ends_the_mistrust(sim: Make, depth: int) -> None:
    """vLLM tells a connector nothing of it; that it was empty is seen in the next look-up."""
    engine = sim(depth=depth, extra={"trust_after_reset": True})
    stored_with(engine, 1, weights=7)
    stored_with(engine, 2, weights=8)
    engine.complete("mixed", prompt(40, seed=6), 1, lora=lora(2))
    engine.complete("mixed too", prompt(40, seed=6), 1, lora=lora(1), stale=8)
    engine.settle()
    assert engine.counter("failures", "adapter") == 1
    engine.flush_device()
    engine.complete("cold", prompt(40, seed=7), 1, lora=lora(2))
    engine.settle()
    longer = prompt(40, seed=7) + prompt(60, seed=5)
    assert engine.complete("grown", longer, 1, lora=lora(2)).device == 32
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", longer, 1, lora=lora(2)).cpu == 96
    assert engine.counter("failures", "adapter") == 1
    engine.check_quiet()


def test_a_device_that_could_not_be_reset_keeps_the_mistrust(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    stored_with(engine, 1, weights=7)
    engine.complete("seven", prompt(100), 1, lora=lora(1))
    engine.load_adapter(2, weights=8)
    engine.complete("eight", prompt(40, seed=6), 1, lora=lora(2))
    engine.add("holding", prompt(40, seed=8), 200)
    engine.step()
    assert not engine.scheduler.reset_prefix_cache()
    engine.add("stale", prompt(100) + prompt(60, seed=5), 1, lora=lora(2), stale=7)
    engine.run()
    engine.settle()
    assert engine.counter("failures", "adapter") == 1
    engine.check_quiet()


def test_many_adapters_one_after_the_other_are_all_kept(
    sim: Make, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_tiered_kv.scheduler.adapters.MAX_ADAPTERS", 2)
    monkeypatch.setattr("vllm_tiered_kv.worker.adapters.MAX_WATCHED", 2)
    engine = sim(depth=depth)
    for number in range(1, 6):
        path = f"/adapters/{number}"
        engine.load_adapter(number, weights=number)
        engine.complete(f"cold {number}", prompt(100), 1, lora=lora(number, path))
        engine.settle()
        engine.flush_device()
        warm = engine.complete(f"warm {number}", prompt(100), 1, lora=lora(number, path))
        assert warm.cpu == 96
        del engine.adapters[number]
        engine.complete(f"between {number}", prompt(40, seed=3), 1)
    assert engine.counter("failures", "adapter_limit") == 0
    engine.check_quiet()


def test_a_forgotten_adapter_that_is_back_with_other_weights(
    sim: Make, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device still holds what its name and path stood for before."""
    monkeypatch.setattr("vllm_tiered_kv.scheduler.adapters.MAX_ADAPTERS", 2)
    engine = sim(depth=depth)
    engine.load_adapter(1, weights=7)
    engine.complete("old", prompt(100), 1, lora=lora(1))
    engine.settle()
    del engine.adapters[1]
    for number in (2, 3):
        engine.load_adapter(number, weights=number)
        engine.complete(f"o{number}", prompt(40, seed=3), 1, lora=lora(number, f"/{number}"))
        engine.settle()
    assert 1 not in engine.half.core.adapters._adapters
    del engine.adapters[2]
    engine.complete("between", prompt(40, seed=4), 1)
    engine.settle()
    kept = len(engine.half.core.index)
    engine.load_adapter(1, weights=8)
    engine.complete("stale", prompt(100) + prompt(60, seed=5), 1, lora=lora(1), stale=7)
    engine.settle()
    assert len(engine.half.core.index) == kept
    assert engine.counter("failures", "adapter") == 1
    engine.check_quiet()
