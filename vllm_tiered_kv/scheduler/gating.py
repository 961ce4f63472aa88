# SPDX-License-Identifier: Apache-2.0
"""The gate in the scheduler half: what it is asked for a request, and what it is told of it."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from vllm_tiered_kv import metrics
from vllm_tiered_kv.gate import Choice, Decision, Gate, GateMode, Option, Question, Work
from vllm_tiered_kv.gate.choice import ends_to_try, kinks
from vllm_tiered_kv.gate.load import Backlog
from vllm_tiered_kv.gate.prefill import FEW_TOKENS
from vllm_tiered_kv.gate.regret import regret
from vllm_tiered_kv.gate.steps import StepClock
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.protocol import JobStatus
from vllm_tiered_kv.scheduler.groups import last_of
from vllm_tiered_kv.scheduler.guard import never_fatal
from vllm_tiered_kv.scheduler.hit_bytes import HitBytes
from vllm_tiered_kv.scheduler.peer_probe import PeerProbe
from vllm_tiered_kv.scheduler.probe import DiskProbe
from vllm_tiered_kv.scheduler.ruling import Ruling
from vllm_tiered_kv.scheduler.slow import SlowTier
from vllm_tiered_kv.scheduler.waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.index import Node
    from vllm_tiered_kv.scheduler.jobs import ActiveLoad
    from vllm_tiered_kv.scheduler.peers import PeerTier
    from vllm_tiered_kv.scheduler.requests import RequestState

logger = get_logger(__name__)

TRIED_CHUNKS = 8
"""Chunks loaded to see how fast a refused CPU tier is; more where no hit can end so early."""
MAX_UNCLEAN = 8
"""Steps in a row that are not learned from because they begin a load as well."""
FASTER = 2.0
"""What is on disk is asked of others only if they are so much faster: it costs them something."""
LEAST_COPY_PATIENCE = 0.25
"""Seconds a load may wait at least before its first copy: on a busy machine threads come late."""


class RequestGate:
    """Asks the gate for requests; scheduler thread only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.settings
        self.gate = Gate(
            settings.token_budget, settings.load_deadline, settings.shared_token_budget
        )
        self._few_tokens = max(FEW_TOKENS, settings.draft_tokens + 2)
        self._unclean = 0
        """Steps since the last that did nothing but compute."""
        self.steps: StepClock[tuple[RequestState, Ruling]] = StepClock()
        self._pending: dict[str, RequestState] = {}
        """Requests that were decided on and admitted, until their last piece is planned."""
        self._scheduled: Mapping[str, int] = {}
        """What the last step runs."""
        self._gone = 0
        """How many of these have ended since."""
        self._bytes = HitBytes(core.geometry, settings.world_size).of
        self._backlog = Backlog()
        self.waiting = Waiting(core, self.gate, self._bytes, self._turn)
        self.disk = SlowTier("disk", self.gate.disk, self._disk_reads, self._is_on_disk)
        """The disk tier; nothing is asked of it where there is none."""
        self.disk.probe = DiskProbe(
            core,
            lambda fetch: self.waiting.begin(self.disk, fetch),
            lambda fetch: self.waiting.learn(self.disk, fetch),
        )
        self.peers: SlowTier | None = None
        """Other engines; None where they are not asked."""

    def bind_peers(self, tier: PeerTier) -> None:
        """Other engines can be asked for chunks."""
        slow = self.peers = SlowTier(
            metrics.PEER_CPU, self.gate.peers, lambda: tier.reads, lambda key: tier.groups(key) > 0
        )
        slow.probe = PeerProbe(self._core, tier, self.waiting.learn_trial)

    def prefers_peers(self) -> bool:
        """Whether peers come before the disk: they were seen to be faster, by far."""
        disk, peers = self.disk.model, self.peers.model if self.peers is not None else None
        if peers is None or not (peers.is_known and disk.is_known):
            return False
        nbytes = self._bytes(TRIED_CHUNKS)
        return FASTER * peers.seconds(nbytes) < disk.seconds(nbytes)

    def is_probing(self, node: Node) -> bool:
        """Whether a chunk is being read in the background only: nobody waits for it."""
        probes = (tier.probe for tier in (self.disk, self.peers) if tier is not None)
        return any(probe is not None and probe.is_reading(node) for probe in probes)

    # -- the engine's steps --------------------------------------------------------------

    @never_fatal
    def planned(
        self, scheduled: Mapping[str, int], requests: Mapping[str, RequestState], *, loads: bool
    ) -> None:
        """A step has been planned; ``loads``: it begins some."""
        last = []
        for request_id, state in list(self._pending.items()):
            ruling, tokens = state.ruling, scheduled.get(request_id, 0)
            if ruling is None or ruling.admitted is None:
                del self._pending[request_id]
            elif tokens and state.request.num_computed_tokens + tokens >= state.request.num_tokens:
                last.append((state, ruling))
                del self._pending[request_id]
        work = _work(scheduled, requests, self._few_tokens)
        self.steps.planned(self._core.clock(), work, is_clean=not loads, last=tuple(last))
        self._scheduled, self._gone = scheduled, 0

    @never_fatal
    def ended(self) -> None:
        """The oldest step's output has been taken in."""
        step = self.steps.ended(now := self._core.clock())
        if step is None:
            return
        self._unclean = 0 if step.is_clean else self._unclean + 1
        if self._unclean == 0 or self._unclean > MAX_UNCLEAN:  # where all begin loads: as they are
            self.gate.prefill.observe(step.work, step.seconds)
        for state, ruling in step.last:
            if state.ruling is ruling:
                state.ruling = None
                self._answered(ruling, now)

    def gone(self, request_id: str) -> None:
        """A request has ended."""
        self._pending.pop(request_id, None)
        self._gone += request_id in self._scheduled

    @property
    def _is_busy(self) -> bool:
        return len(self._scheduled) > self._gone

    def _turn(self) -> float:
        return self.steps.turn(is_busy=self._is_busy)

    # -- what is asked -------------------------------------------------------------------

    def mode(self, state: RequestState) -> GateMode:
        return state.params.gate or self._core.settings.gate

    def may_read(
        self,
        tier: SlowTier,
        state: RequestState,
        keys: Sequence[bytes],
        first: int,
        start: int,
        ends: Sequence[int],
    ) -> bool:
        """Whether reading could be worth it if all of the prompt's chunks were there.

        Args:
            tier: where they would be.
            keys: of the prompt's chunks.
            first: the first chunk the device does not hold whole.
            start: tokens it holds.
            ends: how many chunks from ``first`` on the CPU tier can give, all the ways.
        """
        if self.mode(state) is not GateMode.MEASURED:
            return True
        usable = last_of(ends)
        beyond = range(usable + 1, len(keys) - first + 1)
        decision = self._ask_read(tier, state, first, start, ends, beyond)
        if decision.end // self._core.geometry.chunk_tokens - first > usable:
            return True
        self._refuse(tier, state, decision, keys, first + usable)
        return False

    def _refuse(
        self,
        tier: SlowTier,
        state: RequestState,
        decision: Decision,
        keys: Sequence[bytes],
        beyond: int,
    ) -> None:
        """What is there from chunk ``beyond`` on, if anything is, is not read."""
        if tier.has(keys[beyond]) and not state.is_reading:
            state.ruling = Ruling(decision, self._core.clock(), self._turn())
        if tier.probe is not None:
            content = state.content.digest if state.content is not None else b""
            tier.probe.refused(keys, beyond, content)

    def read_to(
        self,
        tier: SlowTier,
        state: RequestState,
        fetch: Fetch,
        keys: Sequence[bytes],
        first: int,
        start: int,
        ends: Sequence[int],
    ) -> int:
        """How many chunks of a fetch from ``first`` on are worth waiting for; 0: none."""
        usable = last_of(ends)
        beyond = fetch.ends[bisect_right(fetch.ends, usable) :]
        decision = self._ask_read(tier, state, first, start, ends, beyond)
        chunks = decision.end // self._core.geometry.chunk_tokens - first
        if chunks <= usable:
            self._refuse(tier, state, decision, keys, first + usable)
            return 0
        now = self.waiting.begin(tier, fetch)
        ruling = Ruling(decision, now, self._turn())
        if state.ruling is not None and state.is_reading:
            ruling.began = state.ruling.began  # another source has cost it time already
        ruling.known = usable
        if self.mode(state) is GateMode.MEASURED:
            ruling.predicted_read = self._read_seconds(tier, chunks - usable)
            ruling.give_up_at = now + self.waiting.patience(tier, ruling)
        state.ruling = ruling
        if tier.probe is not None:
            tier.probe.used()
        return chunks

    def copy_to(self, state: RequestState, first: int, start: int, ends: Sequence[int]) -> int:
        """How many chunks of a run in the CPU tier are worth loading."""
        was_refused = state.ruling is not None and not state.is_reading  # what lies beyond, slowly
        decision = self._ask(state, start, self._options(state, first, ends))
        if decision.choice is Choice.NONE and not state.is_reading and ends:
            small = last_of(ends[: bisect_right(ends, TRIED_CHUNKS)]) or ends[0]
            question = self._question(state, start, [self._option(first, small)])
            decision = self.gate.explore(decision, question, is_busy=self._is_busy)
        if decision.choice is Choice.ALL and was_refused:
            decision = msgspec.structs.replace(decision, choice=Choice.PART)
        ruling = state.ruling
        if not state.is_reading or ruling is None or ruling.admitted is not None:
            state.ruling = Ruling(decision, self._core.clock(), self._turn())
        elif decision.end != ruling.decision.end:  # not all came that was to be read
            ruling.arrives(decision)
        return max(0, decision.end // self._core.geometry.chunk_tokens - first)

    def worth_waiting(self, state: RequestState, start: int, most: float) -> float:
        """Seconds that a request may wait for others: no longer than computing would take."""
        curve = self.gate.curve(is_busy=self._is_busy)
        if curve is None or self.mode(state) is not GateMode.MEASURED:
            return most
        return min(most, curve.seconds(start, state.request.num_tokens))

    def _options(
        self,
        state: RequestState,
        first: int,
        ends: Sequence[int],
        known: int = 0,
        tier: SlowTier | None = None,
    ) -> list[Option]:
        """The loads of one source that can be best, shortest first.

        Args:
            ends: chunks from ``first`` on.
            known: how many of them come from the CPU tier where the others do not.
            tier: where the others come from.
        """
        size, prompt = self._core.geometry.chunk_tokens, state.request.num_tokens
        budget = self.gate.prefill.budget(is_busy=self._is_busy)
        below, above = (token // size - first for token in kinks(prompt, budget, size))
        tried = ends_to_try(ends, known, below, above)
        return [self._option(first, n, n - known, tier) for n in tried]

    def _ask_read(
        self,
        tier: SlowTier,
        state: RequestState,
        first: int,
        start: int,
        ends: Sequence[int],
        beyond: Sequence[int],
    ) -> Decision:
        """Of what the CPU tier has and what is read beyond it."""
        options = self._options(state, first, ends)
        options += self._options(state, first, beyond, last_of(ends), tier)
        return self._ask(state, start, options, tier)

    def _ask(
        self,
        state: RequestState,
        start: int,
        options: Sequence[Option],
        tier: SlowTier | None = None,
    ) -> Decision:
        question = self._question(state, start, options)
        slow = tier.model if tier is not None else None
        return self.gate.decide(question, self.mode(state), is_busy=self._is_busy, slow=slow)

    @staticmethod
    def _question(state: RequestState, start: int, options: Sequence[Option]) -> Question:
        return Question(start, state.request.num_tokens, tuple(options))

    def _option(
        self, first: int, chunks: int, read: int = 0, tier: SlowTier | None = None
    ) -> Option:
        """So many chunks, the last ``read`` of them from a slow source."""
        copy, turn = self.gate.copy, self._turn()
        seconds = copy.seconds(self._bytes(chunks), self._copying()) + copy.delay(turn)
        if tier is None:
            return Option(self._token(first + chunks), seconds)
        seconds += self._read_seconds(tier, read) + tier.model.delay(turn)
        return Option(self._token(first + chunks), seconds, reads=True)

    def _read_seconds(self, tier: SlowTier, chunks: int) -> float:
        return tier.model.seconds(self._bytes(chunks), self._reading(tier))

    def _token(self, chunk: int) -> int:
        return chunk * self._core.geometry.chunk_tokens

    def _copying(self) -> int:
        """Bytes of loads under way that are still to be copied, as far as can be told."""
        return self._backlog.left(self._core.clock(), self.gate.copy.bandwidth)

    def _reading(self, tier: SlowTier) -> int:
        queued = tier.queued()
        return self._bytes(queued) if queued else 0

    def _disk_reads(self) -> int:
        return self._core.disk.reads if self._core.disk is not None else 0

    def _is_on_disk(self, key: bytes) -> bool:
        disk = self._core.disk
        return disk is not None and disk.agent.groups(key) > 0

    @never_fatal
    def go_on(self) -> None:
        """Take in what was read in the background; once a step."""
        for tier in (self.disk, self.peers):
            if tier is not None and tier.probe is not None:
                tier.probe.go_on()

    # -- loads ---------------------------------------------------------------------------

    @never_fatal
    def admitted(self, state: RequestState, tokens: int) -> None:
        """vLLM admits a request and takes ``tokens`` of what was offered."""
        ruling = state.ruling
        if ruling is None:
            return
        if state.offer is not None and tokens <= 0:
            state.ruling = None  # it takes another connector's
            return
        if ruling.admitted is not None:  # a second time, with its load on the device, or lost
            self._resumed(state, ruling, ruling.admitted)
            return
        now, decision = self._core.clock(), ruling.decision
        choice, reason = decision.choice.value, decision.reason.value
        self._core.tally.add(metrics.GATE_DECISIONS.key(choice, reason))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "tiered-kv: gate: request %s: %s; engine %s; prefill %s; queued: %d B of copies, "
                "%d B of reads",
                state.request.request_id,
                ruling.words(state.request.num_tokens),
                "busy" if self._is_busy else "idle",
                self.gate.curve(is_busy=self._is_busy) or "not known",
                self._copying(),
                self._reading(self.disk),
            )
        if not state.is_reading:
            ruling.began = now
        elif tokens <= 0:  # read for nothing
            self._count("load", decision.load, now - ruling.began)
        ruling.admitted = now
        self.gate.admitted(decision)
        self._pending[state.request.request_id] = state
        ruling.turn = self._turn()
        ruling.ahead = self._copying()

    def deadline(self, state: RequestState) -> float:
        """Seconds that a load may wait before its first copy."""
        most = self._core.settings.load_deadline
        ruling = state.ruling
        if ruling is None or not self._may_give_up(state):
            return most
        decision = ruling.decision
        worth = decision.replaced or most
        return min(most, max(LEAST_COPY_PATIENCE, self.gate.patience(decision.load), worth))

    def worth(self, state: RequestState) -> float | None:
        """Seconds of the recompute that a load replaces, if it may be given up for it."""
        ruling = state.ruling
        return ruling.decision.replaced if ruling is not None and self._may_give_up(state) else None

    def _may_give_up(self, state: RequestState) -> bool:
        """Whether a load may end because computing is faster."""
        return self.mode(state) is GateMode.MEASURED and self._core.settings.recomputes

    @never_fatal
    def queued(self, load: ActiveLoad) -> None:
        """A load is about to be sent to the ranks."""
        nbytes = self._bytes(len(load.nodes))
        self._backlog.add(nbytes, self._core.clock(), self.gate.copy.bandwidth)

    @never_fatal
    def copied(self, load: ActiveLoad) -> None:
        """A load has ended on every rank."""
        self._backlog.ended(self._bytes(len(load.nodes)))
        if load.stale or not load.copies:
            return
        if load.status is JobStatus.DONE:
            self.gate.copy.observe(self._bytes(len(load.nodes)), load.seconds)
        elif load.status is JobStatus.LATE:
            self._core.tally.add(metrics.GATE_GIVEN_UP.key("cpu"))
            arrived = max(1, len(load.copies) - len(load.failed))
            whole = load.seconds * len(load.copies) / arrived
            self.gate.copy.observe(self._bytes(len(load.nodes)), whole)

    def arrived(self, state: RequestState, load: ActiveLoad) -> None:
        """vLLM learns that a request's load has ended well."""
        if state.ruling is not None:
            state.ruling.copied = load.seconds

    def _resumed(self, state: RequestState, ruling: Ruling, admitted: float) -> None:
        """vLLM goes on with a request whose load is on the device, or was given up."""
        copied, ruling.copied = ruling.copied, None
        lost, ruling.lost = ruling.lost, 0
        if copied is None and not lost:
            return
        now, decision, copy = self._core.clock(), ruling.decision, self.gate.copy
        if copied is not None:
            copy.noticed(now - admitted - copied - copy.queueing(ruling.ahead), ruling.turn)
        if decision.choice is Choice.NONE or decision.replaced is None:
            return
        self._count("load", decision.load, now - ruling.began)
        computed = state.request.num_computed_tokens
        share = max(0.0, 1 - (decision.end - computed) / lost) if lost else 1.0
        replaced = min(1.0, share) * decision.replaced
        self._core.tally.add(metrics.GATE_SECONDS.key("replaced", "predicted"), replaced)

    def lost(self, state: RequestState, load: ActiveLoad) -> None:
        """A load did not arrive: unless it was too slow nothing can be said of what was decided."""
        ruling = state.ruling
        if ruling is None:
            return
        # A load that no thread came to says how long it was queued.
        never_began = load.status is JobStatus.DROPPED and (
            load.seconds > 0.9 * self.deadline(state)
        )
        if load.stale or not (never_began or load.status is JobStatus.LATE):
            state.ruling = None
            return
        ruling.lost = load.tokens
        if never_began:
            self._core.tally.add(metrics.GATE_GIVEN_UP.key("cpu"))
            self.gate.copy.observe(self._bytes(len(load.nodes)), load.seconds, ruling.ahead)

    # -- what came of it -----------------------------------------------------------------

    def _answered(self, ruling: Ruling, now: float) -> None:
        """A request that was decided on has its first token."""
        decision, actual = ruling.decision, now - ruling.began
        self.gate.took(actual)
        if decision.choice is Choice.NONE and decision.total is not None:
            self._count("recompute", decision.total, actual)
        if lost := regret(actual, decision.instead):
            self._core.tally.add(metrics.GATE_REGRET.key(decision.choice.value), lost)

    def _count(self, what: str, predicted: float, actual: float) -> None:
        tally = self._core.tally
        tally.add(metrics.GATE_SECONDS.key(what, "predicted"), predicted)
        tally.add(metrics.GATE_SECONDS.key(what, "actual"), actual)


def _work(
    scheduled: Mapping[str, int], requests: Mapping[str, RequestState], few_tokens: int
) -> Work:
    """What a step computes; called before vLLM counts it as computed."""
    tokens = sum(scheduled.values())
    if max(scheduled.values(), default=0) < few_tokens:
        return Work(tokens)
    attention = 0.0
    for request_id, count in scheduled.items():
        state = requests.get(request_id)
        if state is not None:
            attention += count * (state.request.num_computed_tokens + 0.5 * count)
    return Work(tokens, attention, is_prefill=True)
