# SPDX-License-Identifier: Apache-2.0
"""One rank's pulls: a peer's pages into ours, by whatever transport there is.

Engine thread only. What is read from which of the peer's ranks is planned here; reads, and when
their memory is free, are the puller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from vllm_tiered_kv.geometry import GroupGeometry
from vllm_tiered_kv.protocol import JobResult, JobStatus, PullJob, PullResult
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, RankLayout, Strip
from vllm_tiered_kv.remote.transport import (
    Endpoint,
    Fence,
    Memory,
    MemoryKind,
    Outcome,
    Region,
    Transport,
)
from vllm_tiered_kv.worker.remote.layout import page_strips
from vllm_tiered_kv.worker.remote.plan import (
    GroupRoutes,
    OutOfRange,
    Places,
    Refusal,
    Runs,
    place_entries,
    plan_read,
    plan_routes,
)
from vllm_tiered_kv.worker.remote.puller import Part, Puller

_WORSE = (JobStatus.DONE, JobStatus.LATE, JobStatus.DROPPED, JobStatus.FAILED)
_STATUS = {
    Outcome.DONE: JobStatus.DONE,
    Outcome.FAILED: JobStatus.FAILED,
    Outcome.GIVEN_UP: JobStatus.DROPPED,
}


class _Peer:
    """A producer whose memory is known."""

    def __init__(self, endpoints: dict[int, str], routes: tuple[GroupRoutes, ...]) -> None:
        self.endpoints = endpoints
        """By rank, the name that the transport knows it by."""
        self.routes = routes


class Pulls:
    """Starts and ends one rank's pulls.

    Args:
        layout: how our pages lie.
        transport: moves the bytes.
        fail: takes each kind of failure, and a sentence.
        clock: seconds, monotonic; the one that the transport's deadlines are in.
    """

    def __init__(
        self,
        layout: RankLayout,
        transport: Transport,
        fail: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._transport = transport
        self._fail = fail
        self._clock = clock
        self._puller = Puller(transport)
        self._peers: dict[str, _Peer] = {}
        self._refused: list[int] = []
        """Pulls that were not begun, and are not told of yet."""

    @property
    def endpoint(self) -> Endpoint | None:
        """How peers can read this rank; None where they can't."""
        return self._transport.export()

    # -- peers -------------------------------------------------------------------------

    def meet(self, memory: PeerMemory) -> None:
        """From now on this engine can be read from, if it can."""
        try:
            routes = plan_routes(self.layout, [rank.layout for rank in memory.ranks])
        except Refusal as error:
            self._fail("remote_pages", f"a peer's pages cannot be read: {error}")
            return
        wanted = {route.rank for group in routes for route in group.routes}
        endpoints = {m.rank: m.endpoint for m in memory.ranks if m.rank in wanted}
        old = self._peers.get(memory.engine)
        for endpoint in endpoints.values():
            self._transport.connect(endpoint)
        names = {rank: endpoint.incarnation for rank, endpoint in endpoints.items()}
        self._peers[memory.engine] = _Peer(names, routes)
        if old is not None:
            self._disconnect(set(old.endpoints.values()) - set(names.values()))

    def part(self, engine: str) -> None:
        """This engine is not read from any more."""
        peer = self._peers.pop(engine, None)
        if peer is not None:
            self._disconnect(set(peer.endpoints.values()))

    def _disconnect(self, names: set[str]) -> None:
        for name in names:
            self._transport.disconnect(name)

    # -- pulls -------------------------------------------------------------------------

    def start(self, job: int, order: PullJob, after: Fence | None = None) -> None:
        """Begin a pull; :meth:`take` tells its end."""
        try:
            parts = self._plan(order)
        except OutOfRange as error:
            self._fail("remote_range", f"a pull is not begun: {error}")
            parts = []
        if not parts:
            self._refused.append(job)
            return
        self._puller.start(job, parts, self._clock() + order.deadline, after)

    def _plan(self, order: PullJob) -> list[Part]:
        """What is read from whom.

        Raises:
            OutOfRange: blocks that a side does not have.
        """
        peer = self._peers.get(order.engine)
        if peer is None:
            self._fail("remote_peer", "a pull is not begun: that peer's memory is not known")
            return []
        if len(order.local) != len(peer.routes) or len(order.remote) != len(peer.routes):
            raise OutOfRange("another number of KV cache groups")
        by_rank: dict[int, list[Runs]] = {}
        for routes, local, remote in zip(peer.routes, order.local, order.remote, strict=True):
            ours, theirs = (
                _places(routes.local.entries, local),
                _places(routes.remote.entries, remote),
            )
            for runs in plan_read(routes, ours, theirs):
                by_rank.setdefault(runs.rank, []).append(runs)
        return [Part(peer.endpoints[rank], _joined(runs)) for rank, runs in by_rank.items()]

    def take(self) -> list[tuple[int, JobStatus, PullResult]]:
        """Pulls that have ended since the last call; each once."""
        now = self._clock()
        refused, self._refused = self._refused, []
        nothing = PullResult(0, 0.0, now, may_write=False)
        told = [(job, JobStatus.FAILED, nothing) for job in refused]
        for result in self._puller.poll():
            if result.outcome is not Outcome.DONE:
                self._fail(result.kind or "remote_peer", f"a pull did not arrive: {result.reason}")
            may_write = result.memory is Memory.QUARANTINED
            part = PullResult(result.nbytes, result.seconds, now, may_write)
            told.append((result.pull, _STATUS[result.outcome], part))
        return told

    def settled(self) -> list[int]:
        """Pulls told of as given up that can write no more; each once."""
        return self._puller.settled()

    def close(self, timeout: float) -> bool:
        """End everything; False if something may still write or read our memory."""
        return self._transport.close(timeout)


