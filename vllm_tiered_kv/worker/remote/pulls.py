# SPDX-License-Identifier: Apache-2.0
"""One rank's pulls: a peer's pages into ours, by whatever transport there is.

Engine thread only. What is read from which of the peer's ranks is planned here; reads, and when
their memory is free, are the puller's.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from vllm_tiered_kv.geometry import GroupGeometry
from vllm_tiered_kv.protocol import JobResult, JobStatus, PullJob, PullResult, SlotRead
from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.memory import GroupLayout, Heads, Place, RankLayout, Strip
from vllm_tiered_kv.remote.messages import SUM_BYTES
from vllm_tiered_kv.remote.transport import (
    Endpoint,
    Fence,
    Memory,
    MemoryKind,
    Outcome,
    Region,
    Transport,
)
from vllm_tiered_kv.worker.remote.checksums import (
    Checker,
    Units,
    are_equal,
    read_slot,
    read_units,
)
from vllm_tiered_kv.worker.remote.layout import OwnSlots, page_strips, slot_layout
from vllm_tiered_kv.worker.remote.plan import (
    GroupRoutes,
    OutOfRange,
    Places,
    Refusal,
    Runs,
    in_slots,
    place_entries,
    plan_read,
    plan_routes,
    plan_slot_routes,
    plan_slots,
    whole_slots,
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

    def __init__(
        self,
        endpoints: dict[int, str],
        layouts: dict[int, RankLayout],
        routes: dict[Place, tuple[GroupRoutes, ...]],
        slot_routes: tuple[GroupRoutes, ...],
    ) -> None:
        self.endpoints = endpoints
        """By rank, the name that the transport knows it by."""
        self.layouts = layouts
        """By rank."""
        self.routes = routes
        """By where it is read from."""
        self.slot_routes = slot_routes
        """From slots into slots; none where they are not laid out alike."""

    def groups(self, rank: int, place: Place) -> tuple[GroupLayout, ...]:
        """How a rank's groups lie there."""
        layout = self.layouts[rank]
        return (layout if place is Place.PAGES else in_slots(layout)).groups


class _Check(NamedTuple):
    """What is to be compared when a pull has arrived."""

    units: Units
    places: Places
    sums: bytes
    start: int
    """Which of the entries that were handed over the places begin with."""


class _Plan(NamedTuple):
    """A pull, read by read."""

    parts: list[Part]
    checks: list[_Check]


