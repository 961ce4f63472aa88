# SPDX-License-Identifier: Apache-2.0
"""What those who follow KV events have been told of one tier, and what they must still be told.

The index of the CPU tier says by its nodes what becomes readable and what is forgotten, the disk
tier by keys; :meth:`TierLog.take` hands out the difference in bounded pieces. Nothing here knows
the format in which it is published.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from vllm_tiered_kv.bits import bits_of
from vllm_tiered_kv.scheduler.index import Node, NodeState
from vllm_tiered_kv.scheduler.shared_heads import SharedHeads

MAX_WAITING = 8192
"""Chunks stored but not yet published; also how many more chunks than the tier has slots
subscribers may be told to hold before those that are gone have been taken back."""
MAX_STORED_EVENTS = 512
"""Events of stored chunks in one piece: subscribers bound a batch's events and its bytes."""
MAX_STORED_TOKENS = 1 << 18
"""Tokens named in one piece."""
MAX_REMOVED_HASHES = 1024
"""Block hashes taken back in one piece."""


class ChunkFacts(msgspec.Struct, frozen=True):
    """What can be said of a chunk while its request is there."""

    hashes: tuple[bytes, ...]
    """Of its blocks, as fine as vLLM hashes; the chunk's key begins with the last one."""
    parent: bytes | None
    """The hash before the first one; None at the start of a prompt."""
    token_ids: tuple[int, ...]
    extra_keys: dict[int, Any]
    """By tokens a block: what beside tokens went into each block's hash."""
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None


class StoredChunk(msgspec.Struct, frozen=True):
    """A chunk that has become readable."""

    facts: ChunkFacts
    groups: int
    """Bit ``g``: KV cache group ``g`` has its part."""


class RemovedPart(msgspec.Struct, frozen=True):
    """One group's part of a chunk that can no longer be read."""

    hashes: tuple[bytes, ...]
    group: int
    kept: int = 0
    """So many of ``hashes``, from the head, belong to another chunk as well that is still there."""


class Piece(msgspec.Struct, frozen=True):
    """What is published next, the removals first."""

    removed: list[RemovedPart]
    stored: list[StoredChunk]


class _Told(msgspec.Struct, frozen=True, gc=False):
    """What was published of one chunk: enough to take it back."""

    epoch: int
    """The reset count of the tier; an older one: gone, and to be taken back."""
    generation: int
    """The reset count of the device; an older one: subscribers may have forgotten it."""
    groups: int
    hashes: tuple[bytes, ...]


