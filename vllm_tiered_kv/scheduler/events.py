# SPDX-License-Identifier: Apache-2.0
"""KV events: what becomes readable in a tier and what is forgotten, in vLLM's own words.

One ``BlockStored`` a chunk and KV cache group that has a part, ``BlockRemoved`` for many chunks
together, with the block hashes that vLLM gives its device's events.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv import compat
from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.scheduler.event_log import ChunkFacts, RemovedPart, StoredChunk, TierLog
from vllm_tiered_kv.scheduler.index import Node

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import EventGroup, EventMedium, Request


class EventConverter:
    """Describes chunks, and turns the descriptions into events: no state.

    Args:
        geometry: the cut.
        groups: how events name each KV cache group's kind.
    """

    def __init__(self, geometry: Geometry, groups: Sequence[EventGroup]) -> None:
        self._geometry = geometry
        self._groups = tuple(groups)
        self._block_sizes = {group.block_tokens for group in geometry.groups}

    def facts(self, request: Request, chunk: int) -> ChunkFacts:
        """Describe one full chunk of a request."""
        geometry = self._geometry
        count = geometry.hashes_per_chunk
        start = chunk * geometry.chunk_tokens
        end = start + geometry.chunk_tokens
        hashes = request.block_hashes
        return ChunkFacts(
            tuple(hashes[chunk * count : (chunk + 1) * count]),
            hashes[chunk * count - 1] if chunk else None,
            tuple(request.all_token_ids[start:end]),
            {
                size: compat.event_extra_keys(request, range(start, end, size), size)
                for size in self._block_sizes
            },
            *compat.event_origin(request),
        )

    def stored(self, chunk: StoredChunk, medium: EventMedium) -> list[Any]:
        """One event for each group that has a part."""
        groups = (g for g in self._geometry.group_ids if chunk.groups >> g & 1)
        return [self._stored(chunk.facts, group, medium) for group in groups]

    def _stored(self, facts: ChunkFacts, group: int, medium: EventMedium) -> Any:
        block_tokens = self._geometry.groups[group].block_tokens
        names = self._names(facts.hashes, group)
        kept = self._geometry.kept_blocks(group)  # the last ones
        extra_keys = facts.extra_keys[block_tokens]
        return compat.block_stored(
            block_hashes=names[-kept:],
            parent=names[-kept - 1] if kept < len(names) else facts.parent,
            token_ids=facts.token_ids[-kept * block_tokens :],
            block_tokens=block_tokens,
            extra_keys=extra_keys and extra_keys[-kept:],
            origin=(facts.lora_id, facts.lora_name, facts.session_id),
            group_id=group,
            group=self._groups[group],
            medium=medium,
        )

    def removed(self, parts: Sequence[RemovedPart], medium: EventMedium) -> list[Any]:
        """One event for each group of which something is gone."""
        by_group: dict[int, list[bytes]] = {}
        for part in parts:
            names = self._names(part.hashes, part.group)
            shared = part.kept * len(names) // len(part.hashes)
            first = max(shared, len(names) - self._geometry.kept_blocks(part.group))
            by_group.setdefault(part.group, []).extend(names[first:])
        return [
            compat.block_removed(hashes, group, medium)
            for group, hashes in by_group.items()
            if hashes
        ]

    def _names(self, hashes: tuple[bytes, ...], group: int) -> tuple[bytes, ...]:
        """The blocks' hashes: a block as large as several hashed ones has that of the last."""
        step = self._geometry.groups[group].block_tokens // self._geometry.hash_tokens
        return hashes[step - 1 :: step]


class TierEvents:
    """Publishes one tier.

    Args:
        converter: shared by the tiers.
        medium: the name by which subscribers know the tier.
        num_slots: slots of the tier.
        fail: counts a failure by kind and says it once.
        bug: notes an exception that is our own mistake.
    """

    def __init__(
        self,
        converter: EventConverter,
        medium: EventMedium,
        num_slots: int,
        fail: Callable[[str, str], None],
        bug: Callable[[str], None],
    ) -> None:
        self._converter = converter
        self._medium = medium
        self._fail = fail
        self._bug = bug
        self.log = TierLog(num_slots, self._dropped)

    def storing(self, key: bytes, request: Request, chunk: int) -> None:
        """A chunk is being stored; it is announced when it can be read."""
        if (facts := self._facts(request, chunk)) is not None:
            self.log.planned(key, facts)

    def used(self, node: Node, request: Request, chunk: int) -> None:
        """A chunk that is in the index is in use: announce it if subscribers lack it."""
        if not self.log.is_known(node) and (facts := self._facts(request, chunk)) is not None:
            self.log.announce(node, facts)

    def there(self, key: bytes, groups: int, request: Request, chunk: int) -> None:
        """These parts of a chunk in use can be read: announce it if subscribers lack it."""
        if not self.log.knows(key, groups) and (facts := self._facts(request, chunk)) is not None:
            self.log.queue(key, groups, facts)

    def take(self) -> list[Any]:
        """The next events, oldest first; empty when all has been said."""
        piece = self.log.take()
        events = self._converter.removed(piece.removed, self._medium) if piece.removed else []
        for chunk in piece.stored:
            events += self._converter.stored(chunk, self._medium)
        return events

    def _facts(self, request: Request, chunk: int) -> ChunkFacts | None:
        try:
            return self._converter.facts(request, chunk)
        except Exception:  # noqa: BLE001 - the store goes on without its event
            self._bug("describing a chunk for KV events")
            return None

    def _dropped(self) -> None:
        self._fail(
            "kv_events",
            "chunks are stored faster than KV events are published; some are announced only "
            "when they are next used",
        )
