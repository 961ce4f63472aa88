# SPDX-License-Identifier: Apache-2.0
"""A model of vLLM's contract with a connector: whatever may happen, in any order.

Hypothesis chooses what happens and makes what it finds short. After each rule every byte that is
stored and every byte that vLLM would read is checked, and all counts; at the end everything is let
go and the engine must come to rest with the right answers and nothing lost.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.scheduler.manual import ManualSim, Pace
from tests.scheduler.neighbour import Desk, beside
from tests.scheduler.rank import Runner
from tests.scheduler.sim import BLOCK, STATE, prompt
from vllm_tiered_kv.gate import Work
from vllm_tiered_kv.tiers.disk.orders import Outcome
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES

MAX_LEN = 12 * BLOCK
MAX_PROMPT = 10 * BLOCK
MAX_LIVE = 12
PATIENCE = 60
"""Steps in which something must be answered once nothing is held back: a prompt takes a few steps,
and preempted requests may start over some times."""

AT = st.integers(0, 255)
"""Which of the things that could be meant; modulo their number."""
OWN = st.one_of(st.just(0), st.integers(1, 20))
"""Tokens that follow what was said before."""
PARAMS = st.sampled_from(
    [
        *[None] * 24,
        {"tiered_kv": {"store": False}},
        {"tiered_kv": {"load": False}},
        {"tiered_kv": {"store": False, "load": False}},
        {"tiered_kv": {"load": "yes"}},
        {"tiered_kv": {"gate": "never"}},
        {"tiered_kv": {"gate": "measured"}},
        {"tiered_kv": {"gate": "sometimes"}},
        {"tiered_kv": {"unknown": 1}},
        {"tiered_kv": [1, 2]},
        {"tiered_kv": None},
        {"somebody": {"else": True}},
        {},
    ]
)
RESETS = [*["device"] * 5, "device and running", "all", "all and running"]
PROMPT = st.fixed_dictionaries(
    {
        "family": st.integers(0, 1),
        "shared": st.one_of(st.just(9 * BLOCK), st.integers(0, 9 * BLOCK)),
        "own": st.integers(1, 20),
        "seed": st.integers(0, 3),
        "max_tokens": st.integers(1, 40),
        "salt": st.sampled_from([None, None, None, None, "s"]),
        "params": PARAMS,
        "priority": st.integers(0, 2),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([*[None] * 8, 1]),
    }
)
OPTIONS = st.fixed_dictionaries(
    {
        "windows": st.sampled_from(
            [(0,), (0,), (0, 40), (64,), (0, 24), (0, 17, 40), (STATE, 0), (0, STATE, 40)]
        ),
        "depth": st.sampled_from([1, 2]),
        "chunk_blocks": st.sampled_from([1, 1, 2, 3]),
        "num_blocks": st.sampled_from([14, 20, 40, 80]),
        "capacity_chunks": st.sampled_from([4, 12, 40, 200]),
        "max_num_batched_tokens": st.sampled_from([48, 100, 256]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 40]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "runner": st.sampled_from([Runner.SAVE_FIRST, *Runner]),
        "v2": st.booleans(),
        "drafts": st.sampled_from([0, 0, 3]),
        "ranks": st.sampled_from([1, 2]),
        "role": st.sampled_from(["kv_both", "kv_both", "kv_producer"]),
        "policy": st.sampled_from(["recompute", "recompute", "recompute", "fail"]),
        "store_generated": st.sampled_from([True, True, False]),
        "trust_after_reset": st.sampled_from([False, False, False, True]),
        "gate": st.sampled_from(["always", "always", "measured"]),
        "taught": st.sampled_from([None, (1e-9, 1e-9), (1e-9, 1e-3), (1e-3, 1e-3)]),
        "neighbour": st.sampled_from(["", "", "first", "second"]),
        "pace": st.sampled_from(list(Pace)),
        "every_step": st.booleans(),
        "disk_chunks": st.sampled_from([None, None, 6, 30, 400, 400]),
        "disk": st.fixed_dictionaries(
            {
                "shared": st.booleans(),
                "store_after": st.sampled_from([1, 1, 1, 2]),
                "min_tokens": st.sampled_from([0, 0, 0, 40]),
            }
        ),
        "hasty": st.sampled_from([False, False, True]),
    }
)
FILE_BYTES = 8192
"""A file of any chunk here: its header and a payload of at most 4096 bytes."""
DAMAGES = {
    "flip": lambda good: good[:5000] + bytes([good[5000] ^ 1]) + good[5001:],
    "cut": lambda good: good[:-1],
    "empty": lambda _: b"",
    "zero": lambda good: bytes(len(good)),
    "gone": None,
}


TALLY: Counter[str] = Counter()
"""What all machines of a process have seen; for a test to ask whether it was enough."""


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sim: ManualSim = None  # type: ignore[assignment]
        self.desk = Desk()
        self.version = 0
        self.number = 0
        self.every_step = True
        self.trusts = False
        self.stale: set[str] = set()
        """Requests whose load was under way when the connector's cache was reset."""
        self.root: Path | None = None
        """The disk tier's folder."""
        self.place = ""
        self.given: dict[str, Any] = {}
        self.taught: tuple[float, float] | None = None
        """What the gate knows of its tiers from the start."""
        self.hasty = False
        """Loads are given up as soon as they may be."""

    @initialize(options=OPTIONS)
    def start(self, options: dict[str, Any]) -> None:
        given = dict(options)
        place = given.pop("neighbour")
        ours = ("store_generated", "trust_after_reset", "gate")
        extra = {"load_deadline": 10.0, **{key: given.pop(key) for key in ours}}
        self.trusts = extra["trust_after_reset"]
        pace, self.every_step = given.pop("pace"), given.pop("every_step")
        groups = len(given["windows"])
        if STATE in given["windows"]:  # which vLLM keeps for its prefix cache only
            given |= {"enable_prefix_caching": True, "drafts": 0}
            place = ""
        chunks, disk = given.pop("disk_chunks"), given.pop("disk")
        if chunks is not None:
            self.root = Path(tempfile.mkdtemp(prefix="model-of-a-disk-"))
            files = max(chunks, 2) * groups * FILE_BYTES
            capacity = int(given["ranks"] * (1.5 * files + FOLDER_BYTES) / 0.95)
            extra["disk"] = {"path": str(self.root), "capacity": capacity, "min_free": 1, **disk}
        self.taught = given.pop("taught")
        self.hasty = given.pop("hasty") and given["policy"] == "recompute"
        given["num_blocks"] *= groups
        given["capacity_chunks"] = max(given["capacity_chunks"], groups)
        self.place = place
        self.given = {**given, "extra": extra, "eos_every": 20, "max_model_len": MAX_LEN}
        self._start(pace)

    def _start(self, pace: Pace) -> None:
        self.desk = Desk()
        self.version = 0
        self.stale = set()
        given = dict(self.given)
        if self.place:
            given["beside"] = beside(self.place, self.desk)
        self.sim = ManualSim(**given)
        self.sim.pace = pace
        if self.taught is not None:
            self._teach(*self.taught)
        if self.hasty:
            gate: Any = self.sim.half.gate
            gate.deadline, gate.worth = lambda _: 0.1, lambda _: 0.0
            self.sim.tick = 0.02

    def _teach(self, copy: float, read: float) -> None:
        """Here nothing takes time but what a rule lets pass: say what it took elsewhere.

        Args:
            copy: seconds a byte, from slots to the device; computing a token takes a millisecond.
            read: seconds a byte, from files.
        """
        gate = self.sim.half.gate.gate
        for i in range(1, 30):
            gate.prefill.observe(Work(20 * i, 200.0 * i**2, is_prefill=True), 0.02 * i)
            gate.copy.observe(5000 * i, 5000 * i * copy)
            gate.disk.observe(5000 * i, 5000 * i * read)

    # -- clients -----------------------------------------------------------------------

    @rule(prompts=st.lists(PROMPT, min_size=1, max_size=4))
    def arrive(self, prompts: list[dict[str, Any]]) -> None:
        """Prompts whose heads others may have had too."""
        for drawn in prompts:
            given = dict(drawn)
            head = prompt(9 * BLOCK, seed=given.pop("family"))[: given.pop("shared")]
            self._add(head + prompt(given.pop("own"), seed=100 + given.pop("seed")), **given)

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

    def _add(self, tokens: list[int], logprobs: int | None = None, **rest: Any) -> None:
        if len(self.sim.scheduler.requests) >= MAX_LIVE:
            return
        self.number += 1
        self.sim.add(f"r{self.number}", tokens[:MAX_PROMPT], prompt_logprobs=logprobs, **rest)

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

    def _live(self) -> list[str]:
        return [i for i, r in self.sim.scheduler.requests.items() if not r.is_finished()]

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

    def _step(self) -> None:
        sim = self.sim
        while len(sim._scheduled) + len(sim._in_flight) >= sim.depth:
            sim.execute() if sim._scheduled else sim.process()
        if sim.scheduler.has_requests():
            output = sim.step()
            if self.every_step or not output.total_num_scheduled_tokens:
                sim.pause()
        elif sim.busy:
            sim.advance()

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

    # -- the disk --------------------------------------------------------------------------

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

    # -- what must hold ------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.sim is not None:
            self._check()

    def _check(self) -> None:
        self.sim.audit.check()
        if self.root is not None:
            self.sim.audit.check_files(self.root)
        self.sim.check_ledger()
        assert self.sim.counter("failures", "internal") == 0
        for request_id in self.sim.scheduler.requests:
            said = self.sim.outputs[request_id]
            assert said == self.sim.expected(request_id)[: len(said)]
        self._check_stale()

    def _check_stale(self) -> None:
        """vLLM is never told that bytes from before a reset have arrived."""
        scheduler = self.sim.scheduler
        for request_id in list(self.stale):
            request = scheduler.requests.get(request_id)
            if request is None or request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.stale.discard(request_id)
            elif request_id in scheduler.finished_recving_kv_req_ids:
                self.stale.discard(request_id)
                assert request.num_computed_tokens == 0, f"{request_id}: a stale load counts"

    def teardown(self) -> None:
        if self.sim is None:
            return
        try:
            self._come_to_rest()
        finally:
            self._end()
            if self.root is not None:
                shutil.rmtree(self.root)

    def _end(self) -> None:
        TALLY["steps"] += self.sim.steps
        TALLY["engines"] += 1
        self._note()
        self.sim.close()

    def _come_to_rest(self) -> None:
        sim = self.sim
        sim.pace, sim.hold_stores = Pace.ALL, False
        sim.gate.fail.clear()
        sim.gate.fail_late.clear()
        for executor in sim.agent.executors.values() if sim.agent is not None else ():
            executor.broken = None
        self.desk.claim = 0
        self._let_all_end()
        for _ in range(20):
            if not (sim.half.core.ledger.stores or sim.half.core.ledger.loads):
                break
            sim.let_through()
            sim.half.drain()
            sim.step()
        sim.let_through()
        sim.check_quiet()
        for request_id, request in sim.requests.items():
            self._check_answer(request_id, request)

    def _let_all_end(self) -> None:
        sim = self.sim
        idle = 0
        while sim.busy:
            while self.desk.loading:
                self.desk.finish(sim, 0, well=True)
            sim.let_through()
            before = self._progress()
            sim.advance()
            self._check()
            idle = idle + 1 if self._progress() == before else 0
            if idle >= PATIENCE:
                raise AssertionError(f"nothing moves: {self._state()}")

    def _progress(self) -> tuple[int, int]:
        sim = self.sim
        return sum(map(len, sim.outputs.values())), len(sim.scheduler.requests)

    def _state(self) -> str:
        scheduler = self.sim.scheduler
        requests = [
            (r.request_id, r.status.name, r.num_tokens, r.num_computed_tokens, r.num_preemptions)
            for r in scheduler.requests.values()
        ]
        pool = scheduler.kv_cache_manager.block_pool
        return (
            f"{requests}; running {[r.request_id for r in scheduler.running]}; "
            f"holding {[r.request_id for r in scheduler.kv_holding_waiting]}; "
            f"failed {scheduler.failed_recving_kv_req_ids}; "
            f"received {scheduler.finished_recving_kv_req_ids}; "
            f"{pool.get_num_free_blocks()} of {self.sim.free_at_start} blocks free"
        )

    def _check_answer(self, request_id: str, request: Any) -> None:
        said, want = self.sim.outputs[request_id], self.sim.expected(request_id)
        assert said == want[: len(said)], request_id
        if request.status is RequestStatus.FINISHED_ABORTED:
            return
        if request.status is RequestStatus.FINISHED_ERROR:
            assert self.sim.vllm_config.kv_transfer_config.kv_load_failure_policy == "fail"
            return
        assert said == want, request_id
        stopped = request.status is RequestStatus.FINISHED_STOPPED
        assert self.sim.reasons[request_id] is (
            FinishReason.STOP if stopped else FinishReason.LENGTH
        )

    def _note(self) -> None:
        TALLY.update(self.sim.counters)
        TALLY["drafts|accepted"] += self.sim.streams.accepted
        TALLY["drafts|rejected"] += self.sim.streams.rejected
        TALLY["neighbour|ended"] += self.desk.count
        TALLY["requests"] += len(self.sim.requests)
        TALLY["device hits"] += self.sim.device_hits
        for request in self.sim.requests.values():
            TALLY[request.status.name] += 1
            TALLY["preemptions"] += request.num_preemptions
