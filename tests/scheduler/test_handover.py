# SPDX-License-Identifier: Apache-2.0
"""One engine hands a prompt's KV over to another one: every number of it, or a recompute."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.near import NearTransport
from tests.scheduler.sim import BLOCK, Sim, prompt
from vllm_tiered_kv import assemble
from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.remote import assembly, keys
from vllm_tiered_kv.remote.agent import GRACE, RemoteAgent
from vllm_tiered_kv.remote.messages import Identity

TO_PRODUCER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
IDENTITY = Identity("a" * 32, "b" * 32)
LEASE = 30.0
ODD = 5 * BLOCK + 3
"""Tokens that end within a block."""


class Clock:
    """Real time, and more of it."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class Engine:
    """A simulated engine that hands KV over, and its transports."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.clock = Clock()
        self.remote = sim.half.remote
        self.remote.agent.clock = self.clock
        self.remote.agent._server._clock = self.clock
        self.remote.agent._client._clock = self.clock

    @property
    def transport(self) -> Any:
        return self.sim.worker._worker.remote._pulls._transport

    @property
    def failures(self) -> dict[str, float]:
        prefix = "failures|"
        return {
            key.removeprefix(prefix): value
            for key, value in self.sim.counters.items()
            if key.startswith(prefix)
        }

    def count(self, key: str) -> float:
        self.sim._collect()
        return self.sim.counters.get(key, 0.0)

    def pass_time(self, seconds: float) -> None:
        """After the agent has come to all that was said to it."""
        come_to: list[int] = []
        self.remote.agent._insist(come_to.append, 1)
        wait(lambda: bool(come_to), "the agent is stuck")
        self.clock.ahead += seconds

    def is_free(self) -> bool:
        self.sim.half.drain()
        return bool(self.sim.free_blocks == self.sim.free_at_start)

    def wait_free(self) -> None:
        wait(self.is_free, "blocks are still held")


def wait(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class Fleet:
    """Makes engines that share a key."""

    def __init__(self, make: Callable[..., Sim], folder: Path) -> None:
        self._make = make
        self._folder = folder
        self._names = itertools.count()
        keys.write(folder / "fleet.key", keys.generate())

    def engine(self, role: str, *, key: str = "fleet.key", **options: Any) -> Engine:
        remote = {
            "listen": "127.0.0.1:0",
            "key_file": str(self._folder / key),
            "lease": LEASE,
            **options.pop("remote", {}),
        }
        extra = {"remote": remote, **options.pop("extra", {})}
        sim = self._make(role=role, extra=extra, **options)
        for rank in sim.ranks:
            rank.tiered._worker.remote.open_transport = NearTransport
        engine = Engine(sim)
        sim.complete("first", prompt(BLOCK, seed=999), 1)  # ranks come with an engine's first step
        sim.settle()
        sim.flush_device()
        if role != "kv_consumer":
            wait(lambda: engine.remote.agent.sends, "the producer is not ready")
        return engine


@pytest.fixture
def fleet(sim: Callable[..., Sim], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    def introduce(agent: RemoteAgent, namespace: object) -> None:
        agent.identify(IDENTITY)  # as if these models had weights

    monkeypatch.setattr(assemble, "introduce", introduce)
    monkeypatch.setattr(assembly, "is_nixl_there", lambda: True)
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    return Fleet(sim, folder)


@pytest.fixture
def producer(fleet: Fleet) -> Engine:
    return fleet.engine("kv_producer")


@pytest.fixture
def consumer(fleet: Fleet) -> Engine:
    return fleet.engine("kv_consumer")


def prefill(producer: Engine, tokens: list[int], name: str = "p", **kw: Any) -> dict[str, Any]:
    """What a router learns from the producer."""
    producer.sim.add(name, tokens, 1, params=TO_PRODUCER, **kw)
    producer.sim.run()
    return producer.sim.handed[name]


def decode(
    consumer: Engine, tokens: list[int], params: Any, name: str = "d", count: int = 5, **kw: Any
) -> None:
    consumer.sim.add(name, tokens, count, params=params, **kw)
    consumer.sim.run()
    assert consumer.sim.outputs[name] == consumer.sim.expected(name)


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, ODD, 20 * BLOCK])
def test_all_but_the_last_token_comes_from_the_producer(
    producer: Engine, consumer: Engine, length: int
) -> None:
    tokens = prompt(length)
    params = prefill(producer, tokens)
    decode(consumer, tokens, params)
    assert consumer.count("hit_tokens|peer") == length
    assert consumer.count("handoffs|pulled") == 1
    assert not consumer.failures
    producer.wait_free()
    consumer.sim.check_quiet()
    producer.sim.check_quiet()


def test_a_producer_ends_its_request_and_keeps_the_blocks(producer: Engine) -> None:
    params = prefill(producer, prompt(ODD))
    assert not producer.sim.scheduler.has_requests()
    assert producer.sim.free_at_start - producer.sim.free_blocks == 6
    assert params["do_remote_prefill"] is True
    assert [len(group) for group in params["remote_block_ids"]] == [6]
    assert params["remote_port"] == producer.remote.agent.address.port


def test_what_the_consumer_has_is_not_pulled(producer: Engine, consumer: Engine) -> None:
    turn = prompt(8 * BLOCK)
    longer = [*turn, *prompt(3 * BLOCK + 5, seed=7)]
    decode(consumer, turn, prefill(producer, turn, "p1"), "d1")
    consumer.sim.settle()
    before = consumer.transport.nbytes
    decode(consumer, longer, prefill(producer, longer, "p2"), "d2")
    on_device = consumer.transport.nbytes - before
    assert on_device == before // 8 * 4
    consumer.sim.settle()
    consumer.sim.flush_device()
    last = [*longer, *prompt(2 * BLOCK, seed=8)]
    hits = consumer.count("hit_tokens|cpu")
    before = consumer.transport.nbytes
    decode(consumer, last, prefill(producer, last, "p3"), "d3")
    assert consumer.count("hit_tokens|cpu") - hits == 11 * BLOCK
    assert consumer.transport.nbytes - before == on_device // 4 * 3
    assert not consumer.failures
    producer.wait_free()


def test_what_was_pulled_is_stored_when_it_has_arrived(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(6 * BLOCK)
    consumer.transport.is_held = True
    params = prefill(producer, tokens)
    consumer.sim.add("d", tokens, 2, params=params)
    wait_held(consumer)
    assert len(consumer.sim.half.core.index) <= 1
    consumer.transport.release()
    consumer.sim.run()
    consumer.sim.settle()
    consumer.sim.flush_device()
    consumer.sim.add("again", tokens, 2)
    consumer.sim.run()
    assert consumer.count("hit_tokens|cpu") == 6 * BLOCK


def wait_held(engine: Engine, reads: int = 1) -> None:
    deadline = time.monotonic() + 20
    while len(engine.transport.held) < reads:
        assert time.monotonic() < deadline
        engine.sim.advance()


def test_a_full_local_hit_gives_the_lease_back(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(4 * BLOCK)
    decode(consumer, tokens, prefill(producer, tokens, "p1"), "d1")
    consumer.sim.settle()
    for i in range(2):
        decode(consumer, tokens, prefill(producer, tokens, f"p{i + 2}"), f"d{i + 2}")
        assert consumer.transport.reads == 1
        producer.wait_free()
        consumer.sim.flush_device()
    assert not consumer.failures


def test_two_who_go_on_from_one_prompt(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    for name in ("d0", "d1"):
        consumer.sim.add(name, tokens, 4, params=dict(params))
    consumer.sim.run()
    for name in ("d0", "d1"):
        assert consumer.sim.outputs[name] == consumer.sim.expected(name)
    producer.wait_free()
    consumer.sim.check_quiet()


def test_several_ranks(fleet: Fleet) -> None:
    producer, consumer = fleet.engine("kv_producer", ranks=2), fleet.engine("kv_consumer", ranks=2)
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == ODD
    producer.wait_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_flight(fleet: Fleet, depth: int) -> None:
    producer = fleet.engine("kv_producer", depth=depth)
    consumer = fleet.engine("kv_consumer", depth=depth)
    for i in range(6):
        tokens = prompt(ODD + 7 * i, seed=i)
        params = prefill(producer, tokens, f"p{i}")
        consumer.sim.add(f"d{i}", tokens, 6, params=params)
    consumer.sim.run()
    for i in range(6):
        assert consumer.sim.outputs[f"d{i}"] == consumer.sim.expected(f"d{i}")
    assert not consumer.failures
    producer.wait_free()
    consumer.sim.check_quiet()


def test_without_a_tier(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", extra={"cpu": None})
    consumer = fleet.engine("kv_consumer", extra={"cpu": None})
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == ODD
    producer.wait_free()


@pytest.mark.parametrize(
    ("remote", "word"),
    [
        ({"key_file": "/nowhere/fleet.key"}, "remote.key_file"),
        ({"listen": "192.0.2.1:7600"}, "remote.listen"),
    ],
)
def test_what_cannot_be_had_is_refused_at_start(
    fleet: Fleet, remote: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        fleet.engine("kv_both", remote=remote)


def test_without_nixl_an_engine_says_so(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "is_nixl_there", lambda: False)
    with pytest.raises(ConfigError, match="pip install"):
        fleet.engine("kv_both")


def test_models_whose_prompts_cannot_be_handed_over_yet(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="sliding windows"):
        fleet.engine("kv_both", windows=(0, 2 * BLOCK))


def test_both_roles_in_one_engine(fleet: Fleet) -> None:
    first, second = fleet.engine("kv_both"), fleet.engine("kv_both")
    decode(second, prompt(ODD), prefill(first, prompt(ODD)))
    decode(first, prompt(ODD, seed=3), prefill(second, prompt(ODD, seed=3)))
    assert first.count("hit_tokens|peer") == second.count("hit_tokens|peer") == ODD
    first.wait_free()
    second.wait_free()


# -- what is not handed over -------------------------------------------------------------


def test_who_does_not_ask_is_not_answered(producer: Engine) -> None:
    producer.sim.complete("plain", prompt(ODD), 1)
    producer.sim.complete("other", prompt(ODD), 1, params={"transfer_id": "x"})
    assert producer.sim.handed == {}
    producer.wait_free()


def test_an_aborted_prefill_is_not_handed_over(producer: Engine) -> None:
    producer.sim.add("p", prompt(40 * BLOCK), 1, params=TO_PRODUCER)
    producer.sim.step()
    producer.sim.abort("p")
    producer.sim.run()
    assert producer.sim.handed == {}
    producer.wait_free()


def test_a_prefill_that_ends_with_a_stop_is_handed_over(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", eos_every=1)
    params = prefill(producer, prompt(ODD), ignore_eos=False)
    consumer = fleet.engine("kv_consumer", eos_every=1)
    decode(consumer, prompt(ODD), params, ignore_eos=False)
    assert consumer.count("hit_tokens|peer") == ODD


def test_a_consumer_does_not_hand_over(consumer: Engine) -> None:
    consumer.sim.complete("p", prompt(ODD), 1, params=TO_PRODUCER)
    assert consumer.sim.handed == {}
    assert consumer.is_free()


def test_leases_are_bounded(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", remote={"max_leases": 2})
    for i in range(4):
        producer.sim.add(f"p{i}", prompt(BLOCK, seed=i), 1, params=TO_PRODUCER)
    producer.sim.run()
    assert len(producer.sim.handed) == 2
    producer.pass_time(LEASE)
    producer.wait_free()


# -- leases ------------------------------------------------------------------------------


def test_nobody_comes(producer: Engine, consumer: Engine) -> None:
    params = prefill(producer, prompt(ODD))
    producer.pass_time(LEASE)
    producer.wait_free()
    decode(consumer, prompt(ODD), params)
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.failures == {"remote_lease": 1}


def test_a_request_that_waits_keeps_its_lease(producer: Engine, fleet: Fleet) -> None:
    consumer = fleet.engine("kv_consumer", max_num_seqs=1)
    consumer.sim.add("busy", prompt(BLOCK, seed=5), 400)
    params = prefill(producer, prompt(ODD))
    consumer.sim.add("d", prompt(ODD), 3, params=params)
    for _ in range(8):
        for _ in range(10):
            consumer.sim.advance()
        producer.pass_time(LEASE / 3)
        consumer.pass_time(LEASE / 3)
        time.sleep(0.5)
    consumer.sim.run()
    assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.count("hit_tokens|peer") == ODD
    producer.wait_free()


def test_bytes_that_arrive_after_the_lease_are_not_accepted(
    producer: Engine, consumer: Engine
) -> None:
    consumer.transport.is_held = True
    consumer.sim.add("d", prompt(ODD), 3, params=prefill(producer, prompt(ODD)))
    wait_held(consumer)
    handoff = next(iter(consumer.remote.pulls._active.values())).handoff
    handoff.valid_until = 0.0
    consumer.transport.release()
    consumer.sim.run()
    assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.failures.keys() == {"remote_lease", "load_stale"}
    consumer.sim.check_quiet()


def test_a_consumer_that_says_nothing_costs_lease_and_grace(
    producer: Engine, consumer: Engine
) -> None:
    consumer.transport.is_held = True
    consumer.sim.add("d", prompt(ODD), 3, params=prefill(producer, prompt(ODD)))
    wait_held(consumer)
    consumer.remote.agent._client._send = lambda address, data: True
    producer.pass_time(LEASE + 1)
    time.sleep(0.5)
    assert not producer.is_free()
    producer.pass_time(GRACE)
    producer.wait_free()
    consumer.transport.release()


# -- what goes wrong ---------------------------------------------------------------------


def test_aborts_while_bytes_are_on_their_way_leak_nothing(
    producer: Engine, consumer: Engine
) -> None:
    for i in range(30):
        tokens = prompt(ODD, seed=i)
        consumer.transport.is_held = True
        consumer.sim.add(f"d{i}", tokens, 3, params=prefill(producer, tokens, f"p{i}"))
        wait_held(consumer)
        consumer.sim.abort(f"d{i}")
        consumer.sim.step()
        assert not consumer.is_free()  # bytes still come
        consumer.transport.release()
        consumer.sim.run()
    consumer.wait_free()
    producer.wait_free()
    consumer.sim.check_quiet()


def test_aborts_before_anything_is_asked_give_the_blocks_back(
    producer: Engine, consumer: Engine
) -> None:
    for i in range(30):
        tokens = prompt(ODD, seed=i)
        consumer.sim.add(f"d{i}", tokens, 3, params=prefill(producer, tokens, f"p{i}"))
        consumer.sim.abort(f"d{i}")
    consumer.sim.run()
    producer.wait_free()
    assert consumer.is_free()


def test_a_read_that_fails_is_recomputed(producer: Engine, consumer: Engine) -> None:
    consumer.transport.is_broken = True
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.count("handoffs|failed") == 1
    assert "remote_disconnected" in consumer.failures
    producer.wait_free()
    consumer.sim.check_quiet()


@pytest.mark.parametrize("is_aborted", [False, True], ids=["recomputed", "aborted"])
def test_what_is_given_up_keeps_its_blocks_until_it_writes_no_more(
    producer: Engine, consumer: Engine, is_aborted: bool
) -> None:
    tokens = prompt(ODD)
    consumer.transport.is_held = True
    consumer.sim.add("d", tokens, 3, params=prefill(producer, tokens))
    wait_held(consumer)
    if is_aborted:
        consumer.sim.abort("d")
    consumer.transport.give_up()
    consumer.transport.is_held = False
    consumer.sim.run()
    if not is_aborted:
        assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.sim.free_at_start - consumer.sim.free_blocks == 6
    assert not producer.is_free()
    # Others use all the rest meanwhile; nothing of theirs is written to.
    for i in range(6):
        consumer.sim.add(f"other{i}", prompt(12 * BLOCK, seed=50 + i), 6)
    for _ in range(5):
        consumer.sim.advance()
    consumer.transport.land()
    consumer.sim.run()
    for i in range(6):
        assert consumer.sim.outputs[f"other{i}"] == consumer.sim.expected(f"other{i}")
    consumer.sim.complete("last", prompt(BLOCK, seed=77), 1)
    consumer.wait_free()
    producer.wait_free()
    assert consumer.failures["remote_quarantine"] == 1


def test_too_much_in_quarantine_and_nothing_more_is_pulled(producer: Engine, fleet: Fleet) -> None:
    consumer = fleet.engine("kv_consumer", num_blocks=40)
    consumer.transport.is_held = True
    tokens = prompt(12 * BLOCK)
    consumer.sim.add("d", tokens, 2, params=prefill(producer, tokens))
    wait_held(consumer)
    consumer.transport.give_up()
    consumer.sim.run()
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD), "p2"), "d2")
    assert consumer.transport.reads == 1
    consumer.transport.land()


def test_a_producer_that_is_gone(fleet: Fleet, consumer: Engine) -> None:
    producer = fleet.engine("kv_producer")
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    producer.sim.close()
    decode(consumer, tokens, params)
    assert consumer.failures == {"remote_unanswered": 1}
    consumer.sim.check_quiet()


def test_a_reset_ends_hand_overs(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    producer.sim.half.reset()
    producer.wait_free()
    decode(consumer, tokens, params)
    assert consumer.count("hit_tokens|peer") == 0
    producer.sim.add("p2", tokens, 1, params=TO_PRODUCER)
    producer.sim.run()
    assert "p2" not in producer.sim.handed


def test_a_reset_while_bytes_are_on_their_way(producer: Engine, consumer: Engine) -> None:
    consumer.transport.is_held = True
    consumer.sim.add("d", prompt(ODD), 3, params=prefill(producer, prompt(ODD)))
    wait_held(consumer)
    consumer.sim.half.reset()
    consumer.transport.release()
    consumer.sim.run()
    assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.count("hit_tokens|peer") == 0
    producer.wait_free()
    consumer.sim.check_quiet()


def test_another_key(fleet: Fleet, producer: Engine, tmp_path: Path) -> None:
    keys.write(tmp_path / "keys" / "other.key", keys.generate())
    consumer = fleet.engine("kv_consumer", key="other.key")
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.failures == {"remote_ticket": 1}


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": "127.0.0.2"},
        {"remote_port": 1},
        {"tiered_kv": {"handoff": "AAAA"}},
        {"tiered_kv": {"handoff": 7}},
        {"tiered_kv": None},
        {"do_remote_decode": True},
    ],
)
def test_changed_parameters(producer: Engine, consumer: Engine, change: dict[str, Any]) -> None:
    decode(consumer, prompt(ODD), {**prefill(producer, prompt(ODD)), **change})
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.transport.reads == 0
    assert consumer.failures


@pytest.mark.parametrize(
    "other", ["tail", "head", "longer", "shorter", "salt"], ids=lambda other: f"another {other}"
)
def test_a_ticket_for_another_prompt(producer: Engine, consumer: Engine, other: str) -> None:
    tokens, salt = prompt(ODD), None
    params = prefill(producer, tokens)
    if other == "tail":
        tokens[-1] ^= 1
    elif other == "head":
        tokens[0] ^= 1
    elif other == "longer":
        tokens = [*tokens[:-1], tokens[-1] ^ 1, 5]
    elif other == "shorter":
        tokens = tokens[:-1]
    else:
        salt = "mine"
    decode(consumer, tokens, params, salt=salt)
    assert consumer.transport.reads == 0
    assert consumer.failures == {"remote_proof": 1}
    producer.wait_free()


def test_a_prompt_that_goes_on(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(ODD)
    decode(consumer, [*tokens, 5, 6, 7], prefill(producer, tokens))
    assert consumer.count("hit_tokens|peer") == ODD


def test_a_ticket_that_is_used_twice(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    decode(consumer, tokens, params, "d1")
    producer.wait_free()
    consumer.sim.flush_device()
    decode(consumer, tokens, params, "d2")
    assert consumer.failures == {"remote_lease": 1}


def test_the_client_may_want_neither_tier_nor_peer(producer: Engine, consumer: Engine) -> None:
    params = prefill(producer, prompt(ODD))
    params["tiered_kv"]["load"] = False
    decode(consumer, prompt(ODD), params)
    assert consumer.transport.reads == 0
    producer.wait_free()


def test_prompt_logprobs_need_every_token_computed(producer: Engine, consumer: Engine) -> None:
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)), prompt_logprobs=1)
    assert consumer.transport.reads == 0
    producer.wait_free()


def test_a_device_too_small_for_all_at_once(producer: Engine, fleet: Fleet) -> None:
    consumer = fleet.engine("kv_consumer", num_blocks=24)
    for i in range(8):
        tokens = prompt(7 * BLOCK + i, seed=i)
        consumer.sim.add(f"d{i}", tokens, 20, params=prefill(producer, tokens, f"p{i}"))
        producer.sim.flush_device() if producer.is_free() else None
    consumer.sim.run()
    for i in range(8):
        assert consumer.sim.outputs[f"d{i}"] == consumer.sim.expected(f"d{i}")
    producer.wait_free()
    consumer.sim.check_quiet()
