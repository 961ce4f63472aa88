# SPDX-License-Identifier: Apache-2.0
"""Other engines, as far as an engine that asks or is asked sees them.

The real protocol's other end, over memory that a test fills, spoils and takes away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import xxhash

from vllm_tiered_kv.remote.agent import GRACE
from vllm_tiered_kv.remote.leases import LeaseTable
from vllm_tiered_kv.remote.loans import ChunkLender
from vllm_tiered_kv.remote.memory import RankLayout
from vllm_tiered_kv.remote.messages import (
    Find,
    Found,
    Hold,
    Identity,
    RankMemory,
    Reason,
    Refused,
    Return,
    decode_answer,
    encode,
)
from vllm_tiered_kv.remote.serving import Server
from vllm_tiered_kv.remote.shelf import Shelf
from vllm_tiered_kv.remote.transport import Endpoint, Region

IDENTITY = Identity("a" * 32, "b" * 32)
LEASE = 30.0
SLOTS = 12
"""Of each of them."""
_names = itertools.count(1)

Image = Callable[[bytes, int, int], "np.ndarray[Any, Any]"]
"""What a chunk's slot holds: by key, rank and KV cache group; int64."""


class StandIn:
    """An engine that lends what it has been given.

    Args:
        layouts: of our ranks; its own lie alike.
        clock: of its leases.
        verify: whether it makes checksums.
    """

    def __init__(
        self, layouts: Sequence[RankLayout], clock: Callable[[], float], *, verify: bool
    ) -> None:
        self.engine = f"{next(_names):032x}"
        self.complaints: list[str] = []
        self.verify = verify
        self.shelf: Shelf[object] = Shelf(SLOTS)
        self.server = Server(
            self.engine,
            len(layouts),
            LeaseTable(LEASE, GRACE, 8),
            clock,
            lambda kind, sentence: self.complaints.append(f"{kind}: {sentence}"),
            ChunkLender(self.shelf, LeaseTable(LEASE, GRACE, 8), clock),
        )
        self.server.identify(IDENTITY)
        self.memory: list[np.ndarray[Any, Any]] = []
        self.endpoints: list[str] = []
        self._bytes: list[list[int]] = []
        """That a group has of a slot, by rank."""
        self._owners: dict[bytes, tuple[object, tuple[int, ...]]] = {}
        self._free = list(range(SLOTS))
        for layout in layouts:
            self._add_rank(layout)
        self.spoil(range(SLOTS))

    def _add_rank(self, layout: RankLayout) -> None:
        slots = layout.slots
        assert slots is not None
        memory = np.zeros((SLOTS, slots.slot_bytes // 8), dtype=np.int64)
        base = memory.ctypes.data
        groups = tuple(
            msgspec.structs.replace(
                group,
                num_blocks=SLOTS,
                strips=tuple(
                    msgspec.structs.replace(strip, address=strip.address - slots.address + base)
                    for strip in group.strips
                ),
            )
            for group in slots.groups
        )
        there = msgspec.structs.replace(slots, address=base, groups=groups)
        endpoint = Endpoint(f"{next(_names):032x}", b"near", (Region(base, memory.nbytes),))
        moved = msgspec.structs.replace(layout, slots=there)
        self.server.remember(RankMemory(layout.rank, endpoint, moved))
        self.memory.append(memory)
        self.endpoints.append(endpoint.incarnation)
        self._bytes.append([group.image_bytes for group in groups])

    @property
    def known(self) -> list[bytes]:
        return list(self._owners)

    def spoil(self, slots: Sequence[int]) -> None:
        """Whatever was there is another chunk's now."""
        for memory in self.memory:
            memory[list(slots)] = -1

    def learn(self, key: bytes, image: Image) -> None:
        """It has this chunk from now on, if there is room."""
        groups = len(self._bytes[0])
        if key in self._owners or len(self._free) < groups:
            return
        slots = tuple(self._free.pop(0) for _ in range(groups))
        sums = b""
        for rank, memory in enumerate(self.memory):
            for group, slot in enumerate(slots):
                held = image(key, rank, group)
                memory[slot, : len(held)] = held
                sums += xxhash.xxh3_128_digest(memory[slot].tobytes()[: self._bytes[rank][group]])
        owner = object()
        self._owners[key] = (owner, slots)
        self.shelf.offer(key, slots, owner, sums if self.verify else b"")

    def forget(self, key: bytes) -> None:
        """It needs the room, unless somebody may be reading the chunk."""
        owner, slots = self._owners[key]
        if self.shelf.lets_go(key, owner):
            del self._owners[key]
            self._free += slots
            self.spoil(slots)

    def damage(self, key: bytes, at: int) -> None:
        """A bit changes in its memory."""
        _, slots = self._owners[key]
        self.memory[at % len(self.memory)][slots[0], at % 32] ^= 1

    def end(self) -> None:
        """The process is gone, and with it its memory."""
        self.spoil(range(SLOTS))


LIES = {
    "slots that it has not": lambda f: _with(f, slots=tuple((SLOTS, *g[1:]) for g in f.slots)),
    "more than it was asked for": lambda f: _with(f, slots=tuple(g * 20 for g in f.slots)),
    "another memory": lambda f: _with(f, generation=f.generation + 1),
    "none": lambda f: _with(f, slots=()),
    "refused": lambda f: Refused(f.number, Reason.LIMIT, "too many"),
    "no question's": lambda f: _with(f, number=f.number + (1 << 40)),
}
"""What any engine may be told, in place of an answer."""
LIES_ABOUT_BYTES = {
    "other slots": lambda f: _with(f, slots=tuple((*g[1:], g[0]) for g in f.slots)),
    "one slot for all": lambda f: _with(f, slots=tuple(g[:1] * len(g) for g in f.slots)),
    "other checksums": lambda f: _with(f, sums=(*f.sums[1:], f.sums[0])),
    "fewer checksums": lambda f: _with(f, sums=f.sums[1:]),
    "no checksums": lambda f: _with(f, sums=()),
    "empty checksums": lambda f: _with(f, sums=(b"",) * len(f.sums)),
}
"""What one that compares may be told."""


def _with(found: Found, **changes: Any) -> Found:
    return msgspec.structs.replace(found, **changes)


class Borrower:
    """An engine that reads chunks of ours: none may change while its lease is good."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[list[bytes], float]] = {}
        self.held: list[tuple[Found, list[bytes], float, str]] = []

    def ask(self, engine: str, wanted: Sequence[bytes], now: float) -> bytes:
        number = next(self._numbers)
        self._asked[number] = (list(wanted), now)
        return encode(Find(number, engine, f"h{number}", b"", tuple(wanted)))

    def hear(self, data: bytes) -> None:
        answer = decode_answer(data)
        wanted, asked_at = self._asked.pop(answer.number)
        if isinstance(answer, Found) and answer.slots:
            until = asked_at + answer.seconds
            self.held.append((answer, wanted, until, f"h{answer.number}"))

    def give_back(self, engine: str, at: int) -> bytes:
        found, _, _, holder = self.held.pop(at % len(self.held))
        return encode(Return(engine, (Hold(found.lease, holder),)))
