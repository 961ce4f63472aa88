# SPDX-License-Identifier: Apache-2.0
"""Other engines as a tier: chunks in their CPU tiers that are read into slots of ours.

Scheduler thread only. Who has what is asked by the agent, which answers with a loan: the peer's
slots, to be read until a deadline. What is read is ordered with the engine's steps; each rank reads
its own part. A read that is given up may still write: its slots are nobody else's until it is known
that it does not, and its loan is given back only then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm_tiered_kv import metrics
from vllm_tiered_kv.protocol import JobStatus, SlotRead, SlotReadEnd
from vllm_tiered_kv.remote.inquiry import Inquiry, InquiryState, Loan
from vllm_tiered_kv.scheduler.reads import SlotReads
from vllm_tiered_kv.tiers.disk.orders import Outcome, ReadOrder

if TYPE_CHECKING:
    from vllm_tiered_kv.remote.agent import RemoteAgent
    from vllm_tiered_kv.remote.handoff import PeerMemory
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.fetch import Fetch
    from vllm_tiered_kv.scheduler.index import Node

HELD_SHARE = 0.5
"""Share of the slots that may be held for look-ups that wait for peers."""
MAX_CLAIMS = 64
"""Questions at once, and loans that are not given back."""
MARGIN = 0.2
"""Seconds before its end from which on nothing is begun under a loan."""
PIECE = 16
"""Chunks in one read: so many are late together."""
_WORSE = (Outcome.DONE, Outcome.DROPPED, Outcome.FAILED)


class Claim:
    """One question, and who needs what was found."""

    __slots__ = ("inquiry", "is_known", "reads", "users")

    def __init__(self, inquiry: Inquiry) -> None:
        self.inquiry = inquiry
        self.users = 0
        """Look-ups that wait for it."""
        self.reads = 0
        """Reads under it that are under way, or may still write."""
        self.is_known = False
        """What was found has been taken in."""

    @property
    def is_asking(self) -> bool:
        return self.inquiry.state is InquiryState.ASKING


class PeerLook:
    """What one request has had asked of other engines."""

    __slots__ = ("asked_at", "claim", "fetch", "over")

    def __init__(self, asked_at: float) -> None:
        self.asked_at = asked_at
        self.claim: Claim | None = None
        self.fetch: Fetch | None = None
        """What is read; it holds pins until it is given up."""
        self.over = False
        """It is not waited for any more."""


class Trial:
    """Chunks that are read to see how long that takes, and not kept."""

    __slots__ = ("ahead", "began", "chunks", "is_over", "seconds")

    def __init__(self, chunks: int, began: float, ahead: int) -> None:
        self.chunks = chunks
        self.began = began
        self.ahead = ahead
        """Chunks that were being read then."""
        self.is_over = False
        self.seconds: float | None = None
        """That it took; None: it failed, or is not over."""


class _Batch:
    """Chunks that are read together."""

    __slots__ = (
        *("began", "claim", "ended", "jobs", "loan", "nbytes", "nodes"),
        *("outcome", "ranks", "seconds", "trial", "unwanted", "writers"),
    )

    def __init__(self, claim: Claim, loan: Loan, jobs: Sequence[int]) -> None:
        self.trial: Trial | None = None
        """It is one."""
        self.claim = claim
        self.loan = loan
        self.jobs = tuple(jobs)
        """One a chunk."""
        self.unwanted: set[int] = set()
        """Those that nobody waits for."""
        self.ranks: set[int] = set()
        """That are done with it."""
        self.writers: set[int] = set()
        """That have given it up, and where it may still write."""
        self.nodes: list[Node] = []
        """Whose slots are pinned for it alone: a trial's, and all while it may still write."""
        self.outcome = Outcome.DONE
        self.began = self.ended = 0.0
        """When it was ordered, and when the last rank had all its bytes, by the ranks' clocks."""
        self.nbytes = 0
        self.seconds = 0.0

    def note(self, rank: int, end: SlotReadEnd) -> None:
        """One rank is done with it."""
        self.ranks.add(rank)
        result = end.result
        outcome = _OUTCOMES[end.status]
        self.outcome = max(self.outcome, outcome, key=_WORSE.index)
        self.ended = max(self.ended, result.ended)
        self.nbytes += result.nbytes
        self.seconds = max(self.seconds, result.seconds)
        if result.may_write:
            self.writers.add(rank)


_OUTCOMES = {
    JobStatus.DONE: Outcome.DONE,
    JobStatus.DROPPED: Outcome.DROPPED,
    JobStatus.FAILED: Outcome.FAILED,
}