class Pulls:
    """Starts and ends one rank's pulls.

    Args:
        layout: how our pages lie.
        transport: moves the bytes.
        checker: compares checksums of what has arrived.
        fail: takes each kind of failure, and a sentence.
        clock: seconds, monotonic; the one that the transport's deadlines are in.
    """

    def __init__(
        self,
        layout: RankLayout,
        transport: Transport,
        checker: Checker,
        fail: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.layout = layout
        self._transport = transport
        self._checker = checker
        self._fail = fail
        self._clock = clock
        self._puller = Puller(transport)
        self._peers: dict[str, _Peer] = {}
        self._refused: list[int] = []
        """Pulls that were not begun, and are not told of yet."""
        self._checks: dict[int, list[_Check]] = {}
        """By job, of pulls that have not arrived."""
        self._checked: deque[tuple[int, bool, PullResult]] = deque()
        """Pulls that have been compared, and whether they are what was handed over."""

    @property
    def endpoint(self) -> Endpoint | None:
        """How peers can read this rank; None where they can't."""
        return self._transport.export()

    # -- peers -------------------------------------------------------------------------

    def meet(self, memory: PeerMemory) -> None:
        """From now on this engine can be read from, if it can."""
        try:
            peer = self._peer(memory)
        except Refusal as error:
            self._fail("remote_pages", f"a peer's pages cannot be read: {error}")
            return
        except Exception as error:  # noqa: BLE001 - whatever a peer says of its memory
            self._fail("internal", f"what a peer says of its memory makes no sense: {error!r}")
            return
        old = self._peers.get(memory.engine)
        for each in memory.ranks:
            if each.rank in peer.endpoints:
                self._transport.connect(each.endpoint)
        self._peers[memory.engine] = peer
        if old is not None:
            self._disconnect(set(old.endpoints.values()) - set(peer.endpoints.values()))

    def _peer(self, memory: PeerMemory) -> _Peer:
        """How it is read from.

        Raises:
            Refusal: its pages can't be read.
        """
        layouts = {rank.rank: rank.layout for rank in memory.ranks}
        routes = {Place.PAGES: plan_routes(self.layout, list(layouts.values()))}
        if all(layout.slots is not None for layout in layouts.values()):
            slots = [in_slots(layout) for layout in layouts.values()]
            routes[Place.SLOTS] = plan_routes(self.layout, slots)
        slot_routes = self._slot_routes(memory)
        wanted = {
            route.rank for group in (*routes[Place.PAGES], *slot_routes) for route in group.routes
        }
        names = {m.rank: m.endpoint.incarnation for m in memory.ranks if m.rank in wanted}
        return _Peer(names, layouts, routes, slot_routes)

    def _slot_routes(self, memory: PeerMemory) -> tuple[GroupRoutes, ...]:
        try:
            return plan_slot_routes(self.layout, [rank.layout for rank in memory.ranks])
        except Refusal:  # said where it was asked whether its chunks can be read
            return ()

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
        plan = _Plan([], [])
        try:
            plan = self._plan(order)
        except OutOfRange as error:
            self._fail("remote_range", f"a pull is not begun: {error}")
        except Refusal as error:
            self._fail("remote_verify", f"a pull is not begun: {error}")
        except Exception as error:  # noqa: BLE001 - it would end the engine
            self._fail("internal", f"a pull is not begun: {error!r}")
        if not plan.parts:
            self._refused.append(job)
            return
        if plan.checks:
            self._checks[job] = plan.checks
        self._puller.start(job, plan.parts, self._clock() + order.deadline, after)

    def start_slots(self, order: SlotRead) -> None:
        """Begin to read slots into slots; :meth:`take` tells its end as that of a pull."""
        parts: list[Part] = []
        try:
            parts = self._plan_slots(order)
        except OutOfRange as error:
            self._fail("remote_range", f"slots of a peer are not read: {error}")
        except Exception as error:  # noqa: BLE001 - it would end the engine
            self._fail("internal", f"slots of a peer are not read: {error!r}")
        if not parts:
            self._refused.append(order.job)
            return
        self._puller.start(order.job, parts, self._clock() + order.deadline)

    def _plan_slots(self, order: SlotRead) -> list[Part]:
        """What is read from whom.

        Raises:
            OutOfRange: slots that a side does not have.
        """
        peer = self._peers.get(order.engine)
        if peer is None or not peer.slot_routes:
            self._fail("remote_peer", "slots are not read: that peer's are not known")
            return []
        by_rank = plan_slots(peer.slot_routes, order.local, order.remote)
        if order.sums and by_rank:
            self._checks[order.job] = _slot_checks(peer.slot_routes, order)
        return [Part(peer.endpoints[rank], _joined(runs)) for rank, runs in by_rank.items()]

    def cancel(self, jobs: Sequence[int]) -> None:
        """Give these up; those that have ended are passed over."""
        self._puller.cancel(jobs)

    def _plan(self, order: PullJob) -> _Plan:
        """What is read from whom.

        Raises:
            OutOfRange: blocks that a side does not have.
            Refusal: what is read can't be compared with the producer's checksums.
        """
        peer = self._peers.get(order.engine)
        if peer is None:
            self._fail("remote_peer", "a pull is not begun: that peer's memory is not known")
            return _Plan([], [])
        all_routes = peer.routes.get(order.place, ())
        if {len(order.local), len(order.remote), len(order.skips)} != {len(all_routes)}:
            raise OutOfRange("another number of KV cache groups")
        by_rank: dict[int, list[Runs]] = {}
        checks: list[_Check] = []
        for g, routes in enumerate(all_routes):
            ours, theirs = _places(routes, order.local[g], order.remote[g], order.skips[g])
            for runs in plan_read(routes, ours, theirs):
                by_rank.setdefault(runs.rank, []).append(runs)
            for route in routes.routes if order.sums else ():
                units = read_units(route, peer.groups(route.rank, order.place)[g])
                sums = _sums(order, route.rank, g)
                first = order.skips[g] // routes.remote.entry_tokens
                checks.append(_Check(units, ours, sums, first))
        parts = [Part(peer.endpoints[rank], _joined(runs)) for rank, runs in by_rank.items()]
        return _Plan(parts, checks)

    def take(self) -> list[tuple[int, JobStatus, PullResult]]:
        """Pulls that have ended since the last call; each once."""
        refused, self._refused = self._refused, []
        ended = self._puller.poll()
        told_of: Counter[str] = Counter()
        now = self._clock()  # not before: who stood still in between may look at late bytes
        nothing = PullResult(0, 0.0, now, may_write=False)
        told = [(job, JobStatus.FAILED, nothing) for job in refused]
        told += self._take_checked()
        for result in ended:
            checks = self._checks.pop(result.pull, None)
            if result.kind:  # none where it was called off
                told_of[result.kind] += 1
                self._fail(result.kind, f"a pull did not arrive: {result.reason}")
            may_write = result.memory is Memory.QUARANTINED
            part = PullResult(result.nbytes, result.seconds, now, may_write)
            if checks is not None and result.outcome is Outcome.DONE:
                self._compare(result.pull, checks, part)
                continue
            told.append((result.pull, _STATUS[result.outcome], part))
        others = Counter(self._transport.take_counts()) - told_of
        for kind in others.elements():  # that ended no pull, or more than one part of it
            self._fail(kind, "see the transport's own words above")
        return told

    def _compare(self, job: int, checks: Sequence[_Check], part: PullResult) -> None:
        """Have what has arrived compared; told of by :meth:`_take_checked`."""

        def compare() -> None:
            good = False
            try:
                good = all(are_equal(*check) for check in checks)
            finally:
                known = msgspec.structs.replace(part, ended=self._clock())
                self._checked.append((job, good, known))

        if not self._checker.submit(compare):
            self._checked.append((job, False, part))

    def _take_checked(self) -> list[tuple[int, JobStatus, PullResult]]:
        told = []
        while self._checked:
            job, good, part = self._checked.popleft()
            if not good:
                self._fail("remote_verify", "what has arrived is not what the peer had")
            told.append((job, JobStatus.DONE if good else JobStatus.FAILED, part))
        return told

    def settled(self) -> list[int]:
        """Pulls told of as given up that can write no more; each once."""
        return self._puller.settled()

    def close(self, timeout: float) -> bool:
        """End everything; False if something may still write or read our memory."""
        return self._transport.close(timeout)


def _places(
    routes: GroupRoutes, local: Sequence[int], remote: Sequence[int], skip: int
) -> tuple[Places, Places]:
    """The entries of our blocks, and those of the peer's that belong there.

    Args:
        skip: tokens at the head of the peer's that are not read.

    Raises:
        OutOfRange: the peer's are too few.
    """
    ours, theirs = routes.local, routes.remote
    skipped = skip // theirs.entry_tokens
    there = len(remote) * theirs.per_slot * theirs.entries - skipped
    count = min(len(local) * ours.entries, there)
    if count <= (len(local) - 1) * ours.entries:
        raise OutOfRange(f"{there} entries for {len(local)} blocks of {ours.entries}")
    return (
        place_entries(np.array(local, dtype=np.int64), ours.entries, 0, count),
        place_entries(
            np.array(remote, dtype=np.int64), theirs.entries, skipped, count, theirs.per_slot
        ),
    )


def _sums(order: PullJob, rank: int, group: int) -> bytes:
    """The checksums of a rank; empty, which nothing is equal to, where there are none."""
    groups = order.sums[rank] if rank < len(order.sums) else ()
    return groups[group] if group < len(groups) else b""


def _slot_checks(routes: Sequence[GroupRoutes], order: SlotRead) -> list[_Check]:
    """What is to be compared when slots have arrived."""
    checks = []
    for g, group in enumerate(routes):
        places = whole_slots(np.array(order.local[g], dtype=np.int64))
        for route in group.routes:
            at = (route.rank * len(routes) + g) * SUM_BYTES
            sums = b"".join([chunk[at : at + SUM_BYTES] for chunk in order.sums])
            checks.append(_Check(read_slot(route), places, sums, 0))
    return checks


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
    slots: OwnSlots | None = None,
) -> RankLayout:
    """How this rank's pages and slots lie, for peers and for ourselves.

    Raises:
        LayoutError: a slot doesn't hold what the pages do.
    """
    found = tuple(
        GroupLayout(contents, group.block_tokens // entries, entries, own.num_blocks, mine, strips)
        for group, mine, strips, entries in zip(groups, heads, own.strips, own.entries, strict=True)
    )
    return RankLayout(rank, found, slot_layout(found, slots) if slots is not None else None)


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
