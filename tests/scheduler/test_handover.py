# SPDX-License-Identifier: Apache-2.0
"""One engine hands a prompt's KV over to another one: every number of it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.scheduler.handover import (
    LEASE,
    ODD,
    TO_PRODUCER,
    Engine,
    Fleet,
    begin_held,
    decode,
    prefill,
    wait,
    wait_held,
)
from tests.scheduler.neighbour import Desk, beside
from tests.scheduler.sim import BLOCK, prompt
from tests.scheduler.tokens import LAYERS
from tools.serving.process import free_ports
from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.remote import assembly
from vllm_tiered_kv.remote.agent import GRACE
from vllm_tiered_kv.remote.handoff import State
from vllm_tiered_kv.remote.params import refusal


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, ODD, 20 * BLOCK])
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


def test_a_prompt_of_one_token_is_computed(producer: Engine, consumer: Engine) -> None:
    decode(consumer, prompt(1), prefill(producer, prompt(1)))
    assert consumer.transport.reads == 0
    assert not consumer.failures
    producer.wait_free()


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


@pytest.mark.parametrize("length", [4 * BLOCK, 4 * BLOCK + 1])
def test_a_full_local_hit_gives_the_lease_back(
    producer: Engine, consumer: Engine, length: int
) -> None:
    tokens = prompt(length)
    decode(consumer, tokens, prefill(producer, tokens, "p1"), "d1")
    consumer.sim.settle()
    for i in range(2):
        decode(consumer, tokens, prefill(producer, tokens, f"p{i + 2}"), f"d{i + 2}")
        assert consumer.transport.reads == 1
        producer.wait_free()
        consumer.sim.flush_device()
    assert not consumer.failures


@pytest.mark.parametrize("length", [ODD, 5 * BLOCK])
def test_two_who_go_on_from_one_prompt_read_it_once(
    producer: Engine, consumer: Engine, length: int
) -> None:
    tokens = prompt(length)
    params = prefill(producer, tokens)
    both_asked(consumer, tokens, params)
    assert consumer.transport.reads == 1
    consumer.transport.release()
    consumer.sim.run()
    whole = -(-length // BLOCK)
    # The other one reads the last block: vLLM finds none that has a prompt's last token.
    assert consumer.transport.nbytes == (whole + 1) * LAYERS * BLOCK * 8
    assert consumer.count("hit_tokens|peer") == length + (length - 1) % BLOCK + 1
    for name in ("d0", "d1"):
        assert consumer.sim.outputs[name] == consumer.sim.expected(name)
    assert not consumer.failures
    producer.wait_free()
    consumer.sim.check_quiet()


def test_when_the_first_of_two_reads_fails_the_other_one_reads(
    producer: Engine, consumer: Engine
) -> None:
    tokens = prompt(ODD)
    both_asked(consumer, tokens, prefill(producer, tokens))
    consumer.transport.give_up()
    consumer.transport.is_held = False
    consumer.sim.run()
    consumer.transport.land()
    for name in ("d0", "d1"):
        assert consumer.sim.outputs[name] == consumer.sim.expected(name)
    assert consumer.count("handoffs|failed") == 1
    consumer.sim.complete("last", prompt(BLOCK, seed=77), 1)
    consumer.wait_free()
    producer.wait_free()


def both_asked(consumer: Engine, tokens: list[int], params: dict[str, Any]) -> None:
    """Two requests have the lease, and one of them reads."""
    consumer.transport.is_held = True
    for name in ("d0", "d1"):
        consumer.sim.add(name, tokens, 4, params=dict(params))
    wait_held(consumer)
    waiting = consumer.sim.half._requests["d1"]
    wait(lambda: waiting.handoff.state is State.GRANTED, "no lease")
    for _ in range(5):
        consumer.sim.advance()


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
        ({"listen": ":7600"}, "VLLM_HOST_IP"),
    ],
)
def test_what_cannot_be_had_is_refused_at_start(
    fleet: Fleet, remote: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    with pytest.raises(ConfigError, match=word):
        fleet.engine("kv_both", remote=remote)


def test_engines_listen_where_vllm_says(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    producer = fleet.engine("kv_producer", remote={"listen": ":0"})
    consumer = fleet.engine("kv_consumer", remote={"listen": ":0"})
    params = prefill(producer, prompt(ODD))
    assert params["remote_host"] == "127.0.0.1"
    decode(consumer, prompt(ODD), params)
    assert consumer.count("hit_tokens|peer") == ODD
    producer.wait_free()


def test_without_nixl_an_engine_says_so(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "is_nixl_there", lambda: False)
    with pytest.raises(ConfigError, match="pip install"):
        fleet.engine("kv_both")


def test_both_roles_in_one_engine(fleet: Fleet) -> None:
    first, second = fleet.engine("kv_both"), fleet.engine("kv_both")
    decode(second, prompt(ODD), prefill(first, prompt(ODD)))
    decode(first, prompt(ODD, seed=3), prefill(second, prompt(ODD, seed=3)))
    assert first.count("hit_tokens|peer") == second.count("hit_tokens|peer") == ODD
    first.wait_free()
    second.wait_free()


def test_within_multi_connector(fleet: Fleet) -> None:
    desks = Desk(), Desk()
    producer = fleet.engine("kv_producer", beside=beside("first", desks[0]))
    consumer = fleet.engine("kv_consumer", beside=beside("second", desks[1]))
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == ODD
    producer.wait_free()
    consumer.sim.check_quiet()
    producer.sim.check_quiet()


def test_engines_of_one_deployment_listen_side_by_side(
    fleet: Fleet, consumer: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = f"127.0.0.1:{free_ports(2)}"
    configure = EngineArgs.create_engine_config

    indices = itertools.count()

    def numbered(args: EngineArgs, *others: Any, **options: Any) -> Any:
        config = configure(args, *others, **options)
        config.parallel_config.data_parallel_index = next(indices)  # as vLLM's engine core does
        return config

    monkeypatch.setattr(EngineArgs, "create_engine_config", numbered)
    ports = []
    for i in range(2):
        producer = fleet.engine("kv_producer", remote={"listen": listen})
        params = prefill(producer, prompt(ODD, seed=i))
        ports.append(params["remote_port"])
        decode(consumer, prompt(ODD, seed=i), params, f"d{i}")
    assert consumer.count("hit_tokens|peer") == 2 * ODD
    assert ports == [int(listen.rpartition(":")[2]) + i for i in range(2)]


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


def test_a_prefill_that_is_preempted_between_its_steps_is_handed_over(
    fleet: Fleet, consumer: Engine
) -> None:
    producer = fleet.engine(
        "kv_producer",
        num_blocks=24,
        max_num_batched_tokens=4 * BLOCK,
        scheduler_reserve_full_isl=False,  # vLLM lets it begin without room for all of it
    )
    for i in range(2):  # they are about to take a block more each
        producer.sim.add(f"other{i}", prompt(4 * BLOCK - 1, seed=i), 24)
    for _ in range(2):
        producer.sim.advance()
    tokens = prompt(15 * BLOCK - 2, seed=9)  # and this one all the rest
    producer.sim.add("p", tokens, 1, params=TO_PRODUCER)
    producer.sim.run()
    assert producer.sim.requests["p"].num_preemptions
    decode(consumer, tokens, producer.sim.handed["p"])
    assert consumer.count("hit_tokens|peer") == len(tokens)
    producer.wait_free()


def test_a_prefill_that_ends_with_a_stop_is_handed_over(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", eos_every=1)
    params = prefill(producer, prompt(ODD), ignore_eos=False)
    consumer = fleet.engine("kv_consumer", eos_every=1)
    decode(consumer, prompt(ODD), params, ignore_eos=False)
    assert consumer.count("hit_tokens|peer") == ODD


def test_a_consumer_does_not_hand_over(consumer: Engine) -> None:
    params = prefill(consumer, prompt(ODD))
    assert params == refusal()
    assert consumer.is_free()
    decode(consumer, prompt(ODD), params)
    assert consumer.failures == {"remote_role": 1}


def test_a_producer_takes_nothing(fleet: Fleet, producer: Engine) -> None:
    other = fleet.engine("kv_producer")
    decode(producer, prompt(ODD), prefill(other, prompt(ODD)))
    assert producer.count("hit_tokens|peer") == 0
    assert producer.failures == {"remote_role": 1}


def test_leases_are_bounded(fleet: Fleet) -> None:
    producer = fleet.engine("kv_producer", remote={"max_leases": 2})
    for i in range(4):
        producer.sim.add(f"p{i}", prompt(BLOCK, seed=i), 1, params=TO_PRODUCER)
    producer.sim.run()
    assert sum(params == refusal() for params in producer.sim.handed.values()) == 2
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
    begin_held(producer, consumer, prompt(ODD))
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
    begin_held(producer, consumer, prompt(ODD))
    consumer.remote.agent._client._send = lambda address, data: True
    producer.pass_time(LEASE + 1)
    time.sleep(0.5)
    assert not producer.is_free()
    producer.pass_time(GRACE)
    producer.wait_free()
    consumer.transport.release()
