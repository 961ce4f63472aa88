# SPDX-License-Identifier: Apache-2.0
"""The scheduler half's side of hand-overs between engines, both ways.

Scheduler thread only; the control channel is the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_tiered_kv import metrics
from vllm_tiered_kv.params import ParamsError
from vllm_tiered_kv.protocol import RemoteSetup, SlotRead, SlotSumJob, SumJob, WorkerReport
from vllm_tiered_kv.remote.params import Wish, parse_remote, refusal
from vllm_tiered_kv.scheduler.disk import Since
from vllm_tiered_kv.scheduler.handing import Handed, HandingOptions, HandOvers
from vllm_tiered_kv.scheduler.peers import PeerTier
from vllm_tiered_kv.scheduler.pulls import Pulls
from vllm_tiered_kv.scheduler.shelf_sums import ShelfSums
from vllm_tiered_kv.scheduler.shelving import Shelving

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import BlockPool
    from vllm_tiered_kv.remote.agent import RemoteAgent
    from vllm_tiered_kv.remote.handoff import PeerMemory
    from vllm_tiered_kv.scheduler.core import Core
    from vllm_tiered_kv.scheduler.requests import RequestState
    from vllm_tiered_kv.scheduler.stores import StorePlanner

NOT_HANDED = Handed(refusal(), waits=False)
_SWAPPED = "are the router's addresses of prefill and decode engines swapped?"
ASKED_TO_SEND = (
    "a router asks this engine to hand a prompt over, and its kv_role is kv_consumer; nothing is "
    f"handed over: {_SWAPPED}"
)
ASKED_TO_RECEIVE = (
    "a router asks this engine to go on from what another one hands over, and its kv_role is "
    f"kv_producer; the prompt is computed: {_SWAPPED}"
)
HANDED_WITHOUT_REMOTE = (
    "a router asks this engine to go on from what another one hands over, and it has no option "
    "remote; the prompt is computed"
)
TRUSTED_NO_MORE = "its caches were reset, perhaps for new weights, which are not looked at again"


class RemoteParts(NamedTuple):
    """What hand-overs need."""

    agent: RemoteAgent
    host: str
    """The address that peers reach this engine at."""
    engine_id: str
    """vLLM's name of this engine."""
    tensor_parallel: int
    deadline: float
    """Seconds a read from a peer may take."""
    contents: str
    """A digest of what the bytes in a page mean, KV heads apart."""
    handing: HandingOptions = HandingOptions()


class RemoteNews(NamedTuple):
    """What the ranks are told with a step, in the order of `StepPlan`."""

    peers: tuple[PeerMemory, ...] = ()
    gone: tuple[str, ...] = ()
    sums: tuple[SumJob, ...] = ()
    sent: tuple[str, ...] = ()
    reads: tuple[SlotRead, ...] = ()
    uncalled: tuple[int, ...] = ()
    slot_sums: tuple[SlotSumJob, ...] = ()


