# SPDX-License-Identifier: Apache-2.0
"""What was found by trying to break it: each scenario, and random mixtures of all of them."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput

from tests.scheduler.neighbour import Desk, beside
from tests.scheduler.sim import BLOCK, Runner, Sim, prompt

Make = Callable[..., Sim]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [60, 61, 62, 63])
def test_a_last_store_whose_block_is_handed_on_at_once_is_void(
    sim: Make, prefix_caching: bool, length: int
) -> None:
    """Store and fence travel in one plan; the rank must not have to order them."""
    engine = sim(
        depth=2, num_blocks=12, enable_prefix_caching=prefix_caching, max_model_len=16 * 12
    )
    engine.add("a", prompt(length), 4)
    engine.add("b", prompt(9 * BLOCK + 5, seed=1), 3)
    engine.run()
    engine.settle()
    engine.check_pool()
    if prefix_caching:
        engine.flush_device()
    again = engine.tokens["a"] + prompt(20, seed=7)
    assert len(engine.complete("again", again, 2).output) == 2
    engine.check_quiet()


def test_a_store_that_has_ended_survives_its_blocks(sim: Make) -> None:
    """Its result waits on the side channel while vLLM hands the blocks out."""
    engine = sim(num_blocks=12)
    engine.gate.hold("store")
    engine.complete("a", prompt(9 * BLOCK), 1)
    assert engine.half.core.ledger.stores
    engine.gate.release("store")
    lane = next(lane for d, lane in engine.worker._worker._lanes.items() if d.value == "store")
    deadline = time.monotonic() + 10
    while lane.in_flight:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)  # the last report crosses the socket; if it were late, more is dropped
    engine.complete("b", prompt(9 * BLOCK, seed=1), 1)
    engine.settle()
    again = engine.complete("again", prompt(9 * BLOCK), 1)
    assert again.device + again.cpu == 9 * BLOCK
    engine.check_quiet()


@pytest.mark.parametrize("handed_out", [False, True])
def test_a_store_under_way_outlives_a_reset_of_the_device_only(sim: Make, handed_out: bool) -> None:
    engine = sim(num_blocks=12)
    engine.gate.hold("store")
    engine.complete("a", prompt(9 * BLOCK), 1)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.reset_prefix_cache()
    assert engine.free_blocks == engine.free_at_start
    if handed_out:  # now its bytes are gone
        engine.complete("b", prompt(11 * BLOCK - 3, seed=1), 1)
    engine.gate.release("store")
    engine.settle()
    engine.flush_device()
    assert engine.complete("again", prompt(9 * BLOCK), 1).cpu == (0 if handed_out else 9 * BLOCK)
    engine.check_quiet()


def test_a_prompt_that_returns_while_it_is_stored_waits_for_the_store(sim: Make) -> None:
    engine = sim()
    engine.gate.hold("store")
    engine.complete("a", prompt(160), 1)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("again", prompt(160), 1)
    assert not engine.step().total_num_scheduled_tokens
    engine.gate.release("store")
    engine.run()
    assert engine.hit_tokens == 160
    engine.check_quiet()


def test_a_store_that_takes_too_long_is_not_waited_for(sim: Make) -> None:
    engine = sim()
    engine.gate.hold("store")
    engine.complete("a", prompt(160), 1)
    assert engine.scheduler.reset_prefix_cache()
    now = engine.half.core.clock()
    engine.add("again", prompt(160), 1)
    engine.step()
    engine.half.core.clock = lambda: now + 60
    engine.run()
    assert engine.hit_tokens == 0
    assert len(engine.outputs["again"]) == 1
    engine.gate.release("store")
    engine.check_quiet()


def test_a_failed_load_of_a_window_starts_over(sim: Make) -> None:
    """From the first bad block on is not enough: the window before it was never there."""
    engine = sim(windows=(64,), num_blocks=80)
    engine.complete("cold", prompt(160), 1)
    engine.settle()
    engine.flush_device()
    engine.gate.fail.add("load")
    assert len(engine.complete("again", prompt(170), 2).output) == 2
    engine.gate.fail.clear()
    engine.check_quiet()


def test_blocks_that_somebody_else_was_to_fill_are_not_stored(
    sim: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under MultiConnector another connector loads, and the request is aborted meanwhile."""
    engine = sim()
    connector = engine.connector
    find, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc

    def other_finds(request, computed):
        find(request, computed)
        return 64 - computed, True

    monkeypatch.setattr(connector, "get_num_new_matched_tokens", other_finds)
    monkeypatch.setattr(
        connector, "update_state_after_alloc", lambda r, blocks, _: allocated(r, blocks, 0)
    )
    engine.add("a", prompt(70), 2)
    engine.step()
    engine.abort("a")
    monkeypatch.undo()
    engine.step()
    engine.settle()
    assert engine.half.core.index.used_slots == 0
    engine.scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={"a"}))
    assert len(engine.complete("b", prompt(70), 2).output) == 2
    engine.check_quiet()


