# SPDX-License-Identifier: Apache-2.0
"""The gate in the scheduler half: what it is asked for a request, and what it is told of it."""

from __future__ import annotations

import functools
import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import msgspec

from vllm_tiered_kv import metrics
from vllm_tiered_kv.gate import Choice, Decision, Gate, GateMode, Option, Question, Work
from vllm_tiered_kv.gate.choice import ends_to_try, kinks
from vllm_tiered_kv.gate.gate import LEAST_PATIENCE
from vllm_tiered_kv.gate.prefill import FEW_TOKENS
from vllm_tiered_kv.gate.regret import regret
from vllm_tiered_kv.gate.steps import StepClock
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.protocol import JobStatus
from vllm_tiered_kv.scheduler.groups import last_of
from vllm_tiered_kv.scheduler.hit_bytes import HitBytes
from vllm_tiered_kv.scheduler.peer_probe import PeerProbe
from vllm_tiered_kv.scheduler.probe import DiskProbe
from vllm_tiered_kv.scheduler.ruling import Ruling
from vllm_tiered_kv.scheduler.slow import SlowTier

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
"""Chunks loaded at most to see how fast a refused CPU tier is."""
FASTER = 2.0
"""What is on disk is asked of others only if they are so much faster: it costs them something."""
LEAST_COPY_PATIENCE = 0.25
"""Seconds a load may wait at least before its first copy: on a busy machine threads come late."""


_P = ParamSpec("_P")


