# SPDX-License-Identifier: Apache-2.0
"""Two engines that hand over to each other while whatever may happen does; each byte is checked."""

from __future__ import annotations

import random

import pytest

from tests.scheduler.handover import LEASE, TO_PRODUCER, Engine, Fleet, pass_time, wait
from tests.scheduler.sim import BLOCK, prompt
from vllm_tiered_kv.remote.agent import GRACE

STEPS = 150


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(fleet: Fleet, seed: int) -> None:
    chance = random.Random(seed)
    engines = [_engine(fleet, chance) for _ in range(2)]
    families = [prompt(6 * BLOCK, seed=100 + i) for i in range(3)]
    prefilled: dict[str, list[int]] = {}
    for number in range(STEPS):
        engine = chance.choice(engines)
        sim, transport = engine.sim, engine.transport
        tickets = [name for each in engines for name in each.sim.handed if name in prefilled]
        match chance.randrange(16):
            case 0 | 1 | 2:
                head = chance.choice(families)[: chance.randrange(1, 6 * BLOCK)]
                tokens = [*head, *prompt(chance.randrange(1, 30), seed=chance.randrange(3))]
                prefilled[f"p{number}"] = tokens
                sim.add(f"p{number}", tokens, chance.choice([1, 1, 3]), params=TO_PRODUCER)
            case 3 | 4 | 5 | 6 if tickets:
                name = chance.choice(tickets)
                params = next(e.sim.handed[name] for e in engines if name in e.sim.handed)
                tokens = list(prefilled[name])
                if chance.random() < 0.2:
                    tokens[chance.randrange(len(tokens))] ^= 1
                elif chance.random() < 0.3:
                    tokens += prompt(chance.randrange(1, 30), seed=number)
                sim.add(f"d{number}", tokens, chance.randrange(1, 6), params=params)
            case 7 if live := list(sim.scheduler.requests):
                sim.abort(chance.choice(live))
            case 8:
                transport.is_held = not transport.is_held
                if not transport.is_held:
                    transport.release()
            case 9:
                transport.is_broken = chance.random() < 0.3
            case 10 if chance.random() < 0.5:
                transport.give_up()
            case 11:
                transport.land()
            case 12 if not sim.scheduler.running:
                sim.scheduler.reset_prefix_cache()
            case 13 if chance.random() < 0.1:
                sim.half.reset()
            case 14 if chance.random() < 0.3:
                pass_time(engines, chance.choice([1.0, LEASE / 2, LEASE + GRACE]))
            case _:
                for _ in range(chance.randrange(1, 6)):
                    sim.advance()
        for each in engines:
            each.sim.check_pool()
    _come_to_rest(engines)


def _engine(fleet: Fleet, chance: random.Random) -> Engine:
    remote = {
        "handoff": chance.choice(["device", "cpu", "auto"]),
        "verify": chance.random() < 0.3,
    }
    engine = fleet.engine(
        "kv_both",
        remote=remote,
        capacity_chunks=chance.choice([16, 30, 60]),
        num_blocks=chance.choice([40, 60]),
        depth=chance.choice([1, 2]),
        extra={"trust_after_reset": chance.random() < 0.5},
    )
    engine.sim.half.core.clock = engine.clock
    return engine


def _come_to_rest(engines: list[Engine]) -> None:
    for engine in engines:
        engine.transport.is_broken = False
        engine.transport.release()
        engine.transport.land()
    for engine in engines:
        wait(lambda engine=engine: _ends(engine, engines), "requests do not end")  # type: ignore[misc]
        for name, said in engine.sim.outputs.items():
            if name not in engine.sim.finished:
                assert said == engine.sim.expected(name)
    for engine in engines:
        engine.transport.land()
    pass_time(engines, 2 * (LEASE + GRACE))
    for engine in engines:
        wait(lambda engine=engine: _rests(engine), "something is not given back")  # type: ignore[misc]
        engine.sim.check_quiet()


def _ends(engine: Engine, engines: list[Engine]) -> bool:
    """Steps on; by time, for the agents' threads answer when they come to it.

    Time passes: leases that nobody took may hold all of the memory that a request waits for.
    """
    for _ in range(20):
        if not engine.sim.busy:
            return True
        engine.sim.advance()
    pass_time(engines, 0.5)
    return False


def _rests(engine: Engine) -> bool:
    engine.sim.step()  # also where nothing is to be done: ranks tell what they know with one
    while engine.sim._in_flight:
        engine.sim.process()
    remote = engine.remote
    is_free = engine.is_free()  # takes in what the agent has to say
    return is_free and not (len(remote.handing) or remote.handing.slots or remote.pulls.quarantined)