def test_a_lost_load_lets_those_pass_that_hold_blocks(sim: Make) -> None:
    """vLLM looks at no request behind one that does not fit, whoever holds the blocks it needs."""
    engine = sim()
    half = engine.half
    for name in ("lost", "other"):
        engine.add(name, prompt(100), 1)
    half.update(KVConnectorOutput(finished_recving={"lost", "other"}), ())
    lost, other = (engine.requests[name] for name in ("lost", "other"))
    assert half.find(lost, 0) == (None, False)  # looked up again: its load came to nothing
    assert half.find(lost, 0) == (None, False)
    assert half.find(other, 0) == (0, False)  # nobody holds blocks any more
    assert half.find(lost, 0) == (0, False)
    half.update(KVConnectorOutput(finished_recving={"other"}), ())
    assert half.find(lost, 0) == (None, False)
    now = half.core.clock()
    half.core.clock = lambda: now + 60
    assert half.find(lost, 0) == (0, False)
    engine.run()
    engine.check_quiet()


@pytest.mark.parametrize("who", ["the same", "another"])
def test_what_a_lost_load_still_reserves_holds_nobody_up(sim: Make, who: str) -> None:
    """vLLM admits no load of ours that needs those blocks: the request is computed instead."""
    desk = Desk()
    engine = sim(num_blocks=14, scheduling_policy="priority", beside=beside("first", desk))
    engine.complete("cold", prompt(160))
    engine.settle()
    engine.flush_device()
    desk.claim = 1
    engine.add("lost", prompt(160), 2, priority=1)
    if who == "another":  # "lost" lets "held" pass, and so stands behind "first"
        engine.add("held", prompt(20, seed=1), 2, priority=1)
    engine.step()
    desk.claim = 0
    desk.finish(engine, 0, well=False)
    desk.finish(engine, 0, well=True)
    engine.step()
    if who == "another":
        engine.add("first", prompt(160), 2)
    engine.run(limit=100)
    assert engine.outputs == {r: engine.expected(r) for r in engine.requests}
    engine.check_quiet()


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("windows", [(64,), (64, 64)], ids=["one group", "two groups"])
def test_loads_leave_each_other_what_they_need_to_run(
    sim: Make, windows: tuple[int, ...], drafts: int
) -> None:
    """vLLM counts what a window has left behind as held, and lets loads in that then get no more:
    none of them runs, so none gives anything back."""
    blocks = 13 * len(windows) + 1
    engine = sim(windows=windows, num_blocks=blocks, max_num_batched_tokens=48, drafts=drafts)
    prompts = [prompt(128, seed=i) for i in range(3)]
    for i, tokens in enumerate(prompts):
        engine.complete(f"cold {i}", tokens)
        engine.settle()
    engine.flush_device()
    engine.gate.hold("load")
    for i, tokens in enumerate(prompts):
        engine.add(f"warm {i}", tokens + prompt(32, seed=9), 2)
    for _ in range(5):
        engine.step()
    engine.gate.release("load")
    engine.run(limit=200)
    assert engine.outputs == {r: engine.expected(r) for r in engine.requests}
    assert engine.hit_tokens == 3 * 128
    engine.check_quiet()


