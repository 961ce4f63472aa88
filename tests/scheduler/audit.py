# SPDX-License-Identifier: Apache-2.0
"""What must hold after every step, checked against vLLM's state, ours and every byte."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

from tests.scheduler.rank import WrongBytes
from tests.scheduler.tokens import BLOCK, LAYERS, STATE, extend, root_name
from vllm_tiered_kv.scheduler.index import ABSENT, NodeState


class Audit:
    """Checks one engine."""

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self._named: dict[str, list[int]] = {}
        self._done: set[str] = set()
        self._blocks: dict[bytes, np.ndarray] = {}
        """For each block hash the names of its tokens' prefixes."""
        self._chunks: dict[bytes, np.ndarray] = {}
        self._chains: dict[bytes, tuple[bytes, ...]] = {}
        """For each block hash those of its prefix, itself the last."""

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
                chunk = np.stack([self._blocks[k] for k in self._chains[key][-per_chunk:]])
                self._chunks[key] = chunk
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
        assert len(held) == len(set(held)), "two chunks in one slot"
        assert len(held) == index.used_slots, (len(held), index.used_slots)
        for node in nodes:
            assert node.pins >= 0, "negative pins"
            assert node.children >= 0, "negative children"
            assert (node in index._pinned) == (node.pins > 0)
            assert node not in index._leaves or (node.pins == 0 and node.children == 0)
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
