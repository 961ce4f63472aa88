# SPDX-License-Identifier: Apache-2.0
"""Hand-overs of models with sliding windows: vLLM frees what a window has left behind."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from tests.scheduler.handover import (
    LEASE,
    TO_PRODUCER,
    Engine,
    Fleet,
    abort_while_bytes_come,
    decode,
    give_up_while_bytes_come,
    prefill,
    wait,
    wait_held,
)
from tests.scheduler.sim import BLOCK, STATE, Runner, prompt
from tests.scheduler.tokens import LAYERS
from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.remote.params import refusal

MODELS = [(0, 40), (0, 2 * BLOCK), (17, 0), (0, 24, 40), (64,), (0, BLOCK + 1)]
WINDOWS = (0, 40)
LENGTH = 7 * BLOCK + 7
"""The window of its last token begins with a block, and vLLM frees the one before as the request
ends."""
ONE_BLOCK = LAYERS * BLOCK * 8
"""Bytes, in one KV cache group."""


def engine(fleet: Fleet, role: str, windows: Sequence[int] = WINDOWS, **options: Any) -> Engine:
    blocks = options.pop("num_blocks", 64) * len(windows)
    return fleet.engine(role, windows=windows, num_blocks=blocks, **options)


@pytest.fixture
def producer(fleet: Fleet) -> Engine:
    return engine(fleet, "kv_producer")


@pytest.fixture
def consumer(fleet: Fleet) -> Engine:
    return engine(fleet, "kv_consumer")


def blocks_of(length: int, windows: Sequence[int] = WINDOWS) -> int:
    """Blocks that are handed over: of a window those that the last token sees."""
    total = -(-length // BLOCK)
    return sum(total - (max(0, length - window) // BLOCK if window else 0) for window in windows)


def assert_quiet(*engines: Engine) -> None:
    for each in engines:
        wait(lambda each=each: each.is_free() and not len(each.remote.handing), "still held")
        each.sim.settle()
        assert each.sim.half.core.index.pinned == each.remote.handing.slots == 0
        each.sim.check_quiet()


# -- whole prompts -------------------------------------------------------------------------


@pytest.mark.parametrize("windows", MODELS, ids=str)
def test_prompts_of_any_length(fleet: Fleet, windows: tuple[int, ...]) -> None:
    producer = engine(fleet, "kv_producer", windows)
    consumer = engine(fleet, "kv_consumer", windows)
    for length in [*range(2, 6 * BLOCK, 3), *range(6 * BLOCK, 7 * BLOCK), 20 * BLOCK]:
        before, came = consumer.count("hit_tokens|peer"), consumer.transport.nbytes
        tokens = prompt(length, seed=length)
        params = prefill(producer, tokens, f"p{length}")
        decode(consumer, tokens, params, f"d{length}", BLOCK + 2)
        # The last token is computed again.
        assert consumer.count("hit_tokens|peer") - before == length - 1
        local = -(-(length - 1) // BLOCK) - -(-length // BLOCK)
        blocks = blocks_of(length, windows) + local * len(windows)
        assert consumer.transport.nbytes - came == blocks * ONE_BLOCK
        producer.wait_free()
    assert not consumer.failures
    assert not producer.failures
    assert_quiet(producer, consumer)


def test_a_prompt_of_one_token_is_computed(producer: Engine, consumer: Engine) -> None:
    decode(consumer, prompt(1), prefill(producer, prompt(1)))
    assert consumer.transport.reads == 0
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("length", [LENGTH, LENGTH + 1])
def test_a_producer_keeps_what_the_window_sees(producer: Engine, length: int) -> None:
    params = prefill(producer, prompt(length))
    assert producer.sim.free_at_start - producer.sim.free_blocks == blocks_of(length)
    assert [len(group) for group in params["remote_block_ids"]] == [8, blocks_of(length) - 8]
    # Others use all the rest; nobody may be given what is kept.
    for i in range(6):
        producer.sim.add(f"other{i}", prompt(12 * BLOCK, seed=50 + i), 6)
    producer.sim.run()
    producer.pass_time(LEASE)
    assert_quiet(producer)


@pytest.mark.parametrize(
    "options",
    [{"ranks": 2}, {"depth": 2}, {"drafts": 3}, {"depth": 2, "drafts": 3}],
    ids=["ranks", "async", "drafts", "async drafts"],
)
@pytest.mark.parametrize("handoff", ["device", "cpu"])
def test_engines_of_several_kinds(fleet: Fleet, options: dict[str, Any], handoff: str) -> None:
    options = {**options, "num_blocks": 256}
    producer = engine(fleet, "kv_producer", remote={"handoff": handoff}, **options)
    consumer = engine(fleet, "kv_consumer", **options)
    lengths = range(5 * BLOCK, 6 * BLOCK + 4)
    for length in lengths:
        tokens = prompt(length, seed=length)
        params = prefill(producer, tokens, f"p{length}")
        consumer.sim.add(f"d{length}", tokens, 20, params=params)
    consumer.sim.run()
    for length in lengths:
        assert consumer.sim.outputs[f"d{length}"] == consumer.sim.expected(f"d{length}")
    assert consumer.count("hit_tokens|peer") == sum(length - 1 for length in lengths)
    assert not consumer.failures
    assert not producer.failures
    assert_quiet(producer, consumer)


def test_without_prefix_caching(fleet: Fleet) -> None:
    producer = engine(fleet, "kv_producer", enable_prefix_caching=False)
    consumer = engine(fleet, "kv_consumer", enable_prefix_caching=False)
    for length in (LENGTH, LENGTH + 1):
        tokens = prompt(length, seed=length)
        decode(consumer, tokens, prefill(producer, tokens, f"p{length}"), f"d{length}")
    assert consumer.count("hit_tokens|peer") == 2 * LENGTH - 1
    assert_quiet(producer, consumer)


def test_prompts_that_are_prefilled_in_steps(fleet: Fleet, consumer: Engine) -> None:
    producer = engine(fleet, "kv_producer", max_num_batched_tokens=BLOCK + 5)
    for length in range(5 * BLOCK, 6 * BLOCK):
        tokens = prompt(length, seed=length)
        decode(consumer, tokens, prefill(producer, tokens, f"p{length}"), f"d{length}")
    assert consumer.failures == producer.failures == {}
    assert consumer.count("hit_tokens|peer") == sum(range(5 * BLOCK - 1, 6 * BLOCK - 1))
    assert_quiet(producer, consumer)


# -- together with the device and the tiers ------------------------------------------------------


@pytest.mark.parametrize("flush", [False, True], ids=["device", "tier"])
@pytest.mark.parametrize("windows", MODELS, ids=str)
def test_what_the_consumer_has_is_not_pulled(
    fleet: Fleet, windows: tuple[int, ...], flush: bool
) -> None:
    producer = engine(fleet, "kv_producer", windows)
    consumer = engine(fleet, "kv_consumer", windows)
    tokens: list[int] = []
    for turn in range(5):
        tokens = [*tokens, *prompt(2 * BLOCK + 5, seed=turn)]
        before = consumer.count("hit_tokens|peer")
        decode(consumer, tokens, prefill(producer, tokens, f"p{turn}"), f"d{turn}", 30)
        if turn and not any(window % BLOCK for window in windows):
            # All but the new turn, and what is below a block, was there. (With other windows vLLM
            # may have too little of one to go on from a block's end.)
            assert consumer.count("hit_tokens|peer") - before <= 3 * BLOCK + 5
        consumer.sim.settle()
        if flush:
            consumer.sim.flush_device()
    assert not consumer.failures
    assert_quiet(producer, consumer)


def test_what_was_pulled_is_found_in_the_tier(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(LENGTH)
    decode(consumer, tokens, prefill(producer, tokens))
    consumer.sim.settle()
    consumer.sim.flush_device()
    again = consumer.sim.complete("again", tokens, 3)
    assert again.cpu == LENGTH // BLOCK * BLOCK
    assert again.output == consumer.sim.expected("again")
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("length", range(LENGTH, LENGTH + BLOCK))
def test_two_who_go_on_from_one_prompt(producer: Engine, consumer: Engine, length: int) -> None:
    tokens = prompt(length)
    params = prefill(producer, tokens)
    consumer.transport.is_held = True
    for name in ("d0", "d1"):
        consumer.sim.add(name, tokens, 4, params=dict(params))
    wait_held(consumer)
    for _ in range(5):
        consumer.sim.advance()
    consumer.transport.release()
    consumer.sim.run()
    for name in ("d0", "d1"):
        assert consumer.sim.outputs[name] == consumer.sim.expected(name)
    assert not consumer.failures
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("length", range(LENGTH, LENGTH + 4))
def test_a_prompt_that_goes_on(producer: Engine, consumer: Engine, length: int) -> None:
    tokens = prompt(length)
    decode(consumer, [*tokens, 5, 6, 7], prefill(producer, tokens))
    assert consumer.count("hit_tokens|peer") == length
    assert_quiet(producer, consumer)


# -- slots and checksums ---------------------------------------------------------------------------


@pytest.mark.parametrize("windows", MODELS, ids=str)
@pytest.mark.parametrize("chunk_blocks", [1, 3])
def test_the_devices_blocks_are_free_before_anybody_comes(
    fleet: Fleet, windows: tuple[int, ...], chunk_blocks: int
) -> None:
    options: dict[str, Any] = {"chunk_blocks": chunk_blocks, "remote": {"handoff": "cpu"}}
    producer = engine(fleet, "kv_producer", windows, capacity_chunks=600, **options)
    consumer = engine(fleet, "kv_consumer", windows)
    lengths = [2, BLOCK, *range(6 * BLOCK, 7 * BLOCK, 3), LENGTH, 20 * BLOCK]
    for length in lengths:
        tokens = prompt(length, seed=length)
        params = prefill(producer, tokens, f"p{length}")
        assert producer.is_free()
        producer.sim.complete(f"other{length}", prompt(40 * BLOCK, seed=-length), 1)
        decode(consumer, tokens, params, f"d{length}")
    assert producer.count("handoffs|early") == len(lengths)
    assert consumer.count("hit_tokens|peer") == sum(length - 1 for length in lengths)
    assert not consumer.failures
    assert not producer.failures
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("when", ["fail", "fail_late"])
def test_a_copy_that_fails_leaves_the_blocks(fleet: Fleet, consumer: Engine, when: str) -> None:
    producer = engine(fleet, "kv_producer", remote={"handoff": "cpu"})
    getattr(producer.sim.gate, when).add("store")
    params = prefill(producer, prompt(LENGTH))
    assert producer.sim.free_at_start - producer.sim.free_blocks == blocks_of(LENGTH)
    decode(consumer, prompt(LENGTH), params)
    assert consumer.count("hit_tokens|peer") == LENGTH - 1
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("handoff", ["cpu", "device"])
@pytest.mark.parametrize("windows", MODELS, ids=str)
def test_what_arrives_is_compared(fleet: Fleet, windows: tuple[int, ...], handoff: str) -> None:
    remote = {"handoff": handoff, "verify": True}
    producer = engine(fleet, "kv_producer", windows, chunk_blocks=2, remote=remote)
    consumer = engine(fleet, "kv_consumer", windows, remote={"verify": True})
    tokens: list[int] = []
    for turn in range(4):
        tokens = [*tokens, *prompt(2 * BLOCK + 7, seed=turn)]
        decode(consumer, tokens, prefill(producer, tokens, f"p{turn}"), f"d{turn}")
        consumer.sim.settle()
    assert consumer.count("handoffs|pulled") == 4
    assert not consumer.failures
    assert not producer.failures
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("handoff", ["cpu", "device"])
def test_one_wrong_bit_is_seen(fleet: Fleet, handoff: str) -> None:
    producer = engine(fleet, "kv_producer", remote={"handoff": handoff, "verify": True})
    consumer = engine(fleet, "kv_consumer", remote={"verify": True})
    consumer.transport.damages = True
    decode(consumer, prompt(LENGTH), prefill(producer, prompt(LENGTH)))
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.failures == {"remote_verify": 1, "load_failed": 1}
    assert_quiet(producer, consumer)


# -- requests that go on, are aborted or preempted -------------------------------------------


@pytest.mark.parametrize("handoff", ["cpu", "device"])
@pytest.mark.parametrize("said", [2, BLOCK, 5 * BLOCK])
def test_a_request_that_goes_on_is_handed_over_when_it_ends(
    fleet: Fleet, consumer: Engine, handoff: str, said: int
) -> None:
    producer = engine(fleet, "kv_producer", remote={"handoff": handoff})
    for length in range(LENGTH, LENGTH + BLOCK, 5):
        tokens = prompt(length, seed=length)
        producer.sim.add(f"p{length}", tokens, said, params=TO_PRODUCER)
        producer.sim.run()
        before = consumer.count("hit_tokens|peer")
        decode(consumer, tokens, producer.sim.handed[f"p{length}"], f"d{length}")
        assert consumer.count("hit_tokens|peer") - before == length - 1
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("handoff", ["cpu", "device"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_aborted_request_gives_all_back(fleet: Fleet, handoff: str, depth: int) -> None:
    producer = engine(fleet, "kv_producer", remote={"handoff": handoff}, depth=depth)
    for steps in range(12):
        names = [f"p{steps}.{i}" for i in range(3)]
        for i, name in enumerate(names):
            tokens = prompt(LENGTH + 9 * i, seed=100 * steps + i)
            producer.sim.add(name, tokens, 20, params=TO_PRODUCER)
        for _ in range(steps):
            producer.sim.advance()
        for name in names:
            producer.sim.abort(name)
        producer.sim.run()
        producer.sim.settle()
        producer.sim.flush_device()
    assert producer.sim.handed == {}
    assert_quiet(producer)


@pytest.mark.parametrize("handoff", ["cpu", "device"])
def test_requests_that_are_preempted_come_to_an_end(
    fleet: Fleet, consumer: Engine, handoff: str
) -> None:
    producer = engine(
        fleet,
        "kv_producer",
        num_blocks=20,
        remote={"handoff": handoff},
        scheduler_reserve_full_isl=False,  # vLLM lets them begin without room for all of it
    )
    for i in range(3):
        producer.sim.add(f"p{i}", prompt(4 * BLOCK + 7, seed=i), 3 * BLOCK, params=TO_PRODUCER)
    producer.sim.run()
    assert any(request.num_preemptions for request in producer.sim.requests.values())
    for i in range(3):
        assert producer.sim.outputs[f"p{i}"] == producer.sim.expected(f"p{i}")
        decode(consumer, prompt(4 * BLOCK + 7, seed=i), producer.sim.handed[f"p{i}"], f"d{i}")
    assert_quiet(producer, consumer)


def test_a_request_that_fills_the_device_comes_to_an_end(fleet: Fleet, consumer: Engine) -> None:
    # What its window leaves behind is just what it needs to go on.
    producer = engine(
        fleet,
        "kv_producer",
        (0, 2 * BLOCK),
        num_blocks=9,
        max_model_len=12 * BLOCK,
        max_num_batched_tokens=2 * BLOCK,
        remote={"handoff": "device"},
    )
    producer.sim.add("p", prompt(9 * BLOCK - 2), 50, params=TO_PRODUCER)
    producer.sim.run()
    assert producer.sim.outputs["p"] == producer.sim.expected("p")
    assert producer.sim.requests["p"].num_preemptions
    assert producer.sim.handed["p"] == refusal()
    assert_quiet(producer)


# -- what goes wrong -----------------------------------------------------------------------------


def test_nobody_comes(producer: Engine, consumer: Engine) -> None:
    params = prefill(producer, prompt(LENGTH))
    producer.pass_time(LEASE)
    producer.wait_free()
    decode(consumer, prompt(LENGTH), params)
    assert consumer.failures == {"remote_lease": 1}
    assert_quiet(producer, consumer)


def test_a_read_that_fails_is_recomputed(producer: Engine, consumer: Engine) -> None:
    consumer.transport.is_broken = True
    decode(consumer, prompt(LENGTH), prefill(producer, prompt(LENGTH)))
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.count("handoffs|failed") == 1
    assert_quiet(producer, consumer)


def test_aborts_while_bytes_are_on_their_way_leak_nothing(
    producer: Engine, consumer: Engine
) -> None:
    prompts = [prompt(LENGTH + i, seed=i) for i in range(20)]
    abort_while_bytes_come(producer, consumer, prompts)
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("is_aborted", [False, True], ids=["recomputed", "aborted"])
def test_what_is_given_up_keeps_its_blocks_until_it_writes_no_more(
    producer: Engine, consumer: Engine, is_aborted: bool
) -> None:
    held = blocks_of(LENGTH)
    give_up_while_bytes_come(producer, consumer, prompt(LENGTH), held, is_aborted=is_aborted)
    assert_quiet(producer, consumer)


def test_a_reset_ends_hand_overs(producer: Engine, consumer: Engine) -> None:
    params = prefill(producer, prompt(LENGTH))
    producer.sim.half.reset()
    producer.wait_free()
    decode(consumer, prompt(LENGTH), params)
    assert consumer.count("hit_tokens|peer") == 0
    assert_quiet(producer, consumer)


def test_a_device_too_small_for_all_at_once(producer: Engine, fleet: Fleet) -> None:
    consumer = engine(fleet, "kv_consumer", num_blocks=14)
    for i in range(8):
        tokens = prompt(7 * BLOCK + i, seed=i)
        consumer.sim.add(f"d{i}", tokens, 20, params=prefill(producer, tokens, f"p{i}"))
    consumer.sim.run()
    for i in range(8):
        assert consumer.sim.outputs[f"d{i}"] == consumer.sim.expected(f"d{i}")
    assert_quiet(producer, consumer)


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens(fleet: Fleet, seed: int) -> None:
    """Prompts with common heads, aborts, resets, reads that fail, small devices."""
    rng = random.Random(seed)
    windows = rng.choice(MODELS)
    common: dict[str, Any] = {
        "depth": rng.choice([1, 2]),
        "runner": rng.choice([Runner.SAVE_FIRST, Runner.RESULTS_FIRST]),
        "max_model_len": 16 * BLOCK,
        "max_num_batched_tokens": rng.choice([48, 256]),
    }
    verify = rng.random() < 0.5
    remote = {"handoff": rng.choice(["auto", "cpu", "device"]), "verify": verify}
    small, chunk = rng.choice([20, 64]), rng.choice([1, 2])
    producer = engine(
        fleet, "kv_producer", windows, num_blocks=small, chunk_blocks=chunk, remote=remote, **common
    )
    consumer = engine(
        fleet, "kv_consumer", windows, num_blocks=small, remote={"verify": verify}, **common
    )
    router = _Router(producer, consumer, rng)
    for i in range(60):
        head = prompt(8 * BLOCK, seed=1000 + rng.randrange(3))[: rng.randrange(8 * BLOCK)]
        router.ask(f"r{i}", [*head, *prompt(rng.randrange(1, 5 * BLOCK), seed=seed * 100 + i)])
        router.go_on(rng.randrange(6))
        consumer.transport.is_broken = rng.random() < 0.1
        if rng.random() < 0.1:
            rng.choice([producer, consumer]).sim.scheduler.reset_prefix_cache()
        if rng.random() < 0.2:
            router.abort(f"r{rng.randrange(i + 1)}")
    router.go_on(5000)
    assert not router.is_busy
    for name in consumer.sim.requests.keys() - consumer.sim.finished:
        assert consumer.sim.outputs[name] == consumer.sim.expected(name)
    assert consumer.count("hit_tokens|peer")
    assert not consumer.count("failures|internal") + producer.count("failures|internal")
    producer.pass_time(LEASE)
    assert_quiet(producer, consumer)


class _Router:
    """Passes on what a producer answers."""

    def __init__(self, producer: Engine, consumer: Engine, rng: random.Random) -> None:
        self._producer, self._consumer, self._rng = producer, consumer, rng
        self._asked: dict[str, list[int]] = {}

    def ask(self, name: str, tokens: list[int]) -> None:
        said = self._rng.choice([1, 1, 1, 1, 5, 40])
        self._producer.sim.add(name, tokens, said, params=TO_PRODUCER)
        self._asked[name] = tokens

    def abort(self, name: str) -> None:
        """Wherever it is."""
        if self._asked.pop(name, None) is not None:
            self._producer.sim.abort(name)
        elif name in self._consumer.sim.requests:
            self._consumer.sim.abort(name)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if not self.is_busy:
                return
            self._producer.sim.advance()
            handed = self._producer.sim.handed
            for name in [name for name in self._asked if name in handed]:
                said = self._rng.choice([2, 30])
                self._consumer.sim.add(name, self._asked.pop(name), said, params=handed[name])
            self._consumer.sim.advance()

    @property
    def is_busy(self) -> bool:
        return self._producer.sim.busy or self._consumer.sim.busy


# -- what is refused -----------------------------------------------------------------------------


def test_states_cannot_be_handed_over_yet(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="recurrent states"):
        engine(fleet, "kv_both", (0, STATE))


def test_chunks_of_windows_cannot_be_lent_yet(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match=r"remote\.peers"):
        engine(fleet, "kv_both", remote={"peers": []})