@pytest.mark.parametrize(
    "options",
    [{}, {"windows": (0, 1000), "num_blocks": 23}, {"depth": 2, "role": "kv_producer"}],
    ids=["one group", "two groups", "async"],
)
def test_what_a_request_was_to_compute_when_it_gave_way_is_not_cached(
    sim: Make, options: dict[str, Any]
) -> None:
    """vLLM enters a step's blocks as cached and may then take the request out of the step."""
    given = {"num_blocks": 12, "scheduling_policy": "priority", **options}
    engine = sim(long_prefill_token_threshold=3 * BLOCK, **given)
    engine.add("low", prompt(160), 4, priority=1)
    engine.add("beside", prompt(5, seed=2))
    computed = Counter(engine.step().num_scheduled_tokens)
    engine.add("high", prompt(2 * BLOCK, seed=1), 4)
    while engine.scheduler.has_requests():
        computed.update(engine.step().num_scheduled_tokens)
        engine.check_pool()
    assert engine.requests["low"].num_preemptions == 1
    assert (computed["low"], engine.hit_tokens) == (160 + 3, 0)  # the rest was found again
    assert engine.outputs == {r: engine.expected(r) for r in engine.requests}
    engine.check_quiet()


def test_a_dropped_chunk_does_not_age_its_prefix(sim: Make) -> None:
    engine = sim(capacity_chunks=7)
    engine.complete("old", prompt(3 * BLOCK), 1)
    engine.settle()
    engine.flush_device()
    engine.complete("new", prompt(3 * BLOCK, seed=1), 1)
    engine.settle()
    index = engine.half.core.index
    leaves = [node for node in index._nodes.values() if index._policy.may_evict(node)]
    index.discard(
        max(leaves, key=lambda node: node.last_used)
    )  # the newest chunk is fenced or fails
    engine.flush_device()
    engine.complete("other", prompt(4 * BLOCK, seed=2), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("new again", prompt(3 * BLOCK, seed=1), 1).cpu == 2 * BLOCK
    engine.check_quiet()


def test_a_load_given_up_forgets_no_chunk(sim: Make) -> None:
    engine = sim()
    engine.complete("cold", prompt(160), 1)
    engine.settle()
    engine.flush_device()
    chunks = len(engine.half.core.index)
    engine.gate.hold("load")
    engine.add("x", prompt(160), 1)
    while not engine.gate.entered["load"].wait(0.001):
        engine.step()
    (job,) = engine.half.core.ledger.loads
    engine.half.loads.cancels.append(job)
    engine.step()
    engine.gate.release("load")
    engine.run()
    assert len(engine.half.core.index) == chunks
    engine.check_quiet()


class Watched(list):
    """Block hashes that count how many of them are looked at."""

    read = 0

    def __getitem__(self, index):
        self.read += 1 if isinstance(index, int) else len(range(*index.indices(len(self))))
        return super().__getitem__(index)


def asked_again(engine: Sim, request_id: str) -> int:
    """How many block hashes a look-up reads that is answered with "ask again"."""
    request = engine.requests[request_id]
    hashes = request.block_hashes
    request.block_hashes = request._block_hashes = watched = Watched(hashes)
    assert engine.half.find(request, 0) == (None, False)
    request.block_hashes = request._block_hashes = hashes
    return watched.read


def test_many_that_wait_for_one_load_are_asked_cheaply(sim: Make) -> None:
    """A look-up that can only be answered later touches one key, not the whole prompt."""
    engine = sim(num_blocks=128)
    engine.complete("cold", prompt(1600), 1)
    engine.settle()
    engine.flush_device()
    engine.gate.hold("load")
    engine.add("owner", prompt(1600), 1)
    while not engine.gate.entered["load"].wait(0.001):
        engine.step()
    engine.add("waiter", prompt(1600), 1)
    assert asked_again(engine, "waiter") == 1
    engine.gate.release("load")
    engine.run()
    engine.check_quiet()


def test_many_that_wait_for_one_store_are_asked_cheaply(sim: Make) -> None:
    engine = sim(num_blocks=128)
    now = engine.half.core.clock()
    engine.half.core.clock = lambda: now
    engine.gate.hold("store")
    engine.complete("a", prompt(1600), 1)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("waiter", prompt(1600), 1)
    engine.step()
    assert asked_again(engine, "waiter") == 1
    engine.gate.release("store")
    engine.run()
    assert engine.hit_tokens == 1600
    engine.check_quiet()


def mixture(seed: int) -> None:
    """One engine under a random mixture, with real threads and the real side channel.

    ``machine.py`` goes much further, but there everything moves by hand.
    """
    rng = random.Random(seed)
    windows = rng.choice(((0,), (0,), (0,), (0, 40), (64,), (0, 24)))
    depth = rng.choice((1, 2))
    engine = Sim(
        depth=depth,
        windows=windows,
        chunk_blocks=rng.choice((1, 1, 2, 3)),
        num_blocks=rng.choice((14, 20, 40, 80)) * len(windows),
        capacity_chunks=rng.choice((4, 12, 40, 200)),
        max_num_batched_tokens=rng.choice((48, 100, 256)),
        enable_prefix_caching=rng.random() < 0.75,
        max_num_seqs=rng.choice((2, 8)),
        runner=rng.choice(list(Runner)),
        policy=rng.choice(("recompute", "recompute", "fail")),
        max_model_len=16 * 12,
        extra={"load_deadline": rng.choice((10.0, 0.02))},
    )
    gate, scheduler = engine.gate, engine.scheduler
    try:
        for number in range(rng.choice((150, 300))):
            draw = rng.random()
            if draw < 0.25 and len(scheduler.requests) < 12:
                base = prompt(16 * 11, seed=rng.randrange(3))[: rng.randrange(0, 16 * 9)]
                if rng.random() < 0.3 and engine.tokens:  # a follow-up turn
                    base = engine.tokens[rng.choice(list(engine.tokens))][: 16 * 9]
                own = prompt(rng.randrange(1, 20), seed=rng.randrange(50))
                salt = rng.choice((None, None, None, "s"))
                engine.add(f"r{number}", (base + own)[: 16 * 10], rng.randrange(1, 14), salt=salt)
            elif draw < 0.28:
                live = [i for i, r in scheduler.requests.items() if not r.is_finished()]
                if live:
                    engine.abort(rng.choice(live))
            elif draw < 0.31:
                gate.hold(rng.choice(("store", "load")))
            elif draw < 0.40:
                gate.release("store")
                gate.release("load")
            elif draw < 0.42:
                gate.fail = set() if gate.fail else {rng.choice(("store", "load"))}
            elif draw < 0.44:
                scheduler.reset_prefix_cache(reset_connector=rng.random() < 0.6)
            elif scheduler.has_requests():
                engine.step()
                if rng.random() < 0.1:
                    time.sleep(0.002)  # lets lanes run; nothing depends on how far
            elif engine._in_flight:
                engine.process()
        gate.fail = set()
        gate.release("store")
        gate.release("load")
        engine.run()
        engine.check_quiet()
    finally:
        engine.close()


@pytest.mark.parametrize("seed", range(60))
def test_mixtures(seed: int) -> None:
    mixture(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_more_mixtures(block: int) -> None:
    for seed in range(1000 + 50 * block, 1050 + 50 * block):
        mixture(seed)


@pytest.mark.parametrize("trust", [False, True])
def test_bad_blocks_of_another_connector(sim: Make, trust: bool) -> None:
    """What was computed from them may be in the tier already: nothing of it is served."""
    engine = sim(max_num_batched_tokens=48, extra={"trust_after_reset": trust})
    engine.add("victim", prompt(100), 4)
    engine.step()
    (blocks,) = engine.scheduler.kv_cache_manager.get_block_ids("victim")

    def spoil(result: KVConnectorOutput) -> None:
        result.invalid_block_ids = {blocks[1]}
        engine.on_result = lambda _: None

    engine.on_result = spoil
    engine.step()
    engine.run()
    engine.settle()
    assert engine.counter("failures", "foreign") == 1
    assert len(engine.half.core.index) == 0
    engine.flush_device()
    assert engine.complete("after", prompt(100), 1).cpu == 0
    engine.settle()
    engine.flush_device()
    assert engine.complete("again", prompt(100), 1).cpu == 96
    engine.check_quiet()
