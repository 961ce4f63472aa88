# SPDX-License-Identifier: Apache-2.0
"""The engine of the model of the contract: how it starts and goes on, and what must hold."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.scheduler import manual_peers
from tests.scheduler.machine_drawn import MAX_LEN, MAX_LIVE, MAX_PROMPT, OPTIONS, PATIENCE
from tests.scheduler.manual import ManualSim, Pace
from tests.scheduler.neighbour import Desk, beside
from tests.scheduler.sim import BLOCK, STATE, prompt
from vllm_tiered_kv.gate import Work
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES

FILE_BYTES = 8192
"""A file of any chunk here: its header and a payload of at most 4096 bytes."""
TALLY: Counter[str] = Counter()
"""What all machines of a process have seen; for a test to ask whether it was enough."""


class Machine(RuleBasedStateMachine):
    """One engine after the other, at rest when all is over."""

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
        peers = given.pop("peers")
        if peers:
            given["windows"] = (0,)
        place = given.pop("neighbour")
        ours = ("store_generated", "trust_after_reset", "gate")
        extra = {"load_deadline": 10.0, **{key: given.pop(key) for key in ours}}
        self.trusts = extra["trust_after_reset"]
        if peers:
            extra["remote"] = manual_peers.options(verify=peers == "compared")
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
        if self.sim.peers is not None:  # they have met before anybody comes
            self._add(prompt(1), max_tokens=1)
            self.sim.run()
            self.sim.let_through()
        self.sim.pace = pace
        if self.taught is not None:
            self._teach(*self.taught)
        if self.hasty:
            gate: Any = self.sim.half.gate
            # So short that loads are late on the way, and so long that most do begin.
            gate.deadline, gate.worth = lambda _: 0.3, lambda _: 0.0
            self.sim.tick = 0.02

    def _teach(self, copy: float, read: float) -> None:
        """Here nothing takes time but what a rule lets pass: say what it took elsewhere.

        Args:
            copy: seconds a byte, from slots to the device; computing a token takes a millisecond.
            read: seconds a byte, from files and from other engines.
        """
        gate = self.sim.half.gate.gate
        for i in range(1, 30):
            gate.prefill.observe(Work(20 * i, 200.0 * i**2, is_prefill=True), 0.02 * i)
            gate.copy.observe(5000 * i, 5000 * i * copy)
            gate.disk.observe(5000 * i, 5000 * i * read)
            gate.peers.observe(5000 * i, 5000 * i * read)

    # -- what it does ------------------------------------------------------------------

    def _add(self, tokens: list[int], logprobs: int | None = None, **rest: Any) -> None:
        if len(self.sim.scheduler.requests) >= MAX_LIVE:
            return
        self.number += 1
        self.sim.add(f"r{self.number}", tokens[:MAX_PROMPT], prompt_logprobs=logprobs, **rest)

    def _arrive(self, drawn: dict[str, Any]) -> None:
        given = dict(drawn)
        head = prompt(9 * BLOCK, seed=given.pop("family"))[: given.pop("shared")]
        self._add(head + prompt(given.pop("own"), seed=100 + given.pop("seed")), **given)

    def _live(self) -> list[str]:
        return [i for i, r in self.sim.scheduler.requests.items() if not r.is_finished()]

    def _step(self) -> None:
        sim = self.sim
        if sim.scheduler.has_requests():
            tokens = self._step_without_pause()
            if self.every_step or not tokens:
                sim.pause()
        elif sim.busy:
            self._make_room()
            sim.advance()

    def _step_without_pause(self) -> int:
        """The tokens that it computes."""
        self._make_room()
        return int(self.sim.step().total_num_scheduled_tokens)

    def _make_room(self) -> None:
        sim = self.sim
        while len(sim._scheduled) + len(sim._in_flight) >= sim.depth:
            sim.execute() if sim._scheduled else sim.process()

    # -- what must hold ------------------------------------------------------------------

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.sim is not None:
            self._check()

    def _check(self) -> None:
        self.sim.audit.check()
        if self.root is not None:
            self.sim.audit.check_files(self.root)
        if self.sim.peers is not None:
            self.sim.peers.check()
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
        if sim.peers is not None:
            sim.peers.come_to_rest()
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
