# SPDX-License-Identifier: Apache-2.0
"""Checksums of what other engines read: made where it lies, compared where it has arrived.

Of a hand-over one xxh3-128 for each *entry* of the prompt (see `remote.memory`) and each of a
rank's KV heads, over that head's bytes in all of the rank's layers, in the order of its layout;
where heads are not apart from each other in a page, for all of them together. So who reads only
some heads of a rank, or whose pages lie otherwise, can compute the same. Who reads only some of its
layers cannot: engines whose pipeline stages differ so can't verify.

Of a chunk that is read from slot to slot one for each slot, over all that a group has of it.

Bytes are read in host memory, by a thread of a rank's own.
"""

from __future__ import annotations

import ctypes
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from vllm_tiered_kv.log import OncePerKind, get_logger
from vllm_tiered_kv.remote.memory import GroupLayout, SlotLayout, Strip
from vllm_tiered_kv.remote.messages import SUM_BYTES
from vllm_tiered_kv.worker.remote.plan import Places, Refusal, Route

if TYPE_CHECKING:
    from vllm_tiered_kv.remote.transport import Int64s

logger = get_logger(__name__)

MAX_QUEUED = 4096
"""Pieces of work that a rank's thread has not come to."""


class Units(NamedTuple):
    """What each entry has checksums of: `[u, k]` addresses in block 0, of `u` units in `k` layers.

    `strides`, `steps`, `entries` and `nbytes` are `[k]`.
    """

    first: int
    """Which of the rank's units is the first of these."""
    total: int
    """How many the rank has."""
    base: Int64s
    strides: Int64s
    steps: Int64s
    entries: Int64s
    nbytes: Int64s


def own_units(group: GroupLayout) -> Units:
    """All units of a rank's group, where they lie on that rank."""
    strips = _distinct(group)
    total = _count(group, strips)
    sizes = _column([strip.entry_bytes // total for strip in strips])
    starts = _column([strip.address for strip in strips])
    return Units(
        0,
        total,
        starts[None, :] + np.arange(total, dtype=np.int64)[:, None] * sizes[None, :],
        _column([strip.stride for strip in strips]),
        _column([strip.step for strip in strips]),
        _column([strip.entry_bytes for strip in strips]),
        sizes,
    )


def read_units(route: Route, remote: GroupLayout) -> Units:
    """The units that a read along a route brings, where they lie on the rank that reads.

    Args:
        route: how it reads.
        remote: the group on the rank that is read.

    Raises:
        Refusal: it doesn't read whole units.
    """
    strips = _distinct(remote)
    total = _count(remote, strips)
    ranges: set[tuple[int, int]] = set()
    chosen: list[int] = []
    starts: list[int] = []
    for strip in strips:
        inside = (route.remote >= strip.address) & (
            route.remote < strip.address + strip.entry_bytes
        )
        (found,) = np.nonzero(inside)
        unit = strip.entry_bytes // total
        if len(found) != 1:
            raise Refusal(
                "verify: only some layers of a rank are read, whose checksums are over all of them "
                "(the engines' pipeline stages differ)"
            )
        at = int(found[0])
        first, rest = divmod(int(route.remote[at]) - strip.address, unit)
        count, more = divmod(int(route.nbytes[at]), unit)
        if rest or more or not count:
            raise Refusal("verify: a part of a KV head is read")
        ranges.add((first, count))
        chosen.append(at)
        starts.append(unit)
    if len(ranges) != 1:
        raise Refusal("verify: not the same KV heads of all layers are read")
    first, count = ranges.pop()
    sizes = _column(starts)
    base = route.local[chosen][None, :] + np.arange(count, dtype=np.int64)[:, None] * sizes[None, :]
    return Units(
        first,
        total,
        base,
        route.local_stride[chosen],
        route.local_step[chosen],
        route.local_entry[chosen],
        sizes,
    )


def own_slot(slots: SlotLayout, group: GroupLayout) -> Units:
    """All that a group has of a slot, where it lies on the rank itself, as one unit."""
    nothing = _column([0])
    nbytes = _column([group.image_bytes])
    start, stride = _column([slots.address]), _column([slots.slot_bytes])
    return Units(0, 1, start[None, :], stride, nothing, nothing, nbytes)


def read_slot(route: Route) -> Units:
    """The same where a read along :func:`~.plan.plan_slot_routes` brings it."""
    start = route.local[None, :]
    return Units(0, 1, start, route.local_stride, route.local_step, route.local_entry, route.nbytes)


def make_sums(units: Units, places: Places) -> bytes:
    """The checksums of these entries in host memory: entry after entry, in each unit after unit."""
    sums = bytearray()
    lengths = units.nbytes.tolist()
    for i in range(len(places.blocks)):
        shift = units.strides * places.blocks[i]
        shift += units.steps * places.within[i] + units.entries * places.entries[i]
        for addresses in (units.base + shift[None, :]).tolist():
            digest = xxhash.xxh3_128()
            for address, nbytes in zip(addresses, lengths, strict=True):
                digest.update(_type(nbytes).from_address(address))
            sums += digest.digest()
    return bytes(sums)


def are_equal(units: Units, places: Places, sums: bytes, start: int) -> bool:
    """Whether what has arrived is what the producer made checksums of.

    Args:
        units: from :func:`read_units`.
        places: the entries here.
        sums: the producer's, of all of its rank's units, of all entries that it hands over.
        start: which of these entries `places` begins with.
    """
    count = len(places.blocks)
    table = np.frombuffer(sums, dtype=np.uint8)
    width = units.total * SUM_BYTES
    if len(table) % width or (start + count) * width > len(table):
        return False
    first, last = units.first * SUM_BYTES, (units.first + len(units.base)) * SUM_BYTES
    wanted = table.reshape(-1, width)[start : start + count, first:last]
    return make_sums(units, places) == wanted.tobytes()


class Checker:
    """A rank's thread that reads bytes for checksums.

    Args:
        notify: called when some work has ended; on that thread.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._trouble = OncePerKind(logger)
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="tiered-kv-verify", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None]) -> bool:
        """Have something done, which tells its end itself; False if there is too much to do."""
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            return False
        return True

    def close(self, timeout: float) -> bool:
        """End after what is queued; False if that takes longer."""
        try:
            self._queue.put(None, timeout=timeout)
        except queue.Full:
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception:  # noqa: BLE001 - who comes next waits for this thread
                self._trouble.error("internal", "unexpected error in making checksums")
            self._notify()


def _distinct(group: GroupLayout) -> list[Strip]:
    """The layers, those that share memory once."""
    found: dict[int, Strip] = {}
    for strip in group.strips:
        found.setdefault(strip.address, strip)
    return list(found.values())


def _count(group: GroupLayout, strips: Sequence[Strip]) -> int:
    """Units of a rank's group: its heads, where each one's bytes are apart in all layers."""
    heads = group.heads.count
    apart = all(strip.splits and strip.entry_bytes % heads == 0 for strip in strips)
    return heads if apart else 1


def _column(values: Sequence[int]) -> Int64s:
    return np.array(values, dtype=np.int64)


@functools.lru_cache(maxsize=64)
def _type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * nbytes
