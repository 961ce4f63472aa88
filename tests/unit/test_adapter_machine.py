# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters on two ranks, whatever happens to them: nothing stands under a wrong key.

The real table and the real watches, around a model of what vLLM does: a prompt of a few blocks, a
device cache that knows names and paths, files that are overwritten, and memory for two adapters.
"""

from __future__ import annotations

import dataclasses
import hashlib
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_tiered_kv.protocol import AdapterReport, AdapterState
from vllm_tiered_kv.scheduler.adapters import AdapterTable, Content, LoraName, Verdict
from vllm_tiered_kv.worker.adapters import AdapterWatch

RANKS = 2
FOLLOWED = 3
IN_MEMORY = 2
BLOCKS = 4
WEIGHTS = st.integers(1, 3)
NAMES = st.sampled_from("abc")
AT = st.integers(0, 7)


class Loaded:
    """An adapter in a rank's memory."""

    def __init__(self, weights: int) -> None:
        self.weights = weights


@dataclasses.dataclass
class Asked:
    """A request: waiting, or running with the weights its blocks were computed with."""

    lora: LoraName
    running: bool = False
    content: Content | None = None
    chain: list[int] = dataclasses.field(default_factory=list)


def digest(weights: int) -> bytes:
    return bytes([weights]) * 32


class AdapterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bounds = [
            mock.patch("vllm_tiered_kv.scheduler.adapters.MAX_ADAPTERS", FOLLOWED),
            mock.patch("vllm_tiered_kv.worker.adapters.MAX_WATCHED", FOLLOWED),
        ]
        for bound in self.bounds:
            bound.start()
        self.table = AdapterTable(RANKS)
        self.memory: list[dict[int, Loaded]] = [{} for _ in range(RANKS)]
        self.watches = [AdapterWatch(r, lambda r=r: self.memory[r]) for r in range(RANKS)]
        for watch in self.watches:
            watch._thread = mock.Mock()  # digests are made by hand
        self.files: dict[str, int] = {}
        self.served: dict[str, LoraName] = {}
        self.numbers = 0
        self.requests: list[Asked] = []
        self.device: dict[tuple[str, int], tuple[int, ...]] = {}
        """By name and block: the weights of the chain that ends there."""
        self.tier: dict[tuple[bytes, int], tuple[int, ...]] = {}
        self.outputs: list[list[AdapterReport]] = []
        self.keys = {hashlib.sha256(digest(w) * RANKS).digest(): w for w in (1, 2, 3)}

    def teardown(self) -> None:
        for bound in self.bounds:
            bound.stop()

    # -- what an operator does -----------------------------------------------------------

    @rule(name=NAMES, weights=WEIGHTS, in_place=st.sampled_from([False, False, False, True]))
    def serve(self, name: str, weights: int, in_place: bool) -> None:
        """Load an adapter: under a new number, or in place."""
        self.files[name] = weights
        if in_place and name in self.served:
            number = self.served[name].adapter
        else:
            self.numbers += 1
            number = self.numbers
        self.served[name] = LoraName(number, name, f"/{name}", in_place)
        for memory in self.memory:
            self._load(memory, [Asked(self.served[name])])

    @rule(name=NAMES)
    def push_out(self, name: str) -> None:
        if name in self.served:
            for memory in self.memory:
                memory.pop(self.served[name].adapter, None)

    @rule(name=NAMES, weights=WEIGHTS)
    def overwrite(self, name: str, weights: int) -> None:
        self.files[name] = weights

    # -- what clients and the scheduler do -----------------------------------------------

    @precondition(lambda self: self.served)
    @rule(at=AT)
    def arrive(self, at: int) -> None:
        if len(self.requests) < 4:
            served = [*self.served.values()]
            self.requests.append(Asked(served[at % len(served)]))

    @rule(at=AT, patient=st.booleans())
    def admit(self, at: int, patient: bool) -> None:
        """A look-up, and what the scheduler half makes of its answer."""
        waiting = [r for r in self.requests if not r.running]
        if not waiting:
            return
        request = waiting[at % len(waiting)]
        found: tuple[int, ...] = ()
        for i in range(BLOCKS - 1):  # one is always computed
            if (request.lora.name, i) not in self.device:
                break
            found = self.device[request.lora.name, i]
        answer = self.table.look(request.lora, len(found))
        if answer is Verdict.ASK_AGAIN and patient:
            return
        request.content = answer if isinstance(answer, Content) else None
        if answer in (Verdict.ASK_AGAIN, Verdict.GO_WITHOUT):
            self.table.went_without(request.lora)
        request.running, request.chain = True, list(found)

    @precondition(lambda self: self.served)
    @rule(at=AT, steps=st.integers(1, 6))
    def ask_and_go_on(self, at: int, steps: int) -> None:
        self.arrive(at)
        for _ in range(steps):
            self.admit(0, patient=True)
            self.step(15)
            self.settle(1)

    @precondition(lambda self: self.served)
    @rule(name=NAMES, weights=WEIGHTS)
    def serve_and_answer(self, name: str, weights: int) -> None:
        self.serve(name, weights, in_place=False)
        self.requests.append(Asked(self.served[name]))
        for _ in range(BLOCKS + 2):
            self.admit(len(self.requests) - 1, patient=True)
            self.step(15)
            self.settle(1)
        self.requests.pop()

    @rule(at=AT)
    def preempt(self, at: int) -> None:
        if running := self._running():
            running[at % len(running)].running = False

    @rule(at=AT)
    def finish(self, at: int) -> None:
        if self.requests:
            del self.requests[at % len(self.requests)]

    @rule(name=NAMES, left=st.integers(0, BLOCKS - 1))
    def evict(self, name: str, left: int) -> None:
        """The device needs room: the tail of a prefix goes."""
        for i in range(left, BLOCKS):
            self.device.pop((name, i), None)

    @precondition(lambda self: not self._running())
    @rule()
    def reset(self) -> None:
        self.device.clear()
        self.table.device_emptied()

    # -- a step ----------------------------------------------------------------------------

    @rule(batch=st.integers(0, 15))
    def step(self, batch: int) -> None:
        """Some of the requests go on by a block; at most two steps are under way."""
        rows = [r for i, r in enumerate(self._running()) if batch >> i & 1]
        rows = self._fitting([r for r in rows if len(r.chain) < BLOCKS])
        plan = (tuple(self.table.watch), tuple(self.table.unwatch))
        self.table.watch.clear()
        self.table.unwatch.clear()
        for watch in self.watches:
            watch.follow(*plan)
            watch.observe()
        for memory in self.memory:
            self._load(memory, rows)
        for request in rows:
            request.chain.append(self.memory[0][request.lora.adapter].weights)
            place = (request.lora.name, len(request.chain) - 1)
            self.device.setdefault(place, tuple(request.chain))
        for watch in self.watches:
            watch.observe()
        for request in rows:
            self._store(request)
        self.outputs.append([w.take() for w in self.watches])
        while len(self.outputs) > 2:
            self.report()

    @precondition(lambda self: self.outputs)
    @rule()
    def report(self) -> None:
        for rank, reports in enumerate(self.outputs.pop(0)):
            for report in reports:
                self.table.report(rank, report)

    @rule(rank=st.integers(0, RANKS - 1), opaque=st.sampled_from([*[False] * 9, True]))
    def digest(self, rank: int, opaque: bool) -> None:
        watch = self.watches[rank]
        if watch._queue:
            number, (generation, found) = watch._queue.popitem()
            told = AdapterState.OPAQUE if opaque else AdapterState.KNOWN
            content = b"" if opaque else digest(found.weights)
            watch._digested.append(AdapterReport(number, generation, told, content))

    @rule(rounds=st.integers(1, 4))
    def settle(self, rounds: int) -> None:
        """Time goes by: all is digested and reported."""
        for _ in range(rounds):
            self.step(0)
            for rank in range(RANKS):
                while self.watches[rank]._queue:
                    self.digest(rank, opaque=False)
            while self.outputs:
                self.report()

    def _running(self) -> list[Asked]:
        return [r for r in self.requests if r.running]

    def _fitting(self, rows: list[Asked]) -> list[Asked]:
        numbers = list(dict.fromkeys(r.lora.adapter for r in rows))[:IN_MEMORY]
        return [r for r in rows if r.lora.adapter in numbers]

    def _load(self, memory: dict[int, Loaded], rows: list[Asked]) -> None:
        """As vLLM's workers do before a forward pass."""
        needed = {r.lora.adapter for r in rows}
        for request in rows:
            number = request.lora.adapter
            if number not in memory or request.lora.in_place:
                memory.pop(number, None)
                memory[number] = Loaded(self.files[request.lora.name])
        for number in [n for n in memory if n not in needed]:
            if len(memory) > IN_MEMORY:
                del memory[number]

    def _store(self, request: Asked) -> None:
        """A chunk is a block; it is kept if every rank still has what it was planned with."""
        content = request.content
        if content is not None and all(w.holds(content.use) for w in self.watches):
            self.tier[content.digest, len(request.chain)] = tuple(request.chain)

    # -- what must hold --------------------------------------------------------------------

    @invariant()
    def a_key_says_what_its_chunk_was_computed_with(self) -> None:
        for (key, _), chain in self.tier.items():
            assert set(chain) == {self.keys[key]}, (chain, self.keys[key])

    @invariant()
    def all_is_bounded(self) -> None:
        table = self.table
        assert len(table._adapters) <= FOLLOWED
        assert len(table._aliases) <= FOLLOWED
        assert {*table._idle} <= {*table._adapters}
        assert all(alias.doubts <= {*table._adapters} for alias in table._aliases.values())
        assert all(len(watch._watched) <= FOLLOWED for watch in self.watches)


TestAdapters = AdapterMachine.TestCase
TestAdapters.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