class PeerTier:
    """A source of chunks, as :class:`~vllm_tiered_kv.scheduler.reads.SlotReads` sees it.

    Args:
        core: what the scheduler half's parts share.
        agent: asks, and gives back.
        introduce: has the ranks know an engine's memory.
        deadline: seconds a read may take.
    """

    def __init__(
        self,
        core: Core,
        agent: RemoteAgent,
        introduce: Callable[[PeerMemory], None],
        deadline: float,
    ) -> None:
        self._core = core
        self._agent = agent
        self._introduce = introduce
        self._deadline = deadline
        self._asking: dict[bytes, Claim] = {}
        """By the first chunk that is asked for."""
        self._claims: set[Claim] = set()
        self._there: dict[bytes, tuple[Claim, int]] = {}
        """Where a chunk can be read: which of its loan's it is."""
        self._batches: dict[int, _Batch] = {}
        self._batch_of: dict[int, int] = {}
        """By a chunk's job."""
        self._quarantined: dict[int, _Batch] = {}
        self.orders: list[SlotRead] = []
        """For the next plan."""
        self.cancels: list[int] = []
        """For the next plan."""
        most = max(1, int(HELD_SHARE * core.settings.num_slots))
        self.lookups = SlotReads(
            self, core.index, core.geometry, most, core.ledger.number, deadline, PIECE
        )

    @property
    def reads(self) -> int:
        """Chunks being read."""
        return len(self.lookups)

    @property
    def quarantined(self) -> int:
        """Reads that were given up and may still write."""
        return len(self._quarantined)

    # -- questions ---------------------------------------------------------------------

    def is_asked(self, key: bytes) -> bool:
        """Whether there is a question that begins with this chunk."""
        return key in self._asking

    def ask(self, keys: Sequence[bytes], content: bytes) -> Claim | None:
        """Ask who has these chunks; who asks for the same first one meanwhile joins.

        Args:
            keys: head first.
            content: what each key ends with.

        Returns:
            What :meth:`leave` is to be told of; None if nothing can be asked now.
        """
        claim = self._asking.get(keys[0])
        if claim is None:
            if not self._agent.asks or len(self._claims) >= MAX_CLAIMS:
                return None
            claim = self._asking[keys[0]] = Claim(self._agent.ask(keys, content))
            self._claims.add(claim)
        claim.users += 1
        return claim

    def leave(self, claim: Claim) -> None:
        """One who asked wants no more of it."""
        claim.users -= 1
        self._end_if_done(claim)

    def take_in(self, claim: Claim) -> None:
        """What was found can be read from now on."""
        loan = claim.inquiry.loan
        if claim.is_known or loan is None or claim.inquiry.state is not InquiryState.FOUND:
            return
        claim.is_known = True
        if len(loan.slots) != len(self._core.geometry.groups):
            return  # it is not of a peer whose slots are like ours
        for i, key in enumerate(claim.inquiry.keys[: loan.chunks]):
            self._there[key] = (claim, i)

    def _end_if_done(self, claim: Claim) -> None:
        if claim.users or claim.reads or claim not in self._claims:
            return
        self._claims.discard(claim)
        inquiry = claim.inquiry
        if self._asking.get(inquiry.keys[0]) is claim:
            del self._asking[inquiry.keys[0]]
        if claim.is_known:
            for key in inquiry.keys:
                if (found := self._there.get(key)) is not None and found[0] is claim:
                    del self._there[key]
        self._agent.give_back(inquiry)

    # -- a source ----------------------------------------------------------------------

    @property
    def is_readable(self) -> bool:
        return self._agent.asks

    def groups(self, key: bytes) -> int:
        found = self._there.get(key)
        if found is None or not self._agent.asks or self._loan(found[0]) is None:
            return 0
        return self._core.geometry.full_groups

    def masks(self, keys: Sequence[bytes]) -> Iterator[int]:
        return (self.groups(key) for key in keys)

    def _loan(self, claim: Claim) -> Loan | None:
        """What can still be read under it."""
        loan = claim.inquiry.loan
        if loan is None or self._core.clock() >= loan.valid_until - MARGIN:
            return None
        return loan

    def read(self, orders: Sequence[ReadOrder]) -> bool:
        by_claim: dict[Claim, tuple[Loan, list[tuple[ReadOrder, int]]]] = {}
        for order in orders:
            found = self._there.get(order.key)
            loan = self._loan(found[0]) if found is not None else None
            if found is None or loan is None:
                return False
            by_claim.setdefault(found[0], (loan, []))[1].append((order, found[1]))
        for claim, (loan, wanted) in by_claim.items():
            self._order(claim, loan, wanted)
        return True

    def try_out(self, claim: Claim, most: int) -> Trial | None:
        """Read some of what was found into slots that are nobody's chunk.

        Returns:
            What comes of it; None if nothing can be read.
        """
        loan, index = self._loan(claim), self._core.index
        groups = self._core.geometry.group_ids
        if loan is None or len(loan.slots) != len(groups):
            return None
        nodes: list[Node] = []
        while len(nodes) < min(most, loan.chunks):
            node = index.borrow(groups)
            if node is None:
                break
            nodes.append(node)
        if not nodes:
            return None
        trial = Trial(len(nodes), self._core.clock(), self.reads)
        batch = _Batch(claim, loan, ())
        batch.trial, batch.nodes = trial, nodes
        self._send(batch, [node.slots for node in nodes], range(len(nodes)))
        return trial

    def _order(self, claim: Claim, loan: Loan, wanted: Sequence[tuple[ReadOrder, int]]) -> None:
        batch = _Batch(claim, loan, [order.job for order, _ in wanted])
        slots = [{part.group: part.slot for part in order.parts} for order, _ in wanted]
        job = self._send(batch, slots, [i for _, i in wanted])
        self._batch_of.update(dict.fromkeys(batch.jobs, job))

    def _send(
        self, batch: _Batch, slots: Sequence[Sequence[int] | dict[int, int]], of: Sequence[int]
    ) -> int:
        """Have chunks of a loan read into these slots, each by KV cache group."""
        loan, groups = batch.loan, self._core.geometry.group_ids
        self._introduce(loan.memory)
        local = tuple(tuple(slot[group] for slot in slots) for group in groups)
        remote = tuple(tuple(loan.slots[group][i] for i in of) for group in groups)
        job = self._core.ledger.number()
        self._batches[job] = batch
        batch.claim.reads += 1
        batch.began = self._core.clock()
        deadline = min(self._deadline, loan.valid_until - self._core.clock())
        sums = tuple(loan.sums[i] for i in of) if loan.sums else ()
        self.orders.append(SlotRead(job, loan.memory.engine, local, remote, deadline, sums))
        return job

    def cancel(self, jobs: Sequence[int]) -> None:
        for job in jobs:
            number = self._batch_of.get(job)
            batch = self._batches.get(number) if number is not None else None
            if number is None or batch is None:
                continue
            batch.unwanted.add(job)
            if len(batch.unwanted) == len(batch.jobs):
                self._call_off(number, batch)

    def _call_off(self, number: int, batch: _Batch) -> None:
        unsent = [order for order in self.orders if order.job == number]
        if not unsent:
            self.cancels.append(number)
            return
        self.orders.remove(unsent[0])
        batch.outcome = Outcome.DROPPED
        self._ended(number, batch)

    # -- what came of it ---------------------------------------------------------------

    def report(self, rank: int, ends: Sequence[SlotReadEnd], settled: Sequence[int]) -> None:
        """What a rank says of its reads."""
        for end in ends:
            batch = self._batches.get(end.job)
            if batch is None or rank in batch.ranks:
                continue
            batch.note(rank, end)
            if len(batch.ranks) == self._core.settings.world_size:
                self._ended(end.job, batch)
        for job in settled:
            self._settled(rank, job)

    def _ended(self, number: int, batch: _Batch) -> None:
        del self._batches[number]
        outcome, now = batch.outcome, self._core.clock()
        # The ranks' clocks may be another host's: they are good for measuring, if at all.
        ended = batch.ended if batch.began <= batch.ended <= now else now
        if outcome is Outcome.DONE and now > batch.loan.valid_until:
            self._core.fail("remote_lease", "chunks of a peer arrived after their lease was over")
            outcome = Outcome.FAILED
        self._count(batch, outcome)
        trial = batch.trial
        if trial is not None:
            trial.is_over = True
            trial.seconds = ended - trial.began if outcome is Outcome.DONE else None
        if batch.writers:
            self._quarantined[number] = batch
            self._core.fail("remote_quarantine", "a read was given up and may still write")
            for node in [self.lookups.node(job) for job in batch.jobs]:
                self._core.index.pin(node)
                batch.nodes.append(node)
            self.lookups.held += self._slots(batch)
        for job in batch.jobs:
            del self._batch_of[job]
            self.lookups.ended(job, outcome, ended if batch.ended else None)
        if not batch.writers:
            self._release(batch)

    def _settled(self, rank: int, job: int) -> None:
        """On this rank a read can write no more."""
        batch = self._batches.get(job) or self._quarantined.get(job)
        if batch is None:
            return
        batch.writers.discard(rank)
        if not batch.writers and self._quarantined.pop(job, None) is not None:
            self.lookups.held -= self._slots(batch)
            self._release(batch)

    def _slots(self, batch: _Batch) -> int:
        return len(batch.nodes) * len(self._core.geometry.groups)

    def _release(self, batch: _Batch) -> None:
        for node in batch.nodes:
            self._core.index.unpin(node)
        batch.claim.reads -= 1
        self._end_if_done(batch.claim)

    def _count(self, batch: _Batch, outcome: Outcome) -> None:
        tally, chunks = self._core.tally, len(batch.jobs)  # a trial's are not counted
        if outcome is Outcome.DONE:
            tally.add(metrics.BYTES.key("load", metrics.PEER_CPU), batch.nbytes)
            tally.add(metrics.SECONDS.key("load", metrics.PEER_CPU), batch.seconds)
            tally.add(metrics.CHUNKS.key("loaded", metrics.PEER_CPU), chunks)
        elif outcome is Outcome.FAILED:
            tally.add(metrics.CHUNKS.key("failed", metrics.PEER_CPU), chunks)