class RemotePlanner:
    """What is handed over and what is pulled.

    Args:
        core: what the scheduler half's parts share.
        stores: copies out of the device.
        parts: what hand-overs need.
    """

    def __init__(self, core: Core, stores: StorePlanner, parts: RemoteParts) -> None:
        self._core = core
        self.agent = parts.agent
        self.handing = HandOvers(
            core, parts.agent, stores, parts.engine_id, parts.tensor_parallel, parts.handing
        )
        self.pulls = Pulls(core, parts.agent, parts.deadline, verify=parts.handing.verify)
        settings = parts.agent.settings
        self.shelving: Shelving | None = None
        """What peers may read of the CPU tier; None where nothing is lent."""
        if parts.agent.shelf is not None:
            groups, number = len(core.geometry.groups), core.ledger.number
            ranks = core.settings.world_size
            sums = ShelfSums(ranks, groups, number) if parts.handing.verify else None
            self.shelving = Shelving(parts.agent.shelf, core.index, sums)
        self.peers: PeerTier | None = None
        """Other engines as a tier; None where they are not asked."""
        if settings.peers:
            self.peers = PeerTier(core, parts.agent, self.pulls.introduce, parts.deadline)
        self.setup = RemoteSetup(
            parts.host,
            settings.sends or self.shelving is not None,
            settings.receives or self.peers is not None,
            parts.contents,
        )

    def bind(self, pool: BlockPool) -> None:
        self.handing.bind(pool)
        self.pulls.bind(pool)

    def arrived(self, state: RequestState) -> None:
        """A request is new."""
        try:
            state.remote = parse_remote(state.request.kv_transfer_params, state.params)
        except ParamsError as error:
            self._core.fail("remote_params", f"ignored: {error}")
            return
        settings = self.agent.settings
        if state.remote.wish is Wish.SEND and not settings.sends:
            self._core.fail("remote_role", ASKED_TO_SEND)
        elif state.remote.wish is Wish.RECEIVE and not settings.receives:
            self._core.fail("remote_role", ASKED_TO_RECEIVE)
        self.pulls.arrived(state)

    def planned(
        self, state: RequestState, computed: int, tables: Callable[[], Sequence[Sequence[int]]]
    ) -> None:
        """A step is planned, with which so many of the request's tokens are computed."""
        if state.remote.wish is not Wish.SEND:
            return
        try:
            self.handing.planned(state, computed, tables)
        except Exception:  # noqa: BLE001 - it would end the engine
            self._core.bug("getting a prompt ready to be handed over")

    def preempted(self, states: Iterable[RequestState]) -> None:
        """These requests have lost their blocks."""
        for state in states:
            self.handing.preempted(state)

    def finished(self, state: RequestState, block_ids: Sequence[Sequence[int]]) -> Handed | None:
        """A request ends: what another engine goes on from, where it asked."""
        if state.remote.wish is not Wish.SEND:
            return None
        if not self.agent.settings.sends:
            return NOT_HANDED
        try:
            return self.handing.finished(state, block_ids) or NOT_HANDED
        except Exception:  # noqa: BLE001 - it would end the engine
            self._core.bug("handing a prompt over")
            return NOT_HANDED

    def take_in(self) -> None:
        """Take in what the agent has to say; at the start of every hook."""
        self.handing.confirm()
        self.handing.take_in()
        self.pulls.take_in()
        if self.shelving is not None:
            self.shelving.take_in()
        for kind in self.agent.take_failures():
            self._core.tally.add(metrics.FAILURES.key(kind))

    def report(self, report: WorkerReport) -> None:
        """What a rank says."""
        if report.layout is not None:
            self.agent.remember(report.layout, report.endpoint)
        if report.settled:
            self.pulls.settled(report.rank, report.settled)
        if self.peers is not None and (report.reads or report.settled):
            self.peers.report(report.rank, report.reads, report.settled)
        for sums in report.sums:
            self.handing.readying.summed(report.rank, sums.number, sums.groups)
        if self.shelving is not None:
            for sums in report.slot_sums:
                self.shelving.made(report.rank, sums)

    def take_news(self) -> RemoteNews:
        """What the ranks are to be told with this step; once."""
        pulls, handing, peers = self.pulls, self.handing, self.peers
        sums = handing.readying.sums
        orders, cancels = (peers.orders, peers.cancels) if peers is not None else ([], [])
        shelving = self.shelving if self.agent.lends else None  # before, no rank would do it
        slot_sums = shelving.take_orders() if shelving is not None else ()
        told = RemoteNews(
            tuple(pulls.peers),
            tuple(pulls.gone),
            tuple(sums),
            tuple(handing.sent),
            tuple(orders),
            tuple(cancels),
            tuple(slot_sums),
        )
        for each in (pulls.peers, pulls.gone, sums, handing.sent, orders, cancels):
            each.clear()
        return told

    def forget(self, since: Since) -> None:
        """Offer nothing of what was computed, and accept nothing that was."""
        if since is Since.EVER:
            if self.shelving is not None:
                self.shelving.close()
            self.agent.close(TRUSTED_NO_MORE)
        else:
            self.agent.revoke()

    def gauges(self) -> dict[str, float]:
        peers, quarantined = {}, 0
        if self.peers is not None:
            peers[metrics.IN_FLIGHT.key("peer_read")] = float(self.peers.reads)
            quarantined = self.peers.quarantined
        if self.shelving is not None:
            peers[metrics.IN_FLIGHT.key("lent")] = float(self.shelving.lent_slots)
            peers[metrics.IN_FLIGHT.key("sum")] = float(self.shelving.summing)
        return {
            metrics.IN_FLIGHT.key("lease"): float(len(self.handing)),
            metrics.IN_FLIGHT.key("quarantine"): float(self.pulls.quarantined + quarantined),
            **peers,
        }

    def shutdown(self) -> None:
        self.agent.shutdown()
