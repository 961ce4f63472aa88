# SPDX-License-Identifier: Apache-2.0
"""What other engines may do in the model of the contract: answer, be late, lie, end, borrow."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.scheduler.machine_drawn import AT, PROMPT
from tests.scheduler.machine_engine import TALLY, Machine
from tests.scheduler.manual_peers import Peers
from tests.scheduler.sim import BLOCK
from tests.scheduler.stand_ins import LIES, LIES_ABOUT_BYTES
from vllm_tiered_kv.remote.messages import VERSION
from vllm_tiered_kv.scheduler.plan import chunk_keys

TIMES = st.integers(1, 6)


class PeerRules(Machine):
    """Other engines that lend to this one, and one that borrows from it."""

    @property
    def peers(self) -> Peers:
        assert self.sim.peers is not None
        return self.sim.peers

    @precondition(lambda self: self.sim.peers is not None)
    @rule(what=st.sampled_from(["think", "carry", "hear", "again", "lose"]), at=AT, times=TIMES)
    def messages(self, what: str, at: int, times: int) -> None:
        """Questions and answers arrive in any order, twice, or not at all."""
        for _ in range(times):
            if what == "again":
                self.peers.hear(at, again=True)
            elif what == "think":
                self.peers.think()
            else:
                getattr(self.peers, what)(at)

    @precondition(lambda self: self.sim.peers is not None)
    @rule(at=AT, lie=st.sampled_from(sorted({**LIES, **LIES_ABOUT_BYTES})))
    def lie(self, at: int, lie: str) -> None:
        """A peer says what is not so."""
        self.peers.hear(at, lie)
        self.peers.think()

    @precondition(lambda self: self.sim.peers is not None)
    @rule(at=AT, data=st.binary(max_size=40))
    def babble(self, at: int, data: bytes) -> None:
        """A peer says what nobody can read."""
        self.peers.say(at, bytes((VERSION,)) + data)

    @precondition(lambda self: self.sim.peers is not None and self.sim.requests)
    @rule(at=AT, peer=AT, chunks=st.integers(1, 9))
    def learn(self, at: int, peer: int, chunks: int) -> None:
        """A peer computes a prompt that somebody has asked here as well."""
        stand_ins = list(self.peers.stand_ins.values())
        stand_in = stand_ins[peer % len(stand_ins)]
        self.sim.audit.check()  # knows the prompt from now on
        for key in self._keys(at)[:chunks]:
            stand_in.learn(key, self.sim.image)

    @precondition(lambda self: self.sim.peers is not None)
    @rule(
        drawn=PROMPT,
        seed=st.integers(200, 1200),
        peer=AT,
        chunks=st.integers(1, 9),
        steps=st.integers(0, 4),
        damaged=st.sampled_from([False, False, True]),
    )
    def arrive_second(
        self, drawn: dict[str, Any], seed: int, peer: int, chunks: int, steps: int, damaged: bool
    ) -> None:
        """A prompt that a peer has had before: it is asked for, found, and perhaps being read."""
        before = len(self.sim.requests)
        self._arrive({**drawn, "family": seed, "shared": 9 * BLOCK, "params": None})
        if len(self.sim.requests) == before:
            return
        self.learn(before, peer, chunks)
        if damaged:
            self.change("damage", 0, peer)
        for _ in range(steps):
            if self.sim.scheduler.has_requests():
                self._step_without_pause()
                self.peers.talk()
                self._check()

    @precondition(lambda self: self.sim.peers is not None)
    @rule(what=st.sampled_from(["forget", "forget", "damage", "restart"]), peer=AT, at=AT)
    def change(self, what: str, peer: int, at: int) -> None:
        """A peer's memory is not what it was."""
        if what == "restart":
            self.peers.restart(peer)
            return
        for stand_in in list(self.peers.stand_ins.values())[peer % 2 :]:
            known = stand_in.known
            if not known:
                continue
            if what == "forget":
                stand_in.forget(known[at % len(known)])
            elif stand_in.verify:
                stand_in.damage(known[at % len(known)], at)

    @precondition(lambda self: self.sim.peers is not None)
    @rule(
        what=st.sampled_from(["end", "end", "fail", "give up", "land", "compare", "too late"]),
        rank=AT,
        at=AT,
        times=TIMES,
    )
    def reads(self, what: str, rank: int, at: int, times: int) -> None:
        """Reads of their memory end well or badly, or go on when they were given up."""
        transports, checkers = self.peers.transports, self.peers.checkers
        if not transports:
            return
        transport, checker = transports[rank % len(transports)], checkers[rank % len(checkers)]
        for _ in range(times):
            match what:
                case "too late" if transport.held:
                    self.peers.let_leases_end()
                    transport.end(at)
                case "end" | "fail":
                    transport.end(at, well=what == "end")
                case "give up":
                    transport.give_up()
                case "land":
                    transport.land()
                case "compare":
                    checker.do()

    @precondition(lambda self: self.sim.peers is not None and self.sim.requests)
    @rule(at=AT, chunks=st.integers(1, 9))
    def borrow(self, at: int, chunks: int) -> None:
        """Somebody asks for chunks of ours, and reads them until its lease is over."""
        if keys := self._keys(at)[:chunks]:
            self.peers.borrow(keys)
            self.peers.think()
            TALLY["leases on chunks"] += bool(self.peers.borrower.held)

    @precondition(lambda self: self.sim.peers is not None)
    @rule(at=AT)
    def give_back(self, at: int) -> None:
        """It gives them back."""
        self.peers.give_back(at)

    def _keys(self, at: int) -> list[bytes]:
        """Of the chunks of a prompt that somebody has asked."""
        known = list(self.sim.requests.values())
        request = known[at % len(known)]
        return chunk_keys(request.block_hashes, request.num_tokens, self.sim.half.core.geometry)
