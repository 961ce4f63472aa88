# SPDX-License-Identifier: Apache-2.0
"""An engine in a world where steps, copies and files take just the time they are said to take.

The device works beside the engine: a step that is planned while another runs begins when that ends,
and the engine waits for a step's end only where it takes its output in.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from tests.scheduler.manual import ManualSim, Pace
from tests.scheduler.manual_disk import ManualAgent, ManualExecutor
from tests.scheduler.worker import Row
from vllm_tiered_kv.tiers.disk.orders import ReadOrder

IDLE_TURN = 0.002


class TimedSim(ManualSim):
    """Files are read beside the engine, one after the other; blocks are copied while it is idle."""

    def __init__(self, **options: Any) -> None:
        self.step_seconds = 0.004
        self.token_seconds = 1e-4
        self.pair_seconds = 1e-8
        self.plan_seconds = 0.0
        """Of the engine's own thread, before each step."""
        self.computed: Counter[str] = Counter()
        """Tokens, by request."""
        self._free_at = 0.0
        """When the device has done all it was given."""
        self._ends: deque[float] = deque()
        """Of steps whose output was not taken in."""
        self.copy_seconds = 0.0
        """Of one block, to the device."""
        self.fast_ranks: set[int] = set()
        """They copy in no time."""
        self.read_seconds = 0.0
        """Of one file."""
        self._reading_since: float | None = None
        super().__init__(**options)
        wrap = self.gate.wrap
        for rank in self.ranks:
            rank.tiered._worker._open_copier = lambda groups, pool, number=rank.number: _SlowCopier(
                self, number, wrap(groups, pool)
            )

    def schedule(self) -> Any:
        self._pass(self.plan_seconds)
        return super().schedule()

    def _execute(self, number: int, output: Any, rows: list[Row]) -> Any:
        begins = max(self.now, self._free_at)
        self._free_at = begins + self.seconds_of(rows)
        self._ends.append(self._free_at)
        self.computed.update({row.request_id: row.count for row in rows})
        return super()._execute(number, output, rows)

    def seconds_of(self, rows: list[Row]) -> float:
        """What a step takes on the device."""
        if not rows:
            return 0.0
        tokens = sum(row.count for row in rows)
        pairs = sum(row.count * (row.start + row.count / 2) for row in rows)
        return self.step_seconds + self.token_seconds * tokens + self.pair_seconds * pairs

    def process(self) -> None:
        self._pass(max(0.0, self._ends.popleft() - self.now))
        super().process()

    def pause(self) -> None:
        self._pass(IDLE_TURN)
        super().pause()

    def let_through(self) -> None:
        """Every copy ends and every report arrives, and files are written; not so what is read."""
        for lane in self.lanes:
            lane.finish()
        self._deliver()
        if self.agent is not None:
            self.agent.look_round()
            self._settle(self.agent)

    def _pass(self, seconds: float) -> None:
        """Time passes, for files too."""
        end = self.now + seconds
        agent = self.agent
        if agent is not None and self.pace is not Pace.NONE:
            self._settle(agent)
            while (reader := next(self._readers(agent), None)) is not None:
                if self._reading_since is None:
                    self._reading_since = self.now
                done = self._reading_since + self.read_seconds
                if done > end:
                    break
                self.now = max(self.now, done)
                executor, at = reader
                executor.do(at)
                self._settle(agent)
                self._reading_since = self.now if any(self._readers(agent)) else None
        self.now = end

    @staticmethod
    def _readers(agent: ManualAgent) -> Any:
        for executor in agent.executors.values():
            for at, order in enumerate(executor.orders):
                if isinstance(order, ReadOrder):
                    yield executor, at

    def _settle(self, agent: ManualAgent) -> None:
        """All is done and known but what is read."""
        while True:
            agent.think()
            busy = bool(agent.reports or agent._keeper.chores)
            while agent.reports:
                agent.hear(0)
            while agent._keeper.chores:
                agent.keep()
            for executor in agent.executors.values():
                busy |= _write_one(executor)
            if not busy:
                return

    def first_token(self, name: str, tokens: list[int], **params: Any) -> float:
        """Seconds to the first token of a request that is alone; the device has forgotten it."""
        self.flush_device()
        began = self.now
        self.add(name, tokens, 1, **params)
        for _ in range(20_000):
            self.advance()
            if self.outputs[name]:
                break
        assert self.outputs[name] == self.expected(name)
        took = self.now - began
        self.run()
        self.let_through()
        return took


def _write_one(executor: ManualExecutor) -> bool:
    for at, order in enumerate(executor.orders):
        if not isinstance(order, ReadOrder):
            executor.do(at)
            return True
    return False


class _SlowCopier:
    def __init__(self, sim: TimedSim, rank: int, inner: Any) -> None:
        self._sim, self._rank, self._inner = sim, rank, inner
        self.mark, self.close = inner.mark, inner.close

    def submit(self, direction: Any, copies: Any, after: Any) -> Any:
        if direction.value == "load" and self._rank not in self._sim.fast_ranks:
            self._sim.now += self._sim.copy_seconds * len(copies)
        return self._inner.submit(direction, copies, after)
