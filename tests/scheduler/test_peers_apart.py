# SPDX-License-Identifier: Apache-2.0
"""Engines that ask each other for chunks over NIXL, and what becomes of it when one is gone."""

from __future__ import annotations

import pytest

from tests.scheduler import handover
from tests.scheduler.handover import Engine, Fleet, wait
from tests.scheduler.lender import Lender
from tests.scheduler.pairs import HIT, complete, rests
from tests.scheduler.sim import BLOCK, prompt
from vllm_tiered_kv.remote.transport import open_transport
from vllm_tiered_kv.remote.unwilling import MAX_QUIET_SECONDS

pytest.importorskip("nixl")

LONG = 40 * BLOCK
SEEDS = range(8)


@pytest.fixture
def over_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "NearTransport", open_transport)


def asker(fleet: Fleet, port: int) -> Engine:
    """An engine that asks one at this port, and has met it."""
    remote = {"peers": [f"127.0.0.1:{port}"], "deadline": 2.0}
    engine = fleet.engine("kv_both", remote=remote)
    wait(lambda: is_met(engine), "they have not met")
    return engine


def is_met(engine: Engine) -> bool:
    peers = engine.remote.agent._finder._peers
    return any(peer.memory and not peer.is_doubted for peer in list(peers.values()))


def start(fleet: Fleet, port: int = 0) -> Lender:
    return Lender(fleet._folder / "fleet.key", LONG, SEEDS, port)


def come_to_rest(engine: Engine) -> None:
    engine.sim.settle()
    wait(lambda: rests(engine), "something is not given back")
    engine.sim.check_quiet()


def test_chunks_of_another_process(fleet: Fleet, over_nixl: None) -> None:
    with start(fleet) as lender:
        engine = asker(fleet, lender.port)
        for seed in SEEDS:
            complete(engine, [*prompt(LONG, seed=seed), 3, 4], f"r{seed}")
        assert engine.count(HIT) == len(SEEDS) * LONG
        assert not engine.failures
        come_to_rest(engine)


def test_a_peer_that_is_killed_and_started_again(fleet: Fleet, over_nixl: None) -> None:
    with start(fleet) as lender:
        engine = asker(fleet, lender.port)
        complete(engine, prompt(LONG, seed=0), "r0")
        assert engine.count(HIT) == LONG
        lender.kill()
        for seed in (1, 2):
            complete(engine, prompt(LONG, seed=seed), f"r{seed}")
        assert engine.count(HIT) == LONG
        come_to_rest(engine)
        with start(fleet, lender.port):
            engine.remote.agent._finder._clock = engine.clock
            engine.pass_time(MAX_QUIET_SECONDS)
            wait(lambda: is_met(engine), "it is not met again")
            complete(engine, prompt(LONG, seed=3), "r3")
            assert engine.count(HIT) == 2 * LONG
            come_to_rest(engine)


def test_a_peer_that_stands_still_and_goes_on(fleet: Fleet, over_nixl: None) -> None:
    with start(fleet) as lender:
        engine = asker(fleet, lender.port)
        complete(engine, prompt(LONG, seed=0), "r0")
        lender.stop()
        try:
            for seed in (1, 2):
                complete(engine, prompt(LONG, seed=seed), f"r{seed}")
            assert engine.count(HIT) == LONG
        finally:
            lender.resume()
        wait(lambda: is_met(engine), "it is not met again")
        complete(engine, prompt(LONG, seed=3), "r3")
        assert engine.count(HIT) == 2 * LONG
        come_to_rest(engine)


def test_a_peer_that_stands_still_while_it_is_read(
    fleet: Fleet, over_nixl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # where a read needs the peer's help
    with start(fleet) as lender:
        engine = asker(fleet, lender.port)
        complete(engine, prompt(LONG, seed=0), "r0")
        engine.sim.add("r1", prompt(LONG, seed=1), 3)
        wait(lambda: found(engine), "nothing is found")
        lender.stop()
        try:
            engine.sim.run()
            assert engine.sim.outputs["r1"] == engine.sim.expected("r1")
            assert engine.count(HIT) == LONG
            engine.sim.check_pool()
            complete(engine, prompt(LONG, seed=2), "r2")
        finally:
            lender.resume()
        come_to_rest(engine)


def found(engine: Engine) -> bool:
    """Whether the peer has lent something, of which nothing is read yet."""
    if not engine.remote.peers._claims:
        engine.sim.schedule()
    claims = list(engine.remote.peers._claims)
    return any(claim.inquiry.loan is not None for claim in claims)
