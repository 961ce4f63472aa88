# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that are read from CPU slots, and hand-overs that are compared with checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.scheduler.handover import (
    LEASE,
    ODD,
    TO_PRODUCER,
    Engine,
    Fleet,
    decode,
    prefill,
    wait,
)
from tests.scheduler.sim import BLOCK, prompt
from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.remote.params import refusal
from vllm_tiered_kv.scheduler.lending import MAX_SHARE
from vllm_tiered_kv.scheduler.readying import COPY_PATIENCE

Make = Callable[..., Engine]


@pytest.fixture
def early(fleet: Fleet) -> Make:
    """Makes producers that serve from slots."""

    def make(**options: Any) -> Engine:
        remote = {"handoff": "cpu", **options.pop("remote", {})}
        return fleet.engine("kv_producer", remote=remote, **options)

    return make


def lent(engine: Engine) -> int:
    return int(engine.remote.handing.slots)


def assert_nothing_lent(engine: Engine) -> None:
    wait(lambda: engine.is_free() and not len(engine.remote.handing), "still held")
    engine.sim.settle()
    index = engine.sim.half.core.index
    assert lent(engine) == len(engine.remote.handing) == index.pinned == 0
    assert index.used_slots == len(index)
    engine.sim.check_quiet()


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, ODD, 20 * BLOCK])
@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_the_devices_blocks_are_free_before_anybody_comes(
    early: Make, consumer: Engine, length: int, chunk_blocks: int
) -> None:
    producer = early(chunk_blocks=chunk_blocks)
    params = prefill(producer, prompt(length))
    assert producer.is_free()
    assert producer.count("handoffs|early") == 1
    assert lent(producer) == -(-length // (BLOCK * chunk_blocks))
    # Whatever the device's blocks are used for now is not what is read.
    producer.sim.complete("other", prompt(60 * BLOCK, seed=5), 1)
    decode(consumer, prompt(length), params)
    assert consumer.count("hit_tokens|peer") == length
    assert not consumer.failures
    assert not producer.failures
    assert_nothing_lent(producer)
    consumer.sim.check_quiet()


@pytest.mark.parametrize("options", [{"ranks": 2}, {"depth": 2}], ids=["two ranks", "async"])
def test_engines_of_several_ranks_and_with_steps_in_flight(
    fleet: Fleet, early: Make, options: dict[str, Any]
) -> None:
    producer, consumer = early(**options), fleet.engine("kv_consumer", **options)
    for i in range(5):
        tokens = prompt(ODD + 7 * i, seed=i)
        decode(consumer, tokens, prefill(producer, tokens, f"p{i}"), f"d{i}")
    assert producer.count("handoffs|early") == 5
    assert not consumer.failures
    assert_nothing_lent(producer)


def test_what_the_consumer_has_is_not_pulled_out_of_the_middle_of_a_slot(
    early: Make, consumer: Engine
) -> None:
    producer = early(chunk_blocks=3)
    turn = prompt(4 * BLOCK)
    decode(consumer, turn, prefill(producer, turn, "p1"), "d1")
    before = consumer.transport.nbytes
    longer = [*turn, *prompt(3 * BLOCK + 5, seed=7)]
    decode(consumer, longer, prefill(producer, longer, "p2"), "d2")
    assert consumer.transport.nbytes - before == before
    assert consumer.count("hit_tokens|peer") == len(longer)
    assert_nothing_lent(producer)


def test_what_is_lent_is_not_evicted(early: Make, consumer: Engine) -> None:
    producer = early(capacity_chunks=16)
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    for i in range(6):
        producer.sim.complete(f"other{i}", prompt(12 * BLOCK, seed=20 + i), 1)
        producer.sim.settle()  # else nothing of the next one has room
    assert producer.count("chunks|evicted|cpu") > 20
    decode(consumer, tokens, params)
    assert consumer.count("hit_tokens|peer") == ODD
    assert_nothing_lent(producer)


def test_leases_take_a_share_and_no_more(early: Make) -> None:
    producer = early(capacity_chunks=16)
    for i in range(6):
        prefill(producer, prompt(ODD, seed=i), f"p{i}")
        assert lent(producer) <= 16 * MAX_SHARE
    assert producer.count("handoffs|early") == 1
    assert producer.count("handoffs|offered") == 6
    producer.sim.settle()
    before = producer.count("chunks|stored|cpu")
    producer.sim.complete("other", prompt(8 * BLOCK, seed=77), 1)
    producer.sim.settle()
    assert producer.count("chunks|stored|cpu") - before == 8
    producer.pass_time(LEASE)
    assert_nothing_lent(producer)


def test_a_prompt_that_is_too_long_for_the_share_is_read_from_the_device(
    early: Make, consumer: Engine
) -> None:
    producer = early(capacity_chunks=8)
    params = prefill(producer, prompt(ODD))
    assert not producer.is_free()
    decode(consumer, prompt(ODD), params)
    assert consumer.count("hit_tokens|peer") == ODD
    assert producer.count("handoffs|early") == 0
    assert_nothing_lent(producer)


@pytest.mark.parametrize("when", ["fail", "fail_late"])
def test_a_copy_that_fails_leaves_the_blocks(early: Make, consumer: Engine, when: str) -> None:
    producer = early()
    getattr(producer.sim.gate, when).add("store")
    params = prefill(producer, prompt(ODD))
    assert producer.sim.free_at_start - producer.sim.free_blocks == 6
    assert producer.count("failures|remote_slots") == 1
    decode(consumer, prompt(ODD), params)
    assert consumer.count("hit_tokens|peer") == ODD
    assert_nothing_lent(producer)


def test_a_copy_that_hangs_is_not_waited_for(early: Make, consumer: Engine) -> None:
    producer = early()
    producer.sim.half.core.clock = producer.clock
    producer.sim.gate.hold("store")
    producer.sim.add("p", prompt(ODD), 1, params=TO_PRODUCER)
    while "p" not in producer.sim.handed:
        producer.sim.advance()
    consumer.sim.add("d", prompt(ODD), 3, params=producer.sim.handed["p"])
    for _ in range(5):
        producer.sim.advance()
        consumer.sim.advance()
    assert consumer.transport.reads == 0  # it waits for an answer
    producer.clock.ahead += COPY_PATIENCE
    producer.sim.run()
    consumer.sim.run()
    assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.count("hit_tokens|peer") == ODD
    assert producer.count("failures|remote_slots") == 1
    producer.sim.gate.release("store")
    producer.sim.settle()
    assert_nothing_lent(producer)


def test_nobody_comes(early: Make) -> None:
    producer = early()
    prefill(producer, prompt(ODD))
    assert lent(producer) == 6
    producer.pass_time(LEASE)
    assert_nothing_lent(producer)


def test_a_reset_gives_the_slots_back(early: Make, consumer: Engine) -> None:
    producer = early()
    params = prefill(producer, prompt(ODD))
    producer.sim.half.reset()
    assert_nothing_lent(producer)
    decode(consumer, prompt(ODD), params)
    assert consumer.count("hit_tokens|peer") == 0
    assert_nothing_lent(producer)


def test_a_reset_while_it_is_copied(early: Make) -> None:
    producer = early()
    producer.sim.gate.hold("store")
    producer.sim.add("p", prompt(ODD), 1, params=TO_PRODUCER)
    while "p" not in producer.sim.handed:
        producer.sim.advance()
    producer.sim.half.reset()
    producer.sim.gate.release("store")
    producer.sim.run()
    producer.sim.settle()
    assert_nothing_lent(producer)


def test_what_the_client_does_not_want_stored_is_lent_all_the_same(
    early: Make, consumer: Engine
) -> None:
    producer = early()
    params = {**TO_PRODUCER, "tiered_kv": {"store": False}}
    producer.sim.add("p", prompt(ODD), 1, params=params)
    producer.sim.run()
    assert producer.is_free()
    assert len(producer.sim.half.core.index) <= 1
    assert lent(producer) == 6
    decode(consumer, prompt(ODD), producer.sim.handed["p"])
    assert consumer.count("hit_tokens|peer") == ODD
    assert_nothing_lent(producer)


def test_auto_copies_when_the_device_is_short_of_blocks(fleet: Fleet, consumer: Engine) -> None:
    producer = fleet.engine("kv_producer", num_blocks=64)
    given = [prefill(producer, prompt(9 * BLOCK + 3, seed=i), f"p{i}") for i in range(5)]
    # When the fourth ends, it and the three that are held have taken more than half of the blocks.
    assert producer.count("handoffs|early") == 2
    assert producer.sim.free_at_start - producer.sim.free_blocks == 30
    for i, params in enumerate(given):
        decode(consumer, prompt(9 * BLOCK + 3, seed=i), params, f"d{i}")
    assert consumer.count("hit_tokens|peer") == 5 * (9 * BLOCK + 3)
    assert_nothing_lent(producer)


def test_auto_evicts_nothing(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", num_blocks=24, capacity_chunks=40)
    for i in range(4):
        producer.sim.complete(f"other{i}", prompt(12 * BLOCK, seed=50 + i), 1)
    producer.sim.settle()
    evicted = producer.count("chunks|evicted|cpu")
    prefill(producer, prompt(13 * BLOCK + 3, seed=1), "p")
    assert producer.count("handoffs|early") == 0
    # For its own chunks; fewer where a store was dropped, whose block was needed before.
    assert producer.count("chunks|evicted|cpu") - evicted <= 13


def test_slots_are_needed(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"remote.handoff"):
        fleet.engine("kv_producer", remote={"handoff": "cpu"}, extra={"cpu": None})


# -- checksums ---------------------------------------------------------------------------


@pytest.mark.parametrize("handoff", ["cpu", "device"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_arrives_is_compared(fleet: Fleet, handoff: str, ranks: int) -> None:
    producer = fleet.engine("kv_producer", ranks=ranks, remote={"handoff": handoff, "verify": True})
    consumer = fleet.engine("kv_consumer", ranks=ranks, remote={"verify": True})
    turn = prompt(4 * BLOCK)
    decode(consumer, turn, prefill(producer, turn, "p1"), "d1")
    longer = [*turn, *prompt(3 * BLOCK + 5, seed=7)]
    decode(consumer, longer, prefill(producer, longer, "p2"), "d2")
    assert consumer.count("hit_tokens|peer") == len(longer)
    assert producer.count("handoffs|early") == (2 if handoff == "cpu" else 0)
    assert not producer.failures
    assert not consumer.failures
    assert_nothing_lent(producer)
    consumer.sim.check_quiet()


@pytest.mark.parametrize("handoff", ["cpu", "device"])
def test_one_wrong_bit_is_seen(fleet: Fleet, handoff: str) -> None:
    producer = fleet.engine("kv_producer", remote={"handoff": handoff, "verify": True})
    consumer = fleet.engine("kv_consumer", remote={"verify": True})
    consumer.transport.damages = True
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.failures == {"remote_verify": 1, "load_failed": 1}
    assert consumer.count("handoffs|failed") == 1
    consumer.transport.damages = False
    decode(consumer, prompt(ODD, seed=2), prefill(producer, prompt(ODD, seed=2), "p2"), "d2")
    assert consumer.count("hit_tokens|peer") == ODD
    assert_nothing_lent(producer)
    consumer.sim.check_quiet()


def test_who_compares_takes_nothing_without_checksums(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer")
    consumer = fleet.engine("kv_consumer", remote={"verify": True})
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.transport.reads == 0
    assert consumer.failures == {"remote_verify": 1}
    assert_nothing_lent(producer)


def test_who_does_not_compare_takes_what_has_checksums(fleet: Fleet, consumer: Engine) -> None:
    producer = fleet.engine("kv_producer", remote={"verify": True})
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == ODD
    assert_nothing_lent(producer)


def test_a_reset_while_checksums_are_made(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", remote={"verify": True})
    producer.sim.add("p", prompt(ODD), 1, params=TO_PRODUCER)
    while "p" not in producer.sim.handed:
        producer.sim.advance()
    producer.sim.half.reset()
    producer.sim.run()
    assert_nothing_lent(producer)


# -- requests that do not end with their first token -----------------------------------------


def test_a_request_that_goes_on_is_handed_over_when_it_ends(early: Make, consumer: Engine) -> None:
    producer = early()
    producer.sim.add("p", prompt(ODD), 40, params=TO_PRODUCER)
    while not lent(producer):
        producer.sim.advance()
    assert len(producer.sim.outputs["p"]) == 1  # copied with the step that said it
    producer.sim.run()
    assert producer.is_free()
    decode(consumer, prompt(ODD), producer.sim.handed["p"])
    assert consumer.count("hit_tokens|peer") == ODD
    assert_nothing_lent(producer)


def test_an_aborted_request_gives_its_slots_back(early: Make) -> None:
    producer = early()
    for i in range(3):
        producer.sim.add(f"p{i}", prompt(ODD, seed=i), 40, params=TO_PRODUCER)
    while lent(producer) < 18:
        producer.sim.advance()
    for i in range(3):
        producer.sim.abort(f"p{i}")
    producer.sim.run()
    assert producer.sim.handed == {}
    assert_nothing_lent(producer)


def test_requests_that_were_preempted(early: Make, consumer: Engine) -> None:
    producer = early(num_blocks=14)
    for i in range(2):
        producer.sim.add(f"p{i}", prompt(ODD, seed=i), 3 * BLOCK, params=TO_PRODUCER)
    producer.sim.run()
    assert any(request.num_preemptions for request in producer.sim.requests.values())
    for i in range(2):
        decode(consumer, prompt(ODD, seed=i), producer.sim.handed[f"p{i}"], f"d{i}")
    assert consumer.count("hit_tokens|peer") == 2 * ODD
    assert_nothing_lent(producer)


def test_what_was_copied_before_a_reset_is_not_handed_over(early: Make) -> None:
    producer = early()
    producer.sim.add("p", prompt(ODD), 40, params=TO_PRODUCER)
    while not lent(producer):
        producer.sim.advance()
    producer.sim.half.reset()
    producer.sim.run()
    assert producer.sim.handed == {"p": refusal()}
    assert_nothing_lent(producer)
