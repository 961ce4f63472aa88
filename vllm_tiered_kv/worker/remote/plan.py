# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which rank a read takes: pure arithmetic on layouts and block numbers.

Whole entries where producer and consumer divide the KV heads alike, runs of whole heads where they
don't. What can't be read so is refused with a sentence, at the handshake. A producer's pages and
slots can be read into pages; slots into slots only as a whole, where both are laid out alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_tiered_kv.remote.memory import GroupLayout, RankLayout, SlotLayout, Strip

if TYPE_CHECKING:
    from vllm_tiered_kv.remote.transport import Int64s


class Refusal(ValueError):
    """KV can't be read between these engines; a sentence that says why."""


class OutOfRange(ValueError):
    """Blocks that a side doesn't have."""


class Places(NamedTuple):
    """Entries in the order of the prompt, int64 `[n]` each."""

    blocks: Int64s
    """Block numbers, or slot numbers."""
    within: Int64s
    """Which of the slot's blocks; 0 in the KV cache."""
    entries: Int64s
    """Which of the block's entries."""


class Route(NamedTuple):
    """What one rank reads from another of one group, for every entry; int64 `[k]`, or numbers.

    `local` and `remote` are addresses of block 0's first entry, with the head's place added.
    Strides and steps are those of the strips.
    """

    rank: int
    local: Int64s
    local_stride: Int64s
    local_step: Int64s
    local_entry: Int64s
    remote: Int64s
    remote_stride: Int64s
    remote_step: Int64s
    remote_entry: Int64s
    nbytes: Int64s
    by_entry: bool
    """Neighbours in memory are the layers of an entry rather than a layer's blocks."""


class GroupRoutes(NamedTuple):
    """How one group is read."""

    local: GroupLayout
    remote: GroupLayout
    """One of the producer's; what matters here is the same on all."""
    routes: tuple[Route, ...]


class Runs(NamedTuple):
    """What to read from one rank; int64 `[n]` each. See `transport.Read`."""

    rank: int
    local: Int64s
    remote: Int64s
    nbytes: Int64s


def plan_routes(local: RankLayout, remote: Sequence[RankLayout]) -> tuple[GroupRoutes, ...]:
    """How this rank reads each group from a producer's ranks.

    Where several ranks hold the same heads, this rank's number chooses among them, so that
    consumers spread.

    Raises:
        Refusal: it can't.
    """
    counts = {len(rank.groups) for rank in remote} | {len(local.groups)}
    if len(counts) != 1:
        raise Refusal(f"the engines divide their layers into {sorted(counts)} KV cache groups")
    return tuple(
        _group_routes(local.rank, group, [(rank.rank, rank.groups[g]) for rank in remote])
        for g, group in enumerate(local.groups)
    )


def in_slots(rank: RankLayout) -> RankLayout:
    """The rank's groups as they lie in its slots, for :func:`plan_routes`.

    Raises:
        Refusal: its slots can't be read.
    """
    return RankLayout(rank.rank, _slots(rank).groups)


def plan_slot_routes(local: RankLayout, remote: Sequence[RankLayout]) -> tuple[GroupRoutes, ...]:
    """How this rank reads whole slots into its own; see :func:`whole_slots`.

    Raises:
        Refusal: it can't: slots are only copied between ranks that lay them out alike.
    """
    ours = _slots(local)
    theirs = [(rank.rank, _slots(rank)) for rank in remote]
    return tuple(_slot_routes(local.rank, g, ours, theirs) for g in range(len(ours.groups)))