def _never_fatal(
    method: Callable[Concatenate[RequestGate, _P], None],
) -> Callable[Concatenate[RequestGate, _P], None]:
    """What is only noted must not end an engine: a mistake of ours costs a measurement."""

    @functools.wraps(method)
    def guarded(self: RequestGate, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:  # noqa: BLE001
            self._core.bug("the gate")

    return guarded


class RequestGate:
    """Asks the gate for requests; scheduler thread only."""

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.settings
        self.gate = Gate(settings.token_budget, settings.load_deadline)
        self.steps: StepClock[tuple[RequestState, Ruling]] = StepClock()
        self._pending: dict[str, RequestState] = {}
        """Requests that were decided on and admitted, until their last piece is planned."""
        self._scheduled: Mapping[str, int] = {}
        """What the last step runs."""
        self._gone = 0
        """How many of these have ended since."""
        self._bytes = HitBytes(core.geometry, settings.world_size).of
        self.disk = SlowTier("disk", self.gate.disk, self._disk_reads, self._is_on_disk)
        """The disk tier; nothing is asked of it where there is none."""
        self.disk.probe = DiskProbe(
            core,
            lambda fetch: self.begin(fetch, self.disk),
            lambda fetch: self._learn_read(fetch, self.disk),
        )
        self.peers: SlowTier | None = None
        """Other engines; None where they are not asked."""

    def bind_peers(self, tier: PeerTier) -> None:
        """Other engines can be asked for chunks."""
        slow = self.peers = SlowTier(
            metrics.PEER_CPU, self.gate.peers, lambda: tier.reads, lambda key: tier.groups(key) > 0
        )
        slow.probe = PeerProbe(self._core, tier, self._learn_trial)

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

    @_never_fatal
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
        work = _work(scheduled, requests)
        self.steps.planned(self._core.clock(), work, is_clean=not loads, last=tuple(last))
        self._scheduled, self._gone = scheduled, 0

    @_never_fatal
    def ended(self) -> None:
        """The oldest step's output has been taken in."""
        step = self.steps.ended(now := self._core.clock())
        if step is None:
            return
        if step.is_clean:
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
        now = self.begin(fetch, tier)
        ruling = Ruling(decision, now, self._turn())
        if state.ruling is not None and state.is_reading:
            ruling.began = state.ruling.began  # another source has cost it time already
        ruling.known = usable
        if self.mode(state) is GateMode.MEASURED:
            ruling.predicted_read = self._read_seconds(tier, chunks - usable)
            ruling.give_up_at = now + self._read_patience(tier, ruling)
        state.ruling = ruling
        if tier.probe is not None:
            tier.probe.used()
        return chunks

    def copy_to(self, state: RequestState, first: int, start: int, ends: Sequence[int]) -> int:
        """How many chunks of a run in the CPU tier are worth loading."""
        was_refused = state.ruling is not None and not state.is_reading  # what lies beyond, slowly
        decision = self._ask(state, start, self._options(state, first, ends))
        small = last_of(ends[: bisect_right(ends, TRIED_CHUNKS)])
        if decision.choice is Choice.NONE and not state.is_reading and small:
            question = self._question(state, start, [self._option(first, small)])
            decision = self.gate.explore(decision, question, is_busy=self._is_busy)
        if decision.choice is Choice.ALL and was_refused:
            decision = msgspec.structs.replace(decision, choice=Choice.PART)
        if not state.is_reading or state.ruling is None or state.ruling.admitted is not None:
            state.ruling = Ruling(decision, self._core.clock(), self._turn())
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
        below, above = (
            token // size - first for token in kinks(prompt, self.gate.prefill.budget, size)
        )
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
        return sum(self._bytes(len(load.nodes)) for load in self._core.ledger.loads.values())

    def _reading(self, tier: SlowTier) -> int:
        queued = tier.queued()
        return self._bytes(queued) if queued else 0

    def _disk_reads(self) -> int:
        return self._core.disk.reads if self._core.disk is not None else 0

    def _is_on_disk(self, key: bytes) -> bool:
        disk = self._core.disk
        return disk is not None and disk.agent.groups(key) > 0

    # -- reads ---------------------------------------------------------------------------

    def _read_patience(self, tier: SlowTier, ruling: Ruling) -> float:
        """Seconds in which what is read for a request is not late."""
        if tier.model.is_known:
            return self.gate.patience(ruling.predicted_read)
        replaced = ruling.decision.replaced
        most = self._core.settings.load_deadline
        return most if replaced is None else min(most, max(LEAST_PATIENCE, replaced))

    def still_waits(self, tier: SlowTier, state: RequestState, fetch: Fetch) -> bool:
        """Whether what is read for a request is still worth waiting for."""
        ruling = state.ruling
        if ruling is None or ruling.give_up_at is None:
            return True
        now = self._core.clock()
        if now < ruling.give_up_at:
            return True
        # It is late. What has come by now says how long the rest will take.
        elapsed = now - ruling.began
        total = len(fetch.keys) - ruling.known
        here = sum(not node.is_arriving for node in fetch.nodes) - ruling.known
        left = elapsed * (total - here) / here if here > 0 else float("inf")
        curve = self.gate.curve(is_busy=self._is_busy)
        replaced = ruling.decision.replaced
        if curve is not None and replaced is not None and left < replaced * (total - here) / total:
            ruling.give_up_at = now + self.gate.patience(left / 2)
            return True
        self._core.tally.add(metrics.GATE_GIVEN_UP.key(tier.name))
        nbytes = self._bytes(len(fetch.read))
        seconds = elapsed * total / max(here, 1)
        if seconds > ruling.predicted_read:
            tier.model.observe(nbytes, seconds)
        ruling.give_up_at = None
        return False

    @_never_fatal
    def go_on(self) -> None:
        """Take in what was read in the background; once a step."""
        for tier in (self.disk, self.peers):
            if tier is not None and tier.probe is not None:
                tier.probe.go_on()

    @_never_fatal
    def fetched(self, tier: SlowTier, state: RequestState, fetch: Fetch) -> None:
        """All that was to be read for a request has been."""
        now = self._core.clock()
        ruling = state.ruling
        self._learn_read(fetch, tier)
        if ruling is not None and ruling.give_up_at is not None:
            ruling.give_up_at = None
            if fetch.ended_at is not None:
                tier.model.noticed(now - fetch.ended_at, ruling.turn)

    def begin(self, fetch: Fetch, tier: SlowTier) -> float:
        """A fetch is about to be ordered; returns when."""
        fetch.ahead = tier.queued()
        fetch.ordered_at = now = self._core.clock()
        return now

    def _learn_read(self, fetch: Fetch, tier: SlowTier) -> None:
        """What it took, if it was nobody else's as well."""
        began, ended = fetch.ordered_at, fetch.ended_at
        if began is None or ended is None or fetch.failed or not fetch.arrived:
            return
        tier.model.observe(self._bytes(fetch.arrived), ended - began, self._bytes(fetch.ahead))

    def _learn_trial(self, chunks: int, seconds: float, ahead: int) -> None:
        """What it took to read from peers what nobody wanted."""
        self.gate.peers.observe(self._bytes(chunks), seconds, self._bytes(ahead))

    # -- loads ---------------------------------------------------------------------------

    @_never_fatal
    def admitted(self, state: RequestState, tokens: int) -> None:
        """vLLM admits a request and takes ``tokens`` of what was offered."""
        ruling = state.ruling
        if ruling is None:
            return
        if state.offer is not None and tokens <= 0:
            state.ruling = None  # it takes another connector's
            return
        if ruling.admitted is not None:  # a second time, with its load on the device
            self._resumed(ruling, ruling.admitted)
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
        ruling.admitted = now
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

    @_never_fatal
    def copied(self, load: ActiveLoad) -> None:
        """A load has ended on every rank."""
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

    def _resumed(self, ruling: Ruling, admitted: float) -> None:
        """vLLM goes on with a request whose load is on the device."""
        copied, ruling.copied = ruling.copied, None
        if copied is None:
            return
        now, decision, copy = self._core.clock(), ruling.decision, self.gate.copy
        copy.noticed(now - admitted - copied - copy.queueing(ruling.ahead), ruling.turn)
        if decision.choice is Choice.NONE or decision.replaced is None:
            return
        self._count("load", decision.load, now - ruling.began)
        self._core.tally.add(metrics.GATE_SECONDS.key("replaced", "predicted"), decision.replaced)

    def lost(self, state: RequestState, load: ActiveLoad) -> None:
        """A load did not arrive: unless it was too slow nothing can be said of what was decided."""
        if load.stale or load.status is not JobStatus.LATE:
            state.ruling = None

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


def _work(scheduled: Mapping[str, int], requests: Mapping[str, RequestState]) -> Work:
    """What a step computes; called before vLLM counts it as computed."""
    tokens = sum(scheduled.values())
    if max(scheduled.values(), default=0) < FEW_TOKENS:
        return Work(tokens)
    attention = 0.0
    for request_id, count in scheduled.items():
        state = requests.get(request_id)
        if state is not None:
            attention += count * (state.request.num_computed_tokens + 0.5 * count)
    return Work(tokens, attention, is_prefill=True)
