# SPDX-License-Identifier: Apache-2.0
"""The two tiers of a replay: the real index over slots without bytes, and a disk of entries."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tiered_kv.policies import Eviction, EvictionPolicy, Item, make_policy
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.scheduler.index import ChunkIndex, Node, NodeState, chunk_policy

_GROUPS = (0,)


class CpuTier:
    """:class:`ChunkIndex`, in which what is stored is there at once.

    Args:
        blocks: its slots.
        eviction: its policy.
        block_tokens: tokens of a block.
    """

    def __init__(self, blocks: int, eviction: Eviction, block_tokens: int) -> None:
        self.index = ChunkIndex(blocks, 1, policy=chunk_policy(eviction), chunk_tokens=block_tokens)

    def __contains__(self, key: bytes) -> bool:
        return self.index.get(key) is not None

    def take_in(self, keys: Sequence[bytes]) -> int:
        """Use the chunks of a prefix and store those that are missing; how many are here then."""
        index = self.index
        run = index.ready_run(keys, 0)
        if run:
            index.touch(run)
        parent: Node | None = run[-1] if run else None
        for i in range(len(run), len(keys)):
            if parent is not None and parent.state is NodeState.GONE:
                return i
            node = index.get(keys[i])
            if node is not None:
                index.adopt(node, parent)
                index.touch((node,))
            else:
                node = index.reserve(keys[i], parent, _GROUPS)
                if node is None:
                    return i
                index.commit(node)
                index.unpin(node)
            parent = node
        return len(keys)


class DiskTier:
    """Entries with bytes and positions, whose parents nobody knows.

    Args:
        nbytes: its capacity.
        block_bytes: of an entry.
        block_tokens: of an entry.
        eviction: its policy.
        admission: what is written.
    """

    def __init__(
        self,
        nbytes: int,
        block_bytes: int,
        block_tokens: int,
        eviction: Eviction,
        admission: Admission,
    ) -> None:
        self._capacity = nbytes
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._admission = admission
        self._policy: EvictionPolicy[bytes] = make_policy(eviction)
        self._sizes: dict[bytes, int] = {}
        self._used = 0
        self.written = 0
        """Bytes so far."""

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def take_in(self, keys: Sequence[bytes]) -> None:
        """Use the entries of a prefix and write those that are missing, if they are admitted.

        An entry without the one before it could not be found, so none is written behind a gap.
        """
        if not self._admission.keeps(len(keys) * self._block_tokens):
            return
        here: list[bytes] = []
        new: list[int] = []
        gap = False
        for position, key in enumerate(keys):
            if key in self._sizes:
                here.append(key)
            elif self._admission.admits(key) and not gap:
                new.append(position)
            else:
                gap = True
        here.reverse()
        if not new:
            self._policy.use(here)
            return
        # What is here does not give way to what follows it, and is the newest in the end.
        for key in here:
            self._policy.hold(key)
        for position in reversed(new):
            self._write(keys[position], position)
        self._policy.use(here)
        for key in here:
            self._policy.release(key)

    def _write(self, key: bytes, position: int) -> None:
        while self._used + self._block_bytes > self._capacity:
            victim = self._policy.victim(key)
            if victim is None:
                return
            self._policy.evict(victim)
            self._used -= self._sizes.pop(victim)
        self._policy.add(key, Item(self._block_bytes, self._block_tokens, position))
        self._sizes[key] = self._block_bytes
        self._used += self._block_bytes
        self.written += self._block_bytes
