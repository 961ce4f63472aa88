# SPDX-License-Identifier: Apache-2.0
"""What comes back from the CPU tier, and what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tests.scheduler.sim import BLOCK, STATE, Sim, prompt
from vllm_tiered_kv.scheduler.index import ABSENT

Make = Callable[..., Sim]


@pytest.fixture(params=[1, 2], ids=["sync", "async"])
def depth(request: pytest.FixtureRequest) -> int:
    return request.param


def test_a_prefix_that_left_the_device_comes_back(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    cold = engine.complete("cold", prompt(100), 4)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(100), 4)
    assert (cold.cpu, warm.device, warm.cpu) == (0, 0, 96)
    assert warm.output == cold.output
    engine.check_quiet()


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_prompts_around_a_block_boundary(sim: Make, depth: int, blocks: int, off: int) -> None:
    engine = sim(depth=depth)
    tokens = prompt(blocks * BLOCK + off)
    cold = engine.complete("cold", tokens, 3)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", tokens, 3)
    assert warm.cpu == len(tokens) // BLOCK * BLOCK
    assert warm.output == cold.output
    engine.check_quiet()


def test_one_token_more_than_nothing(sim: Make) -> None:
    engine = sim()
    assert engine.complete("a", prompt(1), 1).cpu == 0
    engine.check_quiet()
    assert engine.half.core.index.used_slots == 0


def test_chunks_of_several_blocks_store_whole_chunks_only(sim: Make, depth: int) -> None:
    engine = sim(chunk_blocks=4, depth=depth)
    engine.complete("cold", prompt(10 * BLOCK), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", prompt(10 * BLOCK), 1).cpu == 8 * BLOCK
    engine.check_quiet()


def test_a_load_goes_on_where_the_device_ends_inside_a_chunk(sim: Make) -> None:
    engine = sim(chunk_blocks=4)
    engine.complete("long", prompt(12 * BLOCK), 1)
    engine.settle()
    engine.flush_device()
    short = engine.complete("short", prompt(12 * BLOCK)[: 6 * BLOCK + 3], 1)
    assert short.cpu == 4 * BLOCK  # the device now holds six blocks: one chunk and a half
    again = engine.complete("again", prompt(12 * BLOCK), 1)
    assert (again.device, again.cpu) == (6 * BLOCK, 6 * BLOCK)
    engine.check_quiet()


def test_chunked_prefill(sim: Make, depth: int) -> None:
    engine = sim(max_num_batched_tokens=40, depth=depth)
    cold = engine.complete("cold", prompt(300), 2)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(300), 2)
    assert warm.cpu == 288
    assert warm.output == cold.output
    engine.check_quiet()


def test_generated_tokens_are_stored(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    first = engine.complete("turn1", prompt(20), 60)
    engine.settle()
    engine.flush_device()
    # The last generated token has no KV.
    turn2 = prompt(20) + first.output + prompt(5, seed=9)
    assert engine.complete("turn2", turn2, 2).cpu == (20 + 59) // BLOCK * BLOCK
    engine.check_quiet()


def test_generated_tokens_are_not_stored_where_that_is_off(sim: Make, depth: int) -> None:
    engine = sim(depth=depth, extra={"store_generated": False})
    first = engine.complete("turn1", prompt(40), 60)
    engine.settle()
    engine.flush_device()
    assert engine.complete("turn2", prompt(40) + first.output, 2).cpu == 32
    engine.check_quiet()


def test_each_chunk_is_stored_once(sim: Make) -> None:
    engine = sim()
    for i in range(4):
        engine.add(f"r{i}", prompt(100), 5)
    engine.run()
    engine.settle()
    # six chunks of the prompt; the answers are equal, so their full chunks are too
    assert engine.counter("chunks", "stored", "cpu") == 6
    engine.check_quiet()


def test_requests_that_share_a_prefix_share_one_load(sim: Make, depth: int) -> None:
    engine = sim(depth=depth)
    engine.complete("cold", prompt(160), 1)
    engine.settle()
    engine.flush_device()
    for i in range(5):
        engine.add(f"r{i}", prompt(160) + prompt(10, seed=i + 1), 2)
    engine.run()
    engine.settle()
    assert engine.counter("chunks", "loaded", "cpu") == 10
    assert engine.hit_tokens == 160
    assert engine.counter("lookups", "wait") == 4
    engine.check_quiet()


def test_without_device_prefix_caching_every_request_loads_for_itself(sim: Make) -> None:
    engine = sim(enable_prefix_caching=False)
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    for i in range(3):
        engine.add(f"r{i}", prompt(100), 2)
    engine.run()
    engine.settle()
    assert engine.hit_tokens == 3 * 96
    engine.check_quiet()


def test_salts_do_not_share(sim: Make) -> None:
    engine = sim()
    engine.complete("a", prompt(100), 1, salt="one")
    engine.settle()
    engine.flush_device()
    assert engine.complete("b", prompt(100), 1, salt="two").cpu == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("c", prompt(100), 1, salt="one").cpu == 96
    engine.check_quiet()


def test_a_request_may_keep_out(sim: Make) -> None:
    engine = sim()
    engine.complete("silent", prompt(100), 1, params={"tiered_kv": {"store": False}})
    engine.settle()
    assert engine.half.core.index.used_slots == 0
    engine.flush_device()
    engine.complete("loud", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("deaf", prompt(100), 1, params={"tiered_kv": {"load": False}}).cpu == 0
    engine.flush_device()
    assert engine.complete("all ears", prompt(100), 1).cpu == 96
    engine.check_quiet()


@pytest.mark.parametrize("bad", [{"tiered_kv": {"lod": False}}, {"tiered_kv": 7}])
def test_a_bad_request_parameter_is_counted_and_ignored(sim: Make, bad: dict) -> None:
    engine = sim()
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", prompt(100), 1, params=bad).cpu == 96
    assert engine.counter("failures", "params") == 1


def test_prompt_logprobs_recompute_everything_and_leak_nothing(sim: Make) -> None:
    engine = sim()
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("scored", prompt(100), 1, prompt_logprobs=1).cpu == 0
    engine.check_quiet()


def test_a_tier_smaller_than_one_request_keeps_its_head(sim: Make, depth: int) -> None:
    engine = sim(capacity_chunks=4, depth=depth)
    engine.complete("cold", prompt(160), 40)
    engine.settle()
    engine.flush_device()
    assert engine.counter("chunks", "dropped", "cpu") > 0
    warm = engine.complete("warm", prompt(160), 1)
    assert warm.cpu == 4 * BLOCK
    engine.check_quiet()


def test_the_tier_stays_within_its_slots_and_evicts_the_oldest(sim: Make) -> None:
    engine = sim(capacity_chunks=16)
    for i in range(5):
        engine.complete(f"r{i}", prompt(100, seed=i), 1)
        engine.settle()
        engine.flush_device()
        assert engine.half.core.index.used_slots <= 16
    assert engine.counter("chunks", "evicted", "cpu") > 0
    assert engine.complete("newest", prompt(100, seed=4), 1).cpu == 96
    engine.flush_device()
    assert engine.complete("oldest", prompt(100, seed=0), 1).cpu == 0
    engine.check_quiet()


def test_vllms_own_counters_are_fed(sim: Make) -> None:
    engine = sim()
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    engine.complete("warm", prompt(100), 1)
    assert engine.external_hits == 96
    assert engine.sources == {CacheHitSource.HOST: 96}
    assert engine.gauges["capacity_bytes|cpu"] == 256 * 4096
    assert engine.gauges["usage_bytes|cpu"] == 6 * 4096


def test_two_groups_hit_together(sim: Make, depth: int) -> None:
    engine = sim(windows=(0, 40), depth=depth, num_blocks=128)
    cold = engine.complete("cold", prompt(200), 30)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(200), 30)
    assert warm.cpu == 192
    assert warm.output == cold.output
    engine.check_quiet()


@pytest.mark.parametrize("window", [2, 16, 17, 33, 64, 1000])
@pytest.mark.parametrize("length", [95, 96, 97])
def test_sliding_windows_of_every_size(sim: Make, window: int, length: int) -> None:
    engine = sim(windows=(0, window), num_blocks=128)
    cold = engine.complete("cold", prompt(length), 20)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(length), 20)
    assert warm.output == cold.output
    assert warm.cpu >= 80
    engine.check_quiet()


def test_a_window_alone(sim: Make) -> None:
    engine = sim(windows=(40,), max_num_batched_tokens=48)
    cold = engine.complete("cold", prompt(200), 5)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(200), 5)
    assert warm.cpu == 192
    assert warm.output == cold.output
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(STATE, 0), (0, STATE, 40)])
def test_states_come_back_where_vllm_kept_them(
    sim: Make, depth: int, windows: tuple[int, ...]
) -> None:
    engine = sim(windows=windows, depth=depth, num_blocks=192)
    engine.complete("cold", prompt(170), 30)
    engine.settle()
    engine.audit.check()
    engine.flush_device()
    again = engine.complete("again", prompt(170), 1)
    assert (again.device, again.cpu) == (0, 160)
    engine.flush_device()
    turn = engine.complete("turn", engine.tokens["cold"] + prompt(9, seed=3), 2)
    assert turn.cpu == 192  # where decoding passed a boundary
    engine.check_quiet()


def test_a_state_is_added_to_a_chunk_that_was_stored_without(sim: Make, depth: int) -> None:
    """Where prompts part is a boundary nobody knew of when the first of them was computed."""
    engine = sim(windows=(STATE, 0), depth=depth, num_blocks=192)
    engine.complete("one", prompt(96) + prompt(60, seed=1), 1)
    engine.settle()
    two = prompt(96) + prompt(60, seed=2)
    engine.complete("two", two, 1)
    engine.settle()
    node = engine.half.core.index.get(engine.requests["two"].block_hashes[5])
    assert node is not None
    assert node.slots[0] != ABSENT
    engine.audit.check()
    engine.flush_device()
    three = engine.complete("three", prompt(96) + prompt(60, seed=3), 1)
    assert three.cpu == 96
    engine.check_quiet()


def test_a_prompt_of_whole_blocks_leaves_a_token_to_a_state(sim: Make, depth: int) -> None:
    """It has seen the last token already, and must not see it twice."""
    engine = sim(windows=(STATE, 0), depth=depth, num_blocks=192)
    engine.complete("cold", prompt(160), 20)
    engine.settle()
    engine.flush_device()
    assert engine.complete("again", prompt(160), 4).cpu == 144
    engine.check_quiet()


def test_a_window_that_moves_on_costs_a_chunk_no_more_than_its_own_part(sim: Make) -> None:
    """What leaves the window is handed out at once, here while its copy has not begun."""
    engine = sim(windows=(0, 40), num_blocks=24)
    engine.gate.hold("store")
    engine.complete("a", prompt(10 * BLOCK), 40)
    engine.gate.release("store")
    engine.settle()
    engine.audit.check()
    request = engine.requests["a"]
    nodes = [engine.half.core.index.get(key) for key in request.block_hashes[:10]]
    assert all(node is not None and node.slots[0] != ABSENT for node in nodes)
    assert any(node.slots[1] == ABSENT for node in nodes)
    assert not any(node.coming or node.pins for node in nodes)
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(64,), (40, 64)])
def test_a_window_alone_needs_no_chunk_that_it_has_left_behind(
    sim: Make, depth: int, windows: tuple[int, ...]
) -> None:
    engine = sim(windows=windows, depth=depth, num_blocks=40, max_num_batched_tokens=48)
    engine.gate.hold("store")
    cold = engine.complete("cold", prompt(40 * BLOCK), 5)
    engine.gate.release("store")
    engine.settle()
    request = engine.requests["cold"]
    nodes = [engine.half.core.index.get(key) for key in request.block_hashes[:40]]
    assert all(nodes)
    assert any(node.is_empty for node in nodes)
    dropped = engine.counter("chunks", "dropped", "cpu")
    assert dropped == sum(node.is_empty for node in nodes)
    assert engine.counter("chunks", "stored", "cpu") == 40 - dropped
    engine.flush_device()
    warm = engine.complete("warm", prompt(40 * BLOCK), 5)
    assert warm.cpu == 39 * BLOCK
    assert warm.output == cold.output
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(64,), (0, 64)])
def test_a_part_that_was_lost_is_stored_when_it_is_computed_again(
    sim: Make, depth: int, windows: tuple[int, ...]
) -> None:
    engine = sim(windows=windows, depth=depth, num_blocks=80)
    engine.gate.fail.add("store")
    engine.complete("lost", prompt(160), 1)
    engine.settle()
    engine.gate.fail.clear()
    engine.flush_device()
    assert engine.complete("again", prompt(160), 1).cpu == 0
    engine.settle()
    assert engine.counter("chunks", "stored", "cpu") == 10
    engine.flush_device()
    assert engine.complete("warm", prompt(160), 1).cpu >= 144
    engine.check_quiet()


def test_chunks_of_more_than_a_window_are_walked_past(sim: Make, depth: int) -> None:
    """While an answer is said, a block leaves the window before its chunk is complete."""
    engine = sim(windows=(20,), chunk_blocks=3, depth=depth)
    engine.complete("cold", prompt(30), 100)
    engine.settle()
    history = engine.tokens["cold"]
    assert len(engine.half.core.index) == len(history) // (3 * BLOCK)
    engine.flush_device()
    engine.complete("longer", history + prompt(100, seed=3), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", history + prompt(100, seed=3), 1).cpu >= 192
    engine.check_quiet()


@pytest.mark.parametrize("eviction", ["lru", "s3fifo", "arc", "cost"])
def test_every_way_to_evict(sim: Make, eviction: str) -> None:
    extra = {"cpu": {"capacity": 4096 * 8, "eviction": eviction}}
    engine = sim(extra=extra)
    for i in range(6):
        answer = engine.complete(f"prompt {i % 3} {i}", prompt(100, seed=i % 3), 2)
        assert answer.output == engine.expected(f"prompt {i % 3} {i}")
        engine.settle()
        engine.flush_device()
    assert engine.counter("chunks", "evicted", "cpu") > 0
    engine.check_quiet()
