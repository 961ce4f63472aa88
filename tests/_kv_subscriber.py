# SPDX-License-Identifier: Apache-2.0
"""A subscriber to vLLM's KV events that knows nothing else and believes no event unchecked."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"


class Clears(enum.Enum):
    """What ``AllBlocksCleared`` is taken for; routers differ."""

    EVERYTHING = "everything"
    DEVICE = "device"


class Block(msgspec.Struct, frozen=True):
    """What its hash stands for, by all that was ever said of it."""

    token_ids: tuple[int, ...]
    parent: Any
    extra_keys: Any


class Subscriber:
    """Rebuilds from events alone which blocks lie in which medium."""

    def __init__(self, clears: Clears) -> None:
        self._clears = clears
        self._held: dict[tuple[str, int], set[Any]] = defaultdict(set)
        self.known: dict[tuple[int, Any], Block] = {}
        """All blocks ever named, by KV cache group and hash."""
        self.named: dict[str, set[Any]] = defaultdict(set)
        """All hashes ever stored in a medium."""
        self.kinds: dict[int, tuple[str | None, int | None]] = {}
        """``(kind, window)`` of each KV cache group."""
        self.adapters: dict[Any, str | None] = {}
        self.removed = 0
        """Blocks taken back, all media but the device's."""

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                assert event.block_hashes
                self._held[event.medium, event.group_idx].difference_update(event.block_hashes)
                self.removed += len(event.block_hashes) if event.medium != GPU else 0
            elif isinstance(event, AllBlocksCleared):
                for (medium, _), blocks in self._held.items():
                    if medium == GPU or self._clears is Clears.EVERYTHING:
                        blocks.clear()

    def held(self, medium: str, group: int = 0) -> set[Any]:
        """Block hashes that can be read there."""
        return set(self._held[medium, group])

    def prefix(self, block_hash: Any, group: int = 0) -> list[int]:
        """The tokens of the whole prefix that ends with a block."""
        tokens: list[int] = []
        while block_hash is not None:
            block = self.known[group, block_hash]
            tokens[:0] = block.token_ids
            block_hash = block.parent
        return tokens

    def _store(self, event: BlockStored) -> None:
        size = event.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is None or len(event.extra_keys) == len(event.block_hashes)
        kind = (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window)
        assert self.kinds.setdefault(event.group_idx, kind) == kind
        parent = event.parent_block_hash
        for i, block_hash in enumerate(event.block_hashes):
            keys = event.extra_keys[i] if event.extra_keys else None
            tokens = tuple(event.token_ids[i * size : (i + 1) * size])
            block = Block(tokens, parent, tuple(keys) if keys else None)
            # The device's events and each tier's say the same of the same hash.
            assert self.known.setdefault((event.group_idx, block_hash), block) == block
            assert self.adapters.setdefault(block_hash, event.lora_name) == event.lora_name
            self._held[event.medium, event.group_idx].add(block_hash)
            self.named[event.medium].add(block_hash)
            parent = block_hash


class Feed:
    """A publisher's batches over ZeroMQ, none missed: what came before it is replayed.

    Args:
        endpoint: where vLLM publishes.
        replay_endpoint: where it answers to requests for what it has published.
        subscribers: who are told.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, *subscribers: Subscriber) -> None:
        self._subscribers = subscribers
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._replay_socket = self._context.socket(zmq.DEALER)
        self._replay_socket.connect(replay_endpoint)
        self._next = 0
        self.batches = 0
        self.replayed = 0
        self.last: list[Any] = []
        """Events of the last batch."""

    def drain(self) -> None:
        """Take in what has arrived."""
        while self._socket.poll(200):
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            if sequence > self._next:
                self._replay(sequence)
            if sequence == self._next:
                self._take(payload)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _replay(self, stop: int) -> None:
        self._replay_socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        while self._replay_socket.poll(30_000):
            _, _, number, payload = self._replay_socket.recv_multipart()
            sequence = int.from_bytes(number, "big", signed=True)
            if sequence < 0:
                return
            if sequence < stop and sequence == self._next:
                self.replayed += 1
                self._take(payload)
        raise TimeoutError("nothing was replayed")

    def _take(self, payload: bytes) -> None:
        self._next += 1
        self.batches += 1
        self.last = self._decoder.decode(payload).events
        for subscriber in self._subscribers:
            subscriber.apply(self.last)
