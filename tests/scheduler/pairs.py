# SPDX-License-Identifier: Apache-2.0
"""Two simulated engines, one of which reads chunks out of the CPU tier of the other."""

from __future__ import annotations

from typing import Any

from tests.scheduler.handover import Engine, Fleet, wait
from tests.scheduler.sim import BLOCK
from vllm_tiered_kv import metrics

HIT = f"hit_tokens|{metrics.PEER_CPU}"
LONG = 8 * BLOCK


class Pair:
    """Two engines: B asks A."""

    def __init__(self, fleet: Fleet, a: dict[str, Any], b: dict[str, Any]) -> None:
        lends = {"peers": [], **a.pop("remote", {})}
        self.a = fleet.engine(a.pop("role", "kv_both"), remote=lends, **a)
        wait(lambda: self.a.remote.agent._server.is_ready, "A lends nothing")
        port = self.a.remote.agent.address.port
        remote = {"peers": [f"127.0.0.1:{port}"], **b.pop("remote", {})}
        self.b = fleet.engine(b.pop("role", "kv_both"), remote=remote, **b)
        for engine in (self.a, self.b):
            agent = engine.remote.agent
            agent._finder._clock = engine.clock
            if agent._lender is not None:
                agent._lender._clock = engine.clock

    def meet(self) -> Pair:
        peers = self.b.remote.agent._finder._peers
        wait(lambda: any(peer.memory for peer in list(peers.values())), "B has not met A")
        return self

    def teach(self, tokens: list[int], name: str) -> None:
        """A computes a prompt, and stores it."""
        complete(self.a, tokens, name)
        self.a.sim.settle()

    def settle(self) -> None:
        """Everything is given back, and both know it."""
        for engine in (self.b, self.a):
            engine.sim.settle()
            wait(lambda engine=engine: rests(engine), "something is not given back")  # type: ignore[misc]
            engine.sim.check_quiet()

    @property
    def lent(self) -> int:
        return self.a.remote.shelving.lent_slots


def rests(engine: Engine) -> bool:
    engine.sim.step()
    while engine.sim._in_flight:
        engine.sim.process()
    remote = engine.remote
    if remote.shelving is not None and remote.shelving.lent_slots:
        return False
    if engine.sim.half.core.index.pinned:
        return False  # what has been given back is taken in by one of the next steps
    peers = remote.peers
    return peers is None or not (peers.reads or peers._claims or peers._quarantined)


def complete(engine: Engine, tokens: list[int], name: str, count: int = 3) -> None:
    engine.sim.add(name, tokens, count)
    engine.sim.run()
    assert engine.sim.outputs[name] == engine.sim.expected(name)