def _places(entries: int, blocks: Sequence[int]) -> Places:
    return place_entries(np.array(blocks, dtype=np.int64), entries, 0, len(blocks) * entries)


def _joined(runs: Sequence[Runs]) -> Runs:
    if len(runs) == 1:
        return runs[0]
    return Runs(
        runs[0].rank,
        np.concatenate([each.local for each in runs]),
        np.concatenate([each.remote for each in runs]),
        np.concatenate([each.nbytes for each in runs]),
    )


def both(first: JobResult, second: JobResult) -> JobResult:
    """The end of a load that copied from slots and pulled from a peer."""
    pulled, copied = (first, second) if first.pulled is not None else (second, first)
    worse = max((copied.status, pulled.status), key=_WORSE.index)
    return msgspec.structs.replace(copied, status=worse, pulled=pulled.pulled)


class OwnPages(NamedTuple):
    """This rank's pages, as peers see them."""

    strips: tuple[tuple[Strip, ...], ...]
    """By KV cache group."""
    entries: tuple[int, ...]
    """Of a block, by group."""
    regions: tuple[Region, ...]
    num_blocks: int


def own_pages(
    tensors: Mapping[str, torch.Tensor],
    group_layers: Sequence[Sequence[str]],
    num_blocks: int,
    heads: Sequence[Heads],
) -> OwnPages:
    """Where this rank's pages are; no tensor is kept.

    Args:
        tensors: by layer name, as vLLM registers them.
        group_layers: the layer names of each group.
        num_blocks: device blocks.
        heads: KV heads of this rank, by group.

    Raises:
        LayoutError: pages that are not one run of bytes.
    """
    strips: list[tuple[Strip, ...]] = []
    entries: list[int] = []
    for layers, mine in zip(group_layers, heads, strict=True):
        here = {name: tensors[name] for name in layers if name in tensors}
        found = page_strips(here, num_blocks, mine.count) if here else ((), 1)
        strips.append(found[0])
        entries.append(found[1])
    regions = regions_of(list(tensors.values()))
    return OwnPages(tuple(strips), tuple(entries), tuple(regions), num_blocks)


def rank_layout(
    rank: int,
    groups: Sequence[GroupGeometry],
    heads: Sequence[Heads],
    own: OwnPages,
    contents: str,
) -> RankLayout:
    """How this rank's pages lie, for peers and for ourselves."""
    found = [
        GroupLayout(contents, group.block_tokens // entries, entries, own.num_blocks, mine, strips)
        for group, mine, strips, entries in zip(groups, heads, own.strips, own.entries, strict=True)
    ]
    return RankLayout(rank, tuple(found))


def regions_of(tensors: Sequence[torch.Tensor]) -> list[Region]:
    """The memory that these tensors lie in: one region an allocation."""
    found: dict[int, Region] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        kind = MemoryKind.VRAM if tensor.is_cuda else MemoryKind.DRAM
        device = tensor.device.index or 0 if tensor.is_cuda else 0
        base = storage.data_ptr()
        found.setdefault(base, Region(base, storage.nbytes(), kind, device))
    return list(found.values())
