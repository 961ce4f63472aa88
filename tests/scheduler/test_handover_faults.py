# SPDX-License-Identifier: Apache-2.0
"""Hand-overs that go wrong: the prompt is computed, and every block comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.handover import (
    LEASE,
    ODD,
    TO_PRODUCER,
    Engine,
    Fleet,
    abort_while_bytes_come,
    begin_held,
    decode,
    give_up_while_bytes_come,
    pass_time,
    prefill,
    wait,
    wait_held,
)
from tests.scheduler.sim import BLOCK, Sim, prompt
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.handoff import State
from vllm_tiered_kv.remote.params import refusal


def test_aborts_while_bytes_are_on_their_way_leak_nothing(
    producer: Engine, consumer: Engine
) -> None:
    prompts = [prompt(ODD, seed=i) for i in range(30)]
    abort_while_bytes_come(producer, consumer, prompts)
    consumer.wait_free()
    producer.wait_free()
    consumer.sim.check_quiet()


def test_an_idle_consumer_does_not_hold_what_it_has_given_up(
    producer: Engine, consumer: Engine
) -> None:
    """That the read has ended it would hear with a step, and it makes none."""
    begin_held(producer, consumer, prompt(ODD))
    consumer.sim.abort("d")
    consumer.transport.give_up()
    consumer.sim.run()
    assert consumer.remote.pulls.quarantined == 1
    for _ in range(16):
        assert consumer.remote.pulls.quarantined == 1
        pass_time([producer, consumer], LEASE / 4)
    producer.wait_free()
    consumer.transport.land()
    consumer.sim.complete("last", prompt(BLOCK, seed=77), 1)
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


def test_a_rank_stands_still_when_it_is_about_to_look(producer: Engine, consumer: Engine) -> None:
    consumer.sim.half.core.clock = consumer.clock
    begin_held(producer, consumer, prompt(ODD))
    poll = consumer.transport.poll

    def late() -> Any:
        if consumer.transport.held:
            consumer.clock.ahead += 2 * LEASE
            consumer.transport.release()
        return poll()

    consumer.transport.poll = late
    consumer.sim.run()
    assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.count("hit_tokens|peer") == 0
    assert "remote_lease" in consumer.failures
    consumer.sim.check_quiet()


@pytest.mark.parametrize("time", [0.0, 1e12], ids=["behind", "ahead"])
def test_a_rank_whose_clock_is_another_hosts(
    producer: Engine, consumer: Engine, time: float
) -> None:
    consumer.sim.worker._worker.remote._pulls._clock = lambda: time
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD), "p1"), "d1")
    assert consumer.count("hit_tokens|peer") == ODD
    consumer.transport.is_held = True
    other = prompt(ODD, seed=5)
    consumer.sim.add("d2", other, 3, params=prefill(producer, other, "p2"))
    wait_held(consumer)
    consumer.remote.agent._client._send = lambda address, data: True  # no renewals
    next(iter(consumer.remote.pulls._active.values())).handoff.valid_until = 0.0
    consumer.transport.release()
    consumer.sim.run()
    assert consumer.sim.outputs["d2"] == consumer.sim.expected("d2")
    assert consumer.count("hit_tokens|peer") == ODD
    assert "remote_lease" in consumer.failures


def test_a_read_that_fails_is_recomputed(producer: Engine, consumer: Engine) -> None:
    consumer.transport.is_broken = True
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("hit_tokens|peer") == 0
    assert consumer.count("handoffs|failed") == 1
    assert "remote_disconnected" in consumer.failures
    producer.wait_free()
    consumer.sim.check_quiet()


def test_what_the_transport_counts_is_counted_once(producer: Engine, consumer: Engine) -> None:
    counts = [{"remote_rebuilt": 1, "remote_disconnected": 1}]
    consumer.transport.take_counts = lambda: (
        counts.pop() if counts and consumer.transport.reads else {}
    )
    consumer.transport.is_broken = True
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.count("failures|remote_rebuilt") == 1
    assert consumer.count("failures|remote_disconnected") == 1


@pytest.mark.parametrize("is_aborted", [False, True], ids=["recomputed", "aborted"])
def test_what_is_given_up_keeps_its_blocks_until_it_writes_no_more(
    producer: Engine, consumer: Engine, is_aborted: bool
) -> None:
    give_up_while_bytes_come(producer, consumer, prompt(ODD), 6, is_aborted=is_aborted)
    consumer.wait_free()
    producer.wait_free()


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


def test_a_producer_that_is_forgotten_and_wanted_in_one_step(
    producer: Engine, consumer: Engine
) -> None:
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD), "p1"), "d1")
    other = prompt(ODD, seed=4)
    consumer.sim.add("d2", other, 3, params=prefill(producer, other, "p2"))
    handoff = consumer.sim.half._requests["d2"].handoff
    wait(lambda: handoff.state is State.GRANTED, "no lease")
    consumer.remote.agent._gone.append(producer.remote.agent.engine)
    consumer.sim.run()
    assert consumer.sim.outputs["d2"] == consumer.sim.expected("d2")
    assert consumer.count("hit_tokens|peer") == 2 * ODD
    assert not consumer.failures


def test_a_reset_ends_hand_overs(producer: Engine, consumer: Engine) -> None:
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    producer.sim.half.reset()
    producer.wait_free()
    decode(consumer, tokens, params)
    assert consumer.count("hit_tokens|peer") == 0
    producer.sim.add("p2", tokens, 1, params=TO_PRODUCER)
    producer.sim.run()
    assert producer.sim.handed["p2"] == refusal()
    assert producer.failures == {"remote_not_ready": 1}


def test_a_reset_while_bytes_are_on_their_way(producer: Engine, consumer: Engine) -> None:
    begin_held(producer, consumer, prompt(ODD))
    consumer.sim.half.reset()
    consumer.transport.release()
    consumer.sim.run()
    assert consumer.sim.outputs["d"] == consumer.sim.expected("d")
    assert consumer.count("hit_tokens|peer") == 0
    producer.wait_free()
    consumer.sim.check_quiet()


def test_another_key(
    fleet: Fleet, producer: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.write(tmp_path / "keys" / "other.key", keys.generate())
    consumer = fleet.engine("kv_consumer", key="other.key")
    decode(consumer, prompt(ODD), prefill(producer, prompt(ODD)))
    assert consumer.failures == {"remote_ticket": 1}
    assert "not sealed with this engine's key" in caplog.text


@pytest.mark.parametrize("role", ["kv_consumer", "kv_both"])
def test_what_is_handed_to_an_engine_without_the_option(
    sim: Callable[..., Sim], producer: Engine, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = sim(role=role)
    warned = [r.getMessage() for r in caplog.records if "no option remote" in r.getMessage()]
    assert bool(warned) == (role == "kv_consumer")
    engine.add("d", prompt(ODD), 3, params=prefill(producer, prompt(ODD)))
    engine.run()
    assert engine.outputs["d"] == engine.expected("d")
    assert engine.counters["failures|remote_role"] == 1


@pytest.mark.parametrize(
    "change",
    [
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


def test_addresses_that_a_router_has_changed(producer: Engine, consumer: Engine) -> None:
    params = prefill(producer, prompt(ODD))
    changed = {"remote_host": "prefill.example", "remote_port": 1.0, "remote_engine_id": None}
    decode(consumer, prompt(ODD), {**params, **changed})
    assert consumer.count("hit_tokens|peer") == ODD
    producer.wait_free()


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


def test_a_ticket_that_is_used_twice(
    producer: Engine, consumer: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(ODD)
    params = prefill(producer, tokens)
    decode(consumer, tokens, params, "d1")
    producer.wait_free()
    consumer.sim.flush_device()
    decode(consumer, tokens, params, "d2")
    assert consumer.failures == {"remote_lease": 1}
    assert "has been fetched before" in caplog.text


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
