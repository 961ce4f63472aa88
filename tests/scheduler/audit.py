# SPDX-License-Identifier: Apache-2.0
"""What must hold after every step, checked against vLLM's state, ours and every byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from tests.scheduler.rank import WrongBytes
from tests.scheduler.tokens import BLOCK, LAYERS, STATE, extend, layer_keys, root_name
from vllm_tiered_kv.scheduler.index import ABSENT, NodeState
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import (
    HEADER_BYTES,
    ChunkId,
    Reason,
    check_header,
    check_payload,
)
from vllm_tiered_kv.tiers.disk.names import chunk_file, rank_folder, shard_folder
from vllm_tiered_kv.tiers.disk.scan import Found, scan_root


class Audit:
    """Checks one engine."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self._seen: dict[Path, tuple[int, int]] = {}
        self.spoilt: set[Path] = set()
        """Files that somebody else has damaged."""
        self._named: dict[str, list[int]] = {}
        self._done: set[str] = set()
        self._blocks: dict[bytes, np.ndarray] = {}
        """For each block hash the names of its tokens' prefixes."""
        self._chunks: dict[bytes, np.ndarray] = {}
        self._chains: dict[bytes, tuple[bytes, ...]] = {}
        """For each block hash those of its prefix, itself the last."""

    def remember(self, other: Audit) -> None:
        """What another engine's hashes stand for: they stand for the same here."""
        self._blocks |= other._blocks
        self._chunks |= other._chunks
        self._chains |= other._chains
        self.spoilt |= other.spoilt

    def names(self, key: bytes, per_chunk: int) -> np.ndarray:
        """What the tokens of a chunk's blocks are named by, `[per_chunk, BLOCK]`."""
        return np.stack([self._blocks[k] for k in self._chains[key][-per_chunk:]])

    def check_files(self, root: Path) -> None:
        """Every file holds what was computed for its key by the weights the engine began with."""
        sim = self._sim
        per_chunk = sim.half.core.geometry.chunk_tokens // BLOCK
        for found in scan_root(Files(), root):
            if not isinstance(found, Found):
                continue
            path = root / found.namespace / rank_folder(found.rank) / shard_folder(found.key)
            path /= chunk_file(found.key, found.group)
            status = path.stat()
            stamp = (status.st_ino, status.st_ctime_ns)
            if self._seen.get(path) == stamp:
                continue
            self._seen[path] = stamp
            data = path.read_bytes()
            state = sim.ranks[0].windows[found.group] == STATE
            nbytes = LAYERS * BLOCK * 8 * (1 if state else per_chunk)
            chunk = ChunkId(found.namespace, found.rank, found.key, found.group)
            header = check_header(memoryview(data), chunk, nbytes)
            payload = memoryview(data)[HEADER_BYTES:]
            if isinstance(header, Reason) or check_payload(payload, nbytes, header) is not None:
                assert path in self.spoilt, f"{path} was not written whole: {header}"
                continue
            self.spoilt.discard(path)
            got = np.frombuffer(payload[:nbytes], dtype=np.int64)
            keys = layer_keys(len(sim.ranks[0].windows), found.rank)[found.group]
            names = self.names(found.key, per_chunk)
            if state:
                want = names[-1][-1] ^ np.repeat(keys[:, None], BLOCK, axis=1)
            else:
                want = names[:, None, :] ^ keys[:, None]
            if not np.array_equal(got, want.reshape(-1)):
                raise WrongBytes(f"file {path}")

    def check(self) -> None:
        """Every stored byte, every byte vLLM would read as cached, and the index."""
        self._name_blocks()
        if self._sim.half is not None:
            self.check_index()
            self.check_tier()
        if self._sim.executed:
            self.check_device()

    def check_tier(self) -> None:
        """Every chunk that may be offered holds what was computed for it, on every rank."""
        sim = self._sim
        per_chunk = sim.half.core.geometry.chunk_tokens // BLOCK
        slots: list[list[int]] = [[] for _ in sim.ranks[0].windows]
        names: list[list[np.ndarray]] = [[] for _ in slots]
        for key, node in sim.half.core.index._nodes.items():
            if node.state is not NodeState.READY:
                continue
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = self.names(key, per_chunk)
            for group, slot in enumerate(node.slots):
                if slot != ABSENT:
                    slots[group].append(slot)
                    names[group].append(chunk)
        for rank in sim.ranks:
            half = rank.tiered._worker
            if half._pool is None:
                continue
            image = half._pool.tensor.numpy().view(np.int64).reshape(half._pool.num_slots, -1)
            for group, stored in enumerate(slots):
                if not stored:
                    continue
                if rank.windows[group] == STATE:
                    ends = np.array([chunk[-1][-1] for chunk in names[group]])
                    got = image[stored, : LAYERS * BLOCK].reshape(-1, LAYERS, BLOCK)
                    want = ends[:, None, None] ^ rank.keys[group][None, :, None]
                    if not np.array_equal(got, np.broadcast_to(want, got.shape)):
                        raise WrongBytes(f"states of group {group}, rank {rank.number}")
                    continue
                got = image[stored, : per_chunk * LAYERS * BLOCK]
                got = got.reshape(-1, per_chunk, LAYERS, BLOCK)
                want = np.stack(names[group])[:, :, None, :] ^ rank.keys[group][:, None]
                if not np.array_equal(got, want):
                    wrong = np.argwhere((got != want).any(axis=(1, 2, 3))).flatten()
                    bad = [stored[i] for i in wrong]
                    raise WrongBytes(f"slots {bad} of group {group}, rank {rank.number}")

    def check_device(self) -> None:
        """Every block in vLLM's prefix cache holds what its hash says, also what was loaded."""
        sim = self._sim
        rows: dict[int, list[tuple[int, np.ndarray]]] = {}
        for block in sim.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is not None:
                group = get_group_id(block.block_hash)
                names = self._blocks[get_block_hash(block.block_hash)]
                if sim.ranks[0].windows[group] == STATE:
                    names = np.repeat(names[-1], BLOCK)
                rows.setdefault(group, []).append((block.block_id, names))
        for rank in sim.ranks:
            pages = rank.memory.numpy()
            for group, cached in rows.items():
                got = pages[:, [block for block, _ in cached]]
                want = (
                    np.stack([names for _, names in cached])[None] ^ rank.keys[group][:, None, None]
                )
                if not np.array_equal(got, want):
                    wrong = np.argwhere((got != want).any(axis=(0, 2))).flatten()
                    bad = [cached[i][0] for i in wrong]
                    raise WrongBytes(f"cached blocks {bad} of group {group}, rank {rank.number}")

    def check_index(self) -> None:
        """No slot is anybody's twice, none is lost, and no count is below zero."""
        index = self._sim.half.core.index
        nodes = {*index._nodes.values(), *index._pinned}
        held = [slot for node in nodes for slot in node.slots if slot != ABSENT]
        held += [slot for node in nodes for slot in node.coming.values()]
        held += [slot for slots in index._late.values() for slot in slots]
        assert len(held) == len(set(held)), "two chunks in one slot"
        assert len(held) == index.used_slots, (len(held), index.used_slots)
        for node in nodes:
            assert node.pins >= 0, "negative pins"
            assert node.children >= 0, "negative children"
            assert (node in index._pinned) == (node.pins > 0)
            assert not index._policy.may_evict(node) or (node.pins == 0 and node.children == 0)
        for key, node in index._nodes.items():
            assert node.state is not NodeState.GONE
            assert node.key == key

    def _name_blocks(self) -> None:
        """Learn what the hashes of the requests' blocks stand for."""
        sim = self._sim
        for request_id in [r for r in sim.requests if r not in self._done]:
            request = sim.requests[request_id]
            names = self._named.setdefault(request_id, [])
            name = names[-1] if names else root_name(sim.salts[request_id])
            hashes = request.block_hashes
            first = len(names) // BLOCK
            for token in request.all_token_ids[len(names) : len(hashes) * BLOCK]:
                name = extend(name, token)
                names.append(name)
            for i in range(first, len(hashes)):
                own = np.array(names[i * BLOCK : (i + 1) * BLOCK], dtype=np.int64)
                self._blocks[hashes[i]] = own
                self._chains[hashes[i]] = tuple(hashes[: i + 1])
            if request.is_finished() and request_id not in sim.scheduler.requests:
                self._done.add(request_id)
