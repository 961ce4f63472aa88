# SPDX-License-Identifier: Apache-2.0
"""One engine reads chunks out of another one's CPU tier: every number of them, or a recompute."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.scheduler.handover import LEASE, Engine, Fleet, wait, wait_held
from tests.scheduler.pairs import HIT, LONG, Pair, complete, rests
from tests.scheduler.sim import BLOCK, prompt
from vllm_tiered_kv.gate import Work
from vllm_tiered_kv.gate.mode import GateMode
from vllm_tiered_kv.remote.agent import GRACE
from vllm_tiered_kv.scheduler.peer_probe import LEAST_PAUSE


@pytest.fixture
def pair(fleet: Fleet) -> Pair:
    return Pair(fleet, {}, {}).meet()


def test_chunks_come_from_the_peers_cpu_tier(pair: Pair) -> None:
    tokens = prompt(LONG + 5)
    pair.teach(tokens, "a")
    complete(pair.b, tokens, "b")
    assert pair.b.count(HIT) == LONG
    assert pair.b.count("chunks|loaded|peer_cpu") == 8
    assert pair.b.count("bytes|load|peer_cpu") == pair.b.transport.nbytes
    assert not pair.b.failures
    assert not pair.a.failures
    pair.settle()
    # They are in B's own tier now.
    pair.b.sim.flush_device()
    reads = pair.b.transport.reads
    complete(pair.b, tokens, "again")
    assert pair.b.transport.reads == reads
    assert pair.b.count("hit_tokens|cpu") == LONG
    assert pair.b.sim.sources


def test_only_what_is_missing_is_asked_for(pair: Pair) -> None:
    tokens = prompt(LONG)
    complete(pair.b, tokens[: 3 * BLOCK], "b1")
    pair.b.sim.settle()
    pair.b.sim.flush_device()
    pair.teach(tokens, "a")
    complete(pair.b, [*tokens, 1, 2], "b2")
    assert pair.b.count(HIT) == 5 * BLOCK
    assert pair.b.count("hit_tokens|cpu") == 3 * BLOCK
    pair.settle()


def test_what_the_peer_has_not_is_computed(pair: Pair) -> None:
    tokens = prompt(LONG)
    pair.teach(tokens[: 4 * BLOCK], "a")
    complete(pair.b, tokens, "b")
    assert pair.b.count(HIT) == 4 * BLOCK
    complete(pair.b, prompt(LONG, seed=9), "other")
    assert pair.b.count(HIT) == 4 * BLOCK
    pair.settle()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_a_peer_of_any_role(fleet: Fleet, role: str) -> None:
    pair = Pair(fleet, {"role": role}, {"role": "kv_consumer"}).meet()
    pair.teach(prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == LONG


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_many_requests_ranks_and_steps_in_flight(fleet: Fleet, ranks: int, depth: int) -> None:
    options = {"ranks": ranks, "depth": depth}
    pair = Pair(fleet, dict(options), dict(options)).meet()
    shared = prompt(5 * BLOCK)
    texts = [[*shared, *prompt(3 * BLOCK + i, seed=i)] for i in range(6)]
    for i, tokens in enumerate(texts):
        pair.teach(tokens, f"a{i}")
    for i, tokens in enumerate(texts):
        pair.b.sim.add(f"b{i}", tokens, 4)
    pair.b.sim.run()
    for i in range(6):
        assert pair.b.sim.outputs[f"b{i}"] == pair.b.sim.expected(f"b{i}")
    assert pair.b.count("chunks|loaded|peer_cpu") > 5
    assert not pair.b.failures
    pair.settle()


def test_chunks_of_several_blocks(fleet: Fleet) -> None:
    pair = Pair(fleet, {"chunk_blocks": 2}, {"chunk_blocks": 2}).meet()
    pair.teach(prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == LONG


def test_who_wants_the_same_joins_the_question(pair: Pair) -> None:
    tokens = prompt(LONG)
    pair.teach(tokens, "a")
    pair.b.transport.is_held = True
    pair.b.sim.add("b1", tokens, 3)
    wait_held(pair.b)
    pair.b.sim.add("b2", [*tokens, 4], 3)
    for _ in range(5):
        pair.b.sim.advance()
    assert pair.b.transport.reads == 1
    assert len(pair.b.remote.peers._claims) == 1
    pair.b.transport.release()
    pair.b.sim.run()
    for name in ("b1", "b2"):
        assert pair.b.sim.outputs[name] == pair.b.sim.expected(name)
    assert pair.b.transport.reads == 1
    pair.settle()


# -- what goes wrong ---------------------------------------------------------------------


def test_a_peer_that_is_gone(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    pair.a.remote.agent.shutdown()
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == 0
    began = len(pair.b.sim.requests)
    complete(pair.b, prompt(LONG, seed=2), "b2")
    assert len(pair.b.sim.requests) == began + 1
    pair.b.sim.check_quiet()


def test_a_read_that_fails_is_computed(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    pair.b.transport.is_broken = True
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == 0
    assert pair.b.count("chunks|failed|peer_cpu") == 8
    assert "remote_disconnected" in pair.b.failures
    pair.b.transport.is_broken = False
    pair.b.sim.settle()
    pair.settle()


def test_what_is_given_up_keeps_its_slots_until_it_writes_no_more(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    used = pair.b.sim.half.core.index.used_slots
    pair.b.transport.is_held = True
    pair.b.sim.add("b", prompt(LONG), 3)
    wait_held(pair.b)
    pair.b.transport.give_up()
    pair.b.transport.is_held = False
    pair.b.sim.run()
    assert pair.b.sim.outputs["b"] == pair.b.sim.expected("b")
    pair.b.sim.settle()
    assert pair.b.remote.peers.quarantined == 1
    assert pair.b.sim.half.core.index.used_slots == used + 8 + 8  # computed, and in quarantine
    assert pair.lent == 8
    pair.b.sim.check_pool()
    pair.b.transport.land()
    pair.settle()
    pair.b.sim.check_pool()
    assert pair.b.sim.half.core.index.used_slots == used + 8


def test_bytes_that_arrive_after_the_lease_are_not_accepted(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    pair.b.transport.is_held = True
    pair.b.sim.add("b", prompt(LONG), 3)
    wait_held(pair.b)
    (batch,) = pair.b.remote.peers._batches.values()
    batch.loan = type(batch.loan)(
        batch.loan.address, batch.loan.memory, batch.loan.hold, batch.loan.slots, 0.0
    )
    pair.b.transport.release()
    pair.b.sim.run()
    assert pair.b.sim.outputs["b"] == pair.b.sim.expected("b")
    assert pair.b.count(HIT) == 0
    assert pair.b.failures == {"remote_lease": 1}
    pair.settle()


@pytest.mark.parametrize("time", [0.0, 1e12], ids=["behind", "ahead"])
def test_a_rank_whose_clock_is_another_hosts(pair: Pair, time: float) -> None:
    pair.b.sim.worker._worker.remote._pulls._clock = lambda: time
    pair.teach(prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT)
    assert not pair.b.failures


def test_nothing_is_begun_under_a_loan_that_ends(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    peers = pair.b.remote.peers
    clock = pair.b.sim.half.core.clock
    pair.b.sim.half.core.clock = lambda: clock() + LEASE
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == 0
    assert pair.b.transport.reads == 0
    assert not peers._there


def test_who_says_nothing_costs_lease_and_grace(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    pair.b.transport.is_held = True
    pair.b.sim.add("b", prompt(LONG), 3)
    wait_held(pair.b)
    assert pair.lent == 8
    pair.b.remote.agent._finder._send = lambda address, data: True
    pair.a.pass_time(LEASE + 1)
    time.sleep(0.5)
    assert pair.lent == 8
    pair.a.pass_time(GRACE)
    wait(lambda: pair.lent == 0, "the lease does not end")
    pair.b.transport.release()
    pair.b.sim.run()


def test_what_is_read_is_not_evicted(fleet: Fleet) -> None:
    pair = Pair(fleet, {"capacity_chunks": 40}, {}).meet()
    pair.teach(prompt(LONG), "a")
    pair.b.transport.is_held = True
    pair.b.sim.add("b", prompt(LONG), 3)
    wait_held(pair.b)
    for i in range(10):  # twice the tier
        pair.teach(prompt(LONG, seed=20 + i), f"a{i}")
    pair.b.transport.release()
    pair.b.sim.run()
    assert pair.b.count(HIT) == LONG
    assert pair.b.sim.outputs["b"] == pair.b.sim.expected("b")
    pair.settle()
    pair.a.sim.check_pool()


def test_a_share_of_the_tier_is_lent_at_most(fleet: Fleet) -> None:
    pair = Pair(fleet, {"capacity_chunks": 16}, {}).meet()
    pair.teach(prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == 4 * BLOCK


def test_aborts_leak_nothing(pair: Pair) -> None:
    for i in range(12):
        pair.teach(prompt(LONG, seed=i), f"a{i}")
        pair.b.transport.is_held = True
        pair.b.sim.add(f"b{i}", prompt(LONG, seed=i), 3)
        if i % 2:
            wait_held(pair.b)
        pair.b.sim.abort(f"b{i}")
        pair.b.transport.release()
        pair.b.sim.run()
    pair.settle()


def test_after_a_reset_nothing_older_is_lent(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    pair.a.sim.half.reset()
    pair.teach(prompt(LONG), "a2")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == 0
    assert len(pair.a.remote.agent.shelf) == 0


def test_after_a_reset_nothing_is_asked_for(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    pair.b.transport.is_held = True
    pair.b.sim.add("b", prompt(LONG), 3)
    wait_held(pair.b)
    pair.b.sim.half.reset()
    pair.b.transport.release()
    pair.b.sim.run()
    assert pair.b.sim.outputs["b"] == pair.b.sim.expected("b")
    assert pair.b.count(HIT) == 0
    complete(pair.b, prompt(LONG), "b2")
    assert pair.b.transport.reads == 1
    pair.settle()


def test_other_chunks_are_not_asked_for(fleet: Fleet) -> None:
    pair = Pair(fleet, {"chunk_blocks": 2}, {})
    wait(lambda: "remote_pages" in said(pair.b), "B has not met A")
    pair.teach(prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.transport.reads == 0


def said(engine: Engine) -> dict[str, float]:
    engine.sim.half.drain()
    engine.sim._collect()
    return engine.failures


def test_a_request_that_was_handed_over_asks_nobody_else(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    pair.a.sim.add("p", prompt(LONG), 1, params=params)
    pair.a.sim.run()
    pair.b.sim.add("b", prompt(LONG), 3, params=pair.a.sim.handed["p"])
    pair.b.sim.run()
    assert pair.b.sim.outputs["b"] == pair.b.sim.expected("b")
    assert (pair.b.count("hit_tokens|peer"), pair.b.count(HIT)) == (LONG, 0)


# -- the gate ----------------------------------------------------------------------------


def taught(pair: Pair, read: float) -> None:
    """B knows that computing takes a millisecond a token, and reading so long a chunk."""
    core, gate = pair.b.sim.half.core, pair.b.sim.half.gate
    core.settings = type(core.settings)(
        **{
            **{name: getattr(core.settings, name) for name in core.settings.__struct_fields__},
            "gate": GateMode.MEASURED,
        }
    )
    for i in range(30):
        tokens = 16 * (1 + i % 8)
        work = Work(tokens, 0.0, is_prefill=True)
        gate.gate.prefill.observe(work, 0.001 * tokens)
    nbytes = gate._bytes(1)
    for i in range(12):
        gate.gate.copy.observe(nbytes * (1 + i % 4), 1e-5 * (1 + i % 4))
        gate.gate.peers.observe(nbytes * (1 + i % 4), read * (1 + i % 4))


def test_a_peer_that_is_slower_than_computing_is_not_asked(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    taught(pair, read=1.0)
    pair.b.sim.half.gate.peers.probe._pace.tried(pair.b.sim.half.core.clock())
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.transport.reads == 0
    assert pair.b.count(HIT) == 0


def test_a_peer_that_is_refused_is_tried_in_the_background(pair: Pair) -> None:
    for i in range(3):
        pair.teach(prompt(LONG, seed=i), f"a{i}")
    taught(pair, read=1.0)
    for i in range(3):
        pair.b.clock.ahead += 2 * LEAST_PAUSE
        complete(pair.b, prompt(LONG, seed=i), f"b{i}", 20)
    wait(lambda: rests(pair.b), "the probe does not end")
    assert pair.b.count("gate_probes|peer_cpu") >= 1
    assert pair.b.transport.reads >= 1
    assert pair.b.count("chunks|loaded|peer_cpu") == 0
    pair.settle()


def test_a_peer_that_is_faster_is_read(pair: Pair) -> None:
    pair.teach(prompt(LONG), "a")
    taught(pair, read=1e-5)
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == LONG


@pytest.mark.parametrize(("peers", "first"), [(0.1, True), (0.9, False), (2.0, False)])
def test_peers_come_before_a_disk_that_is_slower_by_far(
    pair: Pair, peers: float, first: bool
) -> None:
    gate = pair.b.sim.half.gate
    assert not gate.prefers_peers()  # nothing was measured
    for i in range(12):
        nbytes = gate._bytes(1 + i % 4)
        gate.gate.disk.observe(nbytes, 1.0 * (1 + i % 4))
        gate.gate.peers.observe(nbytes, peers * (1 + i % 4))
    assert gate.prefers_peers() is first


# -- everything at once ------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(fleet: Fleet, seed: int) -> None:
    """Small tiers, shared prefixes, reads that stall and fail, aborts: each byte is checked."""
    chance = random.Random(seed)
    options: dict[str, Any] = {
        "capacity_chunks": chance.choice([16, 30, 60]),
        "num_blocks": 40,
        "depth": chance.choice([1, 2]),
        "extra": {"trust_after_reset": seed % 2 == 0},
    }
    verify = seed % 4 > 1
    a = fleet.engine("kv_both", remote={"peers": [], "verify": verify}, **options)
    peers = [f"127.0.0.1:{a.remote.agent.address.port}"]
    b = fleet.engine("kv_both", remote={"peers": peers, "verify": verify}, **options)
    families = [prompt(6 * BLOCK, seed=100 + i) for i in range(4)]
    names = 0
    for _ in range(150):
        engine = chance.choice([a, b, b])
        match chance.randrange(12):
            case 0 | 1 | 2:
                names += 1
                head = chance.choice(families)[: chance.randrange(1, 6 * BLOCK)]
                tail = prompt(chance.randrange(1, 30), seed=chance.randrange(3))
                engine.sim.add(f"r{names}", [*head, *tail], chance.randrange(1, 8))
            case 3 if live := list(engine.sim.scheduler.requests):
                engine.sim.abort(chance.choice(live))
            case 4:
                b.transport.is_held = not b.transport.is_held
                if not b.transport.is_held:
                    b.transport.release()
            case 5:
                b.transport.is_broken = chance.random() < 0.3
                b.transport.damages = verify and chance.random() < 0.3
            case 6 if chance.random() < 0.5:
                b.transport.give_up()
            case 7:
                b.transport.land()
            case 8 if not engine.sim.scheduler.running:
                engine.sim.scheduler.reset_prefix_cache()
            case 9 if chance.random() < 0.1:
                engine.sim.half.reset()
            case _:
                for _ in range(chance.randrange(1, 6)):
                    engine.sim.advance()
        for each in (a, b):
            each.sim.check_pool()
    b.transport.is_broken = False
    b.transport.release()
    b.transport.land()
    for each in (a, b):
        each.sim.run()
        for name, said_ in each.sim.outputs.items():
            if name not in each.sim.finished:
                assert said_ == each.sim.expected(name)
    b.transport.land()
    for each in (b, a):
        wait(lambda each=each: rests(each), "something is not given back")  # type: ignore[misc]
        each.sim.check_quiet()
    assert a.remote.agent.shelf.lent_slots == 0


def test_who_does_not_take_part_lends_nothing(fleet: Fleet) -> None:
    alone = fleet.engine("kv_producer")
    assert alone.remote.agent.shelf is None
    listens = fleet.engine("kv_consumer")
    assert listens.remote.agent.address is None
