# SPDX-License-Identifier: Apache-2.0
"""What may happen to the disk tier in the model of the contract."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.scheduler.machine_drawn import AT, OWN
from tests.scheduler.machine_engine import FILE_BYTES, TALLY, Machine
from tests.scheduler.manual import Pace
from tests.scheduler.sim import BLOCK, prompt
from vllm_tiered_kv.tiers.disk.orders import Outcome

DAMAGES = {
    "flip": lambda good: good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
    "cut": lambda good: good[:-1],
    "empty": lambda _: b"",
    "zero": lambda good: bytes(len(good)),
    "gone": None,
}


class DiskRules(Machine):
    """Files that are read and written in any order, fail, and are damaged by others."""

    @precondition(lambda self: self.root is not None)
    @rule(
        what=st.sampled_from(
            ["do", "do", "do", "hear", "hear", "think", "think", "keep", "fail", "drop", "round"]
        ),
        rank=AT,
        at=AT,
        times=st.integers(1, 6),
    )
    def disk_work(self, what: str, rank: int, at: int, times: int) -> None:
        """Files are read and written, or not, and what is said of it arrives in any order."""
        agent = self.sim.agent
        executors = list(agent.executors.values())
        for _ in range(times):
            if what in ("do", "fail", "drop"):
                instead = {"fail": Outcome.FAILED, "drop": Outcome.DROPPED}.get(what)
                if executors:
                    executors[rank % len(executors)].do(at, instead)
            elif what == "hear":
                agent.hear(at)
            else:
                {"think": agent.think, "keep": agent.keep, "round": agent.look_round}[what]()

    @precondition(lambda self: self.root is not None)
    @rule(how=st.sampled_from([*[None] * 4, Outcome.FAILED, Outcome.DROPPED]))
    def break_files(self, how: Outcome | None) -> None:
        """Reads and writes fail from now on, or no longer."""
        for executor in self.sim.agent.executors.values():
            executor.broken = how

    @precondition(lambda self: self.root is not None)
    @rule(at=AT, how=st.sampled_from(sorted(DAMAGES)))
    def damage(self, at: int, how: str) -> None:
        """Somebody else does something to a file."""
        there = sorted(self.root.rglob("*.kv"))
        if not there:
            return
        victim, change = there[at % len(there)], DAMAGES[how]
        TALLY["files damaged"] += 1
        if change is None:
            victim.unlink()
            return
        good = victim.read_bytes()
        if len(good) == FILE_BYTES:
            self.sim.audit.spoilt.add(victim)
            victim.write_bytes(change(good))

    @precondition(lambda self: self.root is not None)
    @rule(
        gently=st.sampled_from([True, True, False]),
        pace=st.sampled_from([Pace.ALL, Pace.ALL, *Pace]),
        at=AT,
        again=st.integers(1, 4),
        own=OWN,
    )
    def restart(self, gently: bool, pace: Pace, at: int, again: int, own: int) -> None:
        """The engine ends, perhaps in the midst of things; another has its folder and clients."""
        if gently:
            self._come_to_rest()
        before = self.sim
        self._end()
        self._start(pace)
        self.sim.audit.remember(before.audit)
        TALLY["restarts"] += 1
        known = list(before.requests)
        if pace is Pace.ALL:  # its folder is looked through while nobody comes
            self._add(prompt(1), max_tokens=1)
            self.sim.run()
            self.sim.let_through()
        for i in range(again if known else 0):
            name = known[(at + i) % len(known)]
            tokens = before.tokens[name][: 9 * BLOCK] + prompt(own, seed=100 + i)
            self._add(tokens, salt=before.salts[name], max_tokens=5)