def place_entries(
    blocks: Int64s, entries: int, first: int, count: int, per_slot: int = 1
) -> Places:
    """Entries `first` to `first + count` of a table.

    Args:
        blocks: the table, in the order of the prompt: block numbers, or slot numbers.
        entries: of a block.
        per_slot: blocks of a slot.

    Raises:
        OutOfRange: the table is too short.
    """
    if first < 0 or count < 0 or first + count > len(blocks) * per_slot * entries:
        raise OutOfRange(
            f"entries {first} to {first + count} of {len(blocks) * per_slot * entries}"
        )
    index = np.arange(first, first + count, dtype=np.int64)
    block = index // entries
    return Places(blocks[block // per_slot], block % per_slot, index % entries)


def check_places(places: Places, group: GroupLayout) -> None:
    """See that a group has all of these.

    Raises:
        OutOfRange: a block doesn't exist.
    """
    if len(places.blocks) and not (
        places.blocks.min() >= 0
        and places.blocks.max() < group.num_blocks
        and places.within.min() >= 0
        and places.within.max() < group.per_slot
    ):
        raise OutOfRange(f"a block is not one of {group.num_blocks}")


def whole_slots(slots: Int64s) -> Places:
    """Slots for a read along :func:`plan_slot_routes`."""
    nothing = np.zeros(len(slots), dtype=np.int64)
    return Places(slots, nothing, nothing)


def plan_slots(
    routes: Sequence[GroupRoutes], local: Sequence[Sequence[int]], remote: Sequence[Sequence[int]]
) -> dict[int, list[Runs]]:
    """The runs that copy whole slots, by the rank that they are read from.

    Args:
        routes: by KV cache group, see :func:`plan_slot_routes`.
        local: slots that are written, by group.
        remote: those they are read from, as many.

    Raises:
        OutOfRange: slots that a side doesn't have, or other groups.
    """
    if not len(local) == len(remote) == len(routes):
        raise OutOfRange(f"{len(remote)} groups for {len(local)} of {len(routes)}")
    by_rank: dict[int, list[Runs]] = {}
    for group, ours, theirs in zip(routes, local, remote, strict=True):
        here = whole_slots(np.array(ours, dtype=np.int64))
        there = whole_slots(np.array(theirs, dtype=np.int64))
        for runs in plan_read(group, here, there):
            by_rank.setdefault(runs.rank, []).append(runs)
    return by_rank


def plan_read(routes: GroupRoutes, local: Places, remote: Places) -> list[Runs]:
    """The runs that copy the producer's entries `remote` to ours at `local`, by rank.

    Raises:
        OutOfRange: a block doesn't exist, or the two sides differ in length.
    """
    if len(local.blocks) != len(remote.blocks):
        raise OutOfRange(f"{len(remote.blocks)} entries for {len(local.blocks)} places")
    check_places(local, routes.local)
    check_places(remote, routes.remote)
    return [_runs(route, local, remote) for route in routes.routes if len(local.blocks)]


def _runs(route: Route, local: Places, remote: Places) -> Runs:
    here = _addresses(route.local, route.local_stride, route.local_step, route.local_entry, local)
    there = _addresses(
        route.remote, route.remote_stride, route.remote_step, route.remote_entry, remote
    )
    nbytes = np.broadcast_to(route.nbytes[:, None], here.shape)
    if route.by_entry:
        here, there, nbytes = here.T, there.T, nbytes.T
    return Runs(route.rank, here.ravel(), there.ravel(), nbytes.ravel())


def _addresses(base: Int64s, stride: Int64s, step: Int64s, entry: Int64s, places: Places) -> Int64s:
    """Addresses `[k, n]`."""
    addresses: Int64s = base[:, None] + stride[:, None] * places.blocks[None, :]
    addresses += step[:, None] * places.within[None, :]
    addresses += entry[:, None] * places.entries[None, :]
    return addresses


def _slots(rank: RankLayout) -> SlotLayout:
    if rank.slots is None:
        raise Refusal(f"rank {rank.rank} has no slots that could be read")
    return rank.slots


def _slots_differ(ours: SlotLayout, theirs: SlotLayout, group: int) -> str | None:
    """Why the bytes of two slots do not mean the same; None if they do."""
    if len(ours.groups) != len(theirs.groups):
        return f"they have {len(theirs.groups)} and {len(ours.groups)} KV cache groups"
    here, there = ours.groups[group], theirs.groups[group]
    if there.contents != here.contents:
        return "attention backend, cache dtype, head size or instruction set differ"
    if there.entry_tokens * there.entries != here.entry_tokens * here.entries:
        return (
            f"blocks have {there.entry_tokens * there.entries} tokens there and "
            f"{here.entry_tokens * here.entries} here"
        )
    if there.per_slot != here.per_slot:
        return f"chunks have {there.per_slot} blocks there and {here.per_slot} here"
    if there.heads != here.heads:
        return (
            f"no rank there has just the KV heads from {here.heads.first} to "
            f"{here.heads.first + here.heads.count - 1} of {here.heads.total} (parallelism differs)"
        )
    if _image(theirs, there) != _image(ours, here):
        return "other layers, or layers in another order, are in a slot"
    return None


def _image(slots: SlotLayout, layout: GroupLayout) -> object:
    """Where each layer's bytes are in a slot."""
    strips = [(s.layer, s.address - slots.address, s.step, s.entry_bytes) for s in layout.strips]
    return layout.entries, sorted(strips)


def _slot_routes(
    rank: int, group: int, ours: SlotLayout, theirs: Sequence[tuple[int, SlotLayout]]
) -> GroupRoutes:
    layout = ours.groups[group]
    if not layout.strips:
        return GroupRoutes(layout, layout, ())  # other pipeline stages have all its layers
    reasons = [_slots_differ(ours, slots, group) for _, slots in theirs]
    alike = [each for each, reason in zip(theirs, reasons, strict=True) if reason is None]
    if not alike:
        why = next(iter(reasons), "there is none")
        raise Refusal(f"the slots of the two engines are laid out otherwise: {why}")
    source, slots = alike[rank % len(alike)]
    nothing = np.zeros(1, dtype=np.int64)
    route = Route(
        source,
        np.array([ours.address], dtype=np.int64),
        np.array([ours.slot_bytes], dtype=np.int64),
        nothing,
        nothing,
        np.array([slots.address], dtype=np.int64),
        np.array([slots.slot_bytes], dtype=np.int64),
        nothing,
        nothing,
        np.array([layout.image_bytes], dtype=np.int64),
        by_entry=False,
    )
    return GroupRoutes(layout, slots.groups[group], (route,))


class _Piece(NamedTuple):
    """A run of heads of one layer."""

    local: Strip
    remote: Strip
    local_offset: int
    remote_offset: int
    nbytes: int


def _group_routes(
    rank: int, local: GroupLayout, remote: Sequence[tuple[int, GroupLayout]]
) -> GroupRoutes:
    for _, group in remote:
        _check(local, group)
    chosen: defaultdict[int, list[_Piece]] = defaultdict(list)
    seen: set[int] = set()
    holders = _holders(remote)
    for strip in local.strips:
        if strip.address in seen:
            continue  # another layer's name for the same memory
        seen.add(strip.address)
        for source, piece in _pieces(rank, local, strip, holders.get(strip.layer, ())):
            chosen[source].append(piece)
    routes = tuple(_route(source, chosen[source]) for source in sorted(chosen))
    return GroupRoutes(local, remote[0][1] if remote else local, routes)


def _check(local: GroupLayout, remote: GroupLayout) -> None:
    if remote.contents != local.contents:
        raise Refusal(
            "the bytes of a page mean something else in the two engines (attention backend, "
            "cache dtype, head size or the processor's instruction set)"
        )
    if remote.entry_tokens != local.entry_tokens:
        raise Refusal(
            f"blocks of {remote.entry_tokens} and of {local.entry_tokens} tokens can't be made of "
            "each other without looking into a page; give both engines the same block size"
        )
    if remote.heads.total != local.heads.total:
        raise Refusal(f"{remote.heads.total} KV heads there, and {local.heads.total} here")


_Holders = Mapping[str, Sequence[tuple[int, GroupLayout, Strip]]]


def _holders(remote: Sequence[tuple[int, GroupLayout]]) -> _Holders:
    """The ranks that have a layer."""
    holders = defaultdict(list)
    for rank, group in remote:
        for strip in group.strips:
            holders[strip.layer].append((rank, group, strip))
    return holders


def _pieces(
    rank: int,
    local: GroupLayout,
    strip: Strip,
    holders: Sequence[tuple[int, GroupLayout, Strip]],
) -> list[tuple[int, _Piece]]:
    """Where one layer's heads come from."""
    alike = [holder for holder in holders if holder[1].heads == local.heads]
    if alike:
        source, _, there = alike[rank % len(alike)]
        if there.entry_bytes != strip.entry_bytes:
            raise Refusal(
                f"a page of {strip.layer} has {there.entry_bytes} bytes there and "
                f"{strip.entry_bytes} here"
            )
        return [(source, _Piece(strip, there, 0, 0, strip.entry_bytes))]
    pieces: list[tuple[int, _Piece]] = []
    first, end = local.heads.first, local.heads.first + local.heads.count
    while first < end:
        having = [
            holder
            for holder in holders
            if holder[1].heads.first <= first < holder[1].heads.first + holder[1].heads.count
        ]
        if not having:
            raise Refusal(f"no rank there has KV head {first} of {strip.layer}")
        source, group, there = having[rank % len(having)]
        last = min(end, group.heads.first + group.heads.count)
        pieces.append((source, _cut(local, strip, group, there, first, last)))
        first = last
    return pieces


def _cut(
    local: GroupLayout, strip: Strip, remote: GroupLayout, there: Strip, first: int, last: int
) -> _Piece:
    """Heads `first` to `last` of one layer."""
    if not strip.splits or not there.splits:
        raise Refusal(
            f"the KV heads of {strip.layer} are not apart from each other in its pages, so engines "
            "with different tensor parallelism can't read each other's; use a layout with heads "
            "outermost (LBHNC or BLHNC), or the same tensor parallelism"
        )
    head = strip.entry_bytes // local.heads.count
    if head * local.heads.count != strip.entry_bytes or head * remote.heads.count != (
        there.entry_bytes
    ):
        raise Refusal(f"a KV head of {strip.layer} differs in size between the engines")
    return _Piece(
        strip,
        there,
        (first - local.heads.first) * head,
        (first - remote.heads.first) * head,
        (last - first) * head,
    )


def _route(rank: int, pieces: Sequence[_Piece]) -> Route:
    def column(values: list[int]) -> Int64s:
        return np.array(values, dtype=np.int64)

    return Route(
        rank,
        column([p.local.address + p.local_offset for p in pieces]),
        column([p.local.stride for p in pieces]),
        column([p.local.step for p in pieces]),
        column([p.local.entry_bytes for p in pieces]),
        column([p.remote.address + p.remote_offset for p in pieces]),
        column([p.remote.stride for p in pieces]),
        column([p.remote.step for p in pieces]),
        column([p.remote.entry_bytes for p in pieces]),
        column([p.nbytes for p in pieces]),
        _is_by_entry(pieces),
    )


def _is_by_entry(pieces: Sequence[_Piece]) -> bool:
    """Whether the first two layers' bytes follow each other within a block, on both sides."""
    if len(pieces) < 2:
        return False
    first, second = pieces[:2]
    return (
        first.local.address + first.local_offset + first.nbytes
        == second.local.address + second.local_offset
        and first.remote.address + first.remote_offset + first.nbytes
        == second.remote.address + second.remote_offset
    )