class TierLog:
    """Follows one tier's index. Scheduler thread only; every call costs the chunks it names.

    Args:
        num_slots: slots of the tier.
        dropped: called when a stored chunk could not be queued. It is announced when it is
            next used.
    """

    def __init__(
        self,
        num_slots: int,
        dropped: Callable[[], None],
        *,
        max_waiting: int = MAX_WAITING,
        max_stored_events: int = MAX_STORED_EVENTS,
        max_removed_hashes: int = MAX_REMOVED_HASHES,
    ) -> None:
        self._dropped = dropped
        self._max_waiting = max_waiting
        self._max_told = num_slots + max_waiting
        self._max_stored_events = max_stored_events
        self._max_removed_hashes = max_removed_hashes
        self._epoch = 0
        self._generation = 0
        self._planned: dict[bytes, ChunkFacts] = {}  # being stored
        self._waiting: OrderedDict[bytes, StoredChunk] = OrderedDict()
        self._told: OrderedDict[bytes, _Told] = OrderedDict()  # those of an old epoch come first
        self._leaving: dict[bytes, _Told] = {}  # forgotten one by one, to be taken back
        self._shared = SharedHeads()  # of all in _told that are not alone

    @property
    def told(self) -> Collection[bytes]:
        """Keys of the chunks that subscribers were told of, and that were not taken back."""
        return self._told.keys()

    def __len__(self) -> int:
        """Chunks of which something is still to be published, or will be when a store ends."""
        return len(self._planned) + len(self._waiting) + len(self._leaving)

    # -- what the index says, by its nodes -------------------------------------------------

    def stored(self, node: Node) -> None:
        facts = self._planned.get(node.key)
        if not node.coming:  # else more is to come
            self._planned.pop(node.key, None)
        if facts is not None and not self.is_known(node):
            self.announce(node, facts)

    def removed(self, node: Node) -> None:
        self._planned.pop(node.key, None)
        self.reduced(node.key, 0)

    def cleared(self) -> None:
        """All is forgotten at once; it is taken back piece by piece."""
        self._epoch += 1
        self._planned = {}
        self._waiting.clear()

    def is_known(self, node: Node) -> bool:
        """Whether nothing is to be said of a chunk that is in use."""
        return node.state is not NodeState.READY or self.knows(node.key, node.parts)

    def announce(self, node: Node, facts: ChunkFacts) -> None:
        """Queue a chunk that is READY."""
        self.queue(node.key, node.parts, facts)

    # -- the same by keys ------------------------------------------------------------------

    def planned(self, key: bytes, facts: ChunkFacts) -> None:
        """A chunk is being stored."""
        self._planned[key] = facts

    def ended(self, key: bytes, groups: int) -> None:
        """The storing of a chunk has ended; bit ``g``: group ``g``'s part can be read now."""
        facts = self._planned.pop(key, None)
        if facts is not None and not self.knows(key, groups):
            self.queue(key, groups, facts)

    def reduced(self, key: bytes, groups: int) -> None:
        """Parts of a chunk may be gone: these are left."""
        if (waiting := self._waiting.get(key)) is not None and waiting.groups & ~groups:
            if left := waiting.groups & groups:
                self._waiting[key] = StoredChunk(waiting.facts, left)
            else:
                del self._waiting[key]
        told = self._told.get(key)
        if told is None or not (lost := told.groups & ~groups):
            return
        self._untell(key)
        self._leave(key, told, lost)
        if (left := told.groups & groups) and told.epoch == self._epoch:
            self._hold(key, _Told(told.epoch, told.generation, left, told.hashes))
        elif left:
            self._leave(key, told, left)

    def knows(self, key: bytes, groups: int) -> bool:
        """Whether nothing is to be said of a chunk of which these parts can be read."""
        if not groups:
            return True
        if (waiting := self._waiting.get(key)) is not None:
            return waiting.groups == groups
        told = self._told.get(key)
        if told is None or told.groups != groups:
            return False
        return told.epoch == self._epoch and told.generation == self._generation

    def queue(self, key: bytes, groups: int, facts: ChunkFacts) -> None:
        """Say of a chunk what of it can be read."""
        held = len(self._told) + len(self._leaving)
        full = len(self._waiting) >= self._max_waiting and key not in self._waiting
        if full or held >= self._max_told:
            self._dropped()
            return
        self._waiting[key] = StoredChunk(facts, groups)

    def oldest(self, count: int) -> list[bytes]:
        """Keys of chunks that were told; who asks again is given others, and all in turn."""
        if self._told and next(iter(self._told.values())).epoch != self._epoch:
            return []  # those go without a word, and must stay first
        keys = list(itertools.islice(self._told, count))
        for key in keys:
            self._told.move_to_end(key)
        return keys

    def device_cleared(self) -> None:
        """vLLM has said that all blocks are cleared, which some take for every medium.

        What was told before is told again when it is next used.
        """
        self._generation += 1

    # -- what is published -------------------------------------------------------------

    def take(self) -> Piece:
        """The next piece; empty when all has been said."""
        return Piece(self._take_removed(), self._take_stored())

    def _take_removed(self) -> list[RemovedPart]:
        removed: list[RemovedPart] = []
        room = self._max_removed_hashes
        while room > 0:
            if self._leaving:
                key, gone = self._leaving.popitem()
            elif self._told and next(iter(self._told.values())).epoch != self._epoch:
                key, gone = self._told.popitem(last=False)
                if not _is_alone(key, gone.hashes):
                    self._shared.remove(gone.hashes, gone.groups)
            else:
                break
            for group in bits_of(gone.groups):
                room -= len(gone.hashes)
                alone = _is_alone(key, gone.hashes)
                kept = 0 if alone else self._shared.kept(gone.hashes, group)
                removed.append(RemovedPart(gone.hashes, group, kept))
        return removed

    def _take_stored(self) -> list[StoredChunk]:
        stored: list[StoredChunk] = []
        events, tokens = self._max_stored_events, MAX_STORED_TOKENS
        while self._waiting and events > 0 and tokens > 0:
            key, chunk = self._waiting.popitem(last=False)
            events -= chunk.groups.bit_count()
            tokens -= chunk.groups.bit_count() * len(chunk.facts.token_ids)
            self._tell(key, chunk)
            stored.append(chunk)
        return stored

    def _tell(self, key: bytes, chunk: StoredChunk) -> None:
        # What was told of it before holds on, but for groups that have no part this time.
        for old in (self._untell(key), self._leaving.pop(key, None)):
            if old is not None and (gone := old.groups & ~chunk.groups):
                self._leave(key, old, gone)
        told = _Told(self._epoch, self._generation, chunk.groups, chunk.facts.hashes)
        self._hold(key, told)

    def _hold(self, key: bytes, told: _Told) -> None:
        self._told[key] = told
        if not _is_alone(key, told.hashes):
            self._shared.add(told.hashes, told.groups)

    def _untell(self, key: bytes) -> _Told | None:
        told = self._told.pop(key, None)
        if told is not None and not _is_alone(key, told.hashes):
            self._shared.remove(told.hashes, told.groups)
        return told

    def _leave(self, key: bytes, told: _Told, groups: int) -> None:
        if (leaving := self._leaving.get(key)) is not None:
            groups |= leaving.groups
        self._leaving[key] = _Told(told.epoch, told.generation, groups, told.hashes)


def _is_alone(key: bytes, hashes: tuple[bytes, ...]) -> bool:
    """Whether no other chunk can hold one of these blocks.

    Not so with an adapter: other weights of its name and path leave chunks of the same hashes.
    """
    return len(hashes) == 1 and hashes[0] == key
