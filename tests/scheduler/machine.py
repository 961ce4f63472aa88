# SPDX-License-Identifier: Apache-2.0
"""A model of vLLM's contract with a connector: whatever may happen, in any order.

Hypothesis chooses what happens and makes what it finds short. After each rule every byte that is
stored and every byte that vLLM would read is checked, and all counts; at the end everything is let
go and the engine must come to rest with the right answers and nothing lost.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.scheduler.machine_disk import DiskRules
from tests.scheduler.machine_drawn import AT, OWN, PARAMS, PROMPT, RESETS
from tests.scheduler.machine_engine import TALLY
from tests.scheduler.machine_peers import PeerRules
from tests.scheduler.manual import Pace
from tests.scheduler.sim import BLOCK, prompt

__all__ = ["TALLY", "EngineMachine"]


class EngineMachine(DiskRules, PeerRules):
    """Clients, copies, another connector, resets; a disk and other engines where it has them."""

    # -- clients -----------------------------------------------------------------------

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=4))
    def arrive(self, prompts: list[dict[str, Any]]) -> None:
        """Prompts whose heads others may have had too."""
        for drawn in prompts:
            self._arrive(drawn)

    @precondition(lambda self: not self.sim.busy)
    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=4))
    def arrive_idle(self, prompts: list[dict[str, Any]]) -> None:
        self.arrive(prompts)

    @precondition(lambda self: self.sim.requests)
    @rule(at=AT, own=OWN, max_tokens=st.integers(1, 40), params=PARAMS)
    def follow_up(self, at: int, own: int, **rest: Any) -> None:
        """The next turn of a conversation, perhaps before the last one is answered.

        With nothing of its own to say it is the same again, in whole blocks.
        """
        known = list(self.sim.requests)
        before = known[at % len(known)]
        tokens = self.sim.tokens[before][: 9 * BLOCK] + prompt(own, seed=100 + at)
        if not own:
            tokens = tokens[: max(1, len(tokens) // BLOCK) * BLOCK]
        self._add(tokens, salt=self.sim.salts[before], **rest)

    @precondition(lambda self: self.sim.requests)
    @rule(at=AT, count=st.integers(1, 3), own=OWN, max_tokens=st.integers(1, 40))
    def come_back(self, at: int, count: int, own: int, max_tokens: int) -> None:
        """The engine comes to rest, the device forgets, and clients return."""
        for _ in range(40):
            if not self.sim.busy:
                break
            self.sim.let_through()
            self._step()
            self._check()
        self.sim.scheduler.reset_prefix_cache()
        for i in range(count):
            self.follow_up(at + i, own=own, max_tokens=max_tokens, params=None)

    @rule(at=AT)
    def abort(self, at: int) -> None:
        if live := self._live():
            self.sim.abort(live[at % len(live)])

    # -- the engine ----------------------------------------------------------------------

    @precondition(lambda self: self.sim.busy)
    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for i in range(times):
            if i:
                self._check()
            self._step()

    @precondition(lambda self: self.sim.busy)
    @rule(times=st.integers(1, 12))
    def step_on(self, times: int) -> None:
        self.step(times)

    @precondition(lambda self: self.sim.busy)
    @rule(times=st.integers(4, 40))
    def step_far(self, times: int) -> None:
        self.step(times)

    @rule(what=st.sampled_from(["schedule", "execute", "process"]))
    def part_of_a_step(self, what: str) -> None:
        """Other things may happen between the parts."""
        sim = self.sim
        under_way = len(sim._scheduled) + len(sim._in_flight)
        if what == "schedule" and under_way < sim.depth and sim.scheduler.has_requests():
            sim.schedule()
        elif what == "execute" and sim._scheduled:
            sim.execute()
        elif what == "process" and sim._in_flight:
            sim.process()

    # -- copies and reports ----------------------------------------------------------------

    @rule(pace=st.sampled_from(list(Pace)), every_step=st.booleans())
    def set_pace(self, pace: Pace, every_step: bool) -> None:
        """Whether copies end by themselves, and how soon."""
        self.sim.pace, self.every_step = pace, every_step

    @rule(
        what=st.sampled_from(["begin", "copy", "copy", "report", "report", "fail", "fail_late"]),
        lane=AT,
        at=AT,
        times=st.integers(1, 6),
    )
    def work(self, what: str, lane: int, at: int, times: int) -> None:
        """Copies begin, take place, fail and are reported in any order."""
        sim = self.sim
        broken = set(sim.gate.fail)
        if what.startswith("fail"):
            getattr(sim.gate, what).update({"store", "load"})
        for _ in range(times if sim.lanes else 0):
            action = "copy" if what.startswith("fail") else what
            getattr(sim.lanes[lane % len(sim.lanes)], action)(at)
        sim.gate.fail_late.clear()
        sim.gate.fail.clear()
        sim.gate.fail.update(broken)

    @rule(failing=st.sampled_from([*[()] * 3, ("load",), ("store",), ("load", "store")]))
    def break_copies(self, failing: tuple[str, ...]) -> None:
        """Copies fail from now on, or no longer."""
        self.sim.gate.fail.clear()
        self.sim.gate.fail.update(failing)

    @rule(
        what=st.sampled_from(["arrive", "arrive", "arrive_late", "lose"]),
        at=AT,
        again=st.booleans(),
        times=st.integers(1, 4),
    )
    def post(self, what: str, at: int, again: bool, times: int) -> None:
        """Reports cross the side channel late, twice, in another order, or not at all."""
        for _ in range(times):
            if what == "lose":
                self.sim.lose(at)
            else:
                getattr(self.sim, what)(at, again=again)

    @rule(hold=st.booleans())
    def hold_reports(self, hold: bool) -> None:
        self.sim.hold_stores = hold

    @rule(seconds=st.sampled_from([0.1, 0.6, 11.0, 40.0]))
    def wait(self, seconds: float) -> None:
        self.sim.now += seconds

    # -- the neighbour -----------------------------------------------------------------------

    @rule(blocks=st.integers(0, 6))
    def claim(self, blocks: int) -> None:
        self.desk.claim = blocks

    @rule(at=AT, well=st.sampled_from([True, True, False]))
    def neighbour_ends(self, at: int, well: bool) -> None:
        self.desk.finish(self.sim, at, well=well)

    # -- resets ----------------------------------------------------------------------------------

    @rule(what=st.sampled_from(RESETS))
    def reset(self, what: str) -> None:
        scheduler = self.sim.scheduler
        running = what.endswith("running")
        if running and not self._can_reset_running():
            return
        connector = what.startswith("all") and not self.trusts
        if connector:
            requests = self.sim.half._requests
            self.stale.update(r for r, state in requests.items() if state.load is not None)
        done = scheduler.reset_prefix_cache(
            reset_running_requests=running, reset_connector=what.startswith("all")
        )
        TALLY[f"reset {what}: {done}"] += 1
        if done and connector:
            self._change_weights()

    @precondition(lambda self: self.sim.half.core.ledger.loads)
    @rule()
    def reset_while_loading(self) -> None:
        self.reset("all")

    def _can_reset_running(self) -> bool:
        """Whether vLLM would not raise: blocks of loads, and those it holds back, count as used."""
        sim, scheduler = self.sim, self.sim.scheduler
        in_flight = sim._scheduled or sim._in_flight
        if scheduler.deferred_frees or (scheduler.defer_block_free and in_flight):
            return False
        if any(request.is_finished() for request in scheduler.requests.values()):
            return False
        return not any(scheduler._holds_kv_blocks(r) for r in scheduler.kv_holding_waiting)

    def _change_weights(self) -> None:
        """What was computed before differs from now on, where that is what resets are for."""
        if self.sim.executed:
            self.version += 1
            TALLY["weight changes"] += 1
            for rank in self.sim.ranks:
                rank.set_version(self.version)
