# SPDX-License-Identifier: Apache-2.0
"""Whether the device has room for one more load.

A request that vLLM has admitted for a load holds its blocks and cannot be preempted before it
runs. To run it needs the blocks of the tokens that are left; if such requests hold everything and
none can have what it needs, nothing ever moves again. vLLM keeps what it thinks they need free, but
counts the blocks that a sliding window has left behind as if they were still held
(``Scheduler._request_remaining_blocks``), so for windows it is counted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind

_STATE_BLOCKS = 3
"""Of a recurrent group, at most: the state that is read, the one that is written, a checkpoint."""


class _Holder(msgspec.Struct, frozen=True):
    blocks: frozenset[int]
    owed: int
    """Blocks it still has to get before it can run to the end of its prompt."""


class Room:
    """Keeps count of what requests hold that wait for a load or for their first step after it.

    Args:
        geometry: the cut.
        step_tokens: tokens that can be scheduled and not yet settled, over all requests.
        draft_tokens: draft tokens of a request and step.
    """

    def __init__(self, geometry: Geometry, step_tokens: int, draft_tokens: int) -> None:
        self._geometry = geometry
        self._step_tokens = step_tokens
        self._draft_tokens = draft_tokens
        self._counts = any(group.kind is GroupKind.WINDOW for group in geometry.groups)
        self._blocks = 0
        self._held: Counter[int] = Counter()
        self._owed = 0
        self._holders: dict[str, _Holder] = {}

    def bind(self, blocks: int) -> None:
        """The device has so many blocks that requests can have."""
        self._blocks = blocks

    def admits(self, tokens: int) -> bool:
        """Whether a request of so many tokens can be loaded beside those that hold blocks.

        Always when there are none: then vLLM's own check is enough.
        """
        if not self._holders:
            return True
        most = sum(self._most(group, tokens) for group in self._geometry.groups)
        return len(self._held) + self._owed + most <= self._blocks

    def takes(
        self, request_id: str, tokens: int, tables: Sequence[Sequence[int]], null_block: int
    ) -> None:
        """A request is admitted for a load, with these block tables, one a KV cache group."""
        if not self._counts:
            return
        self.gives(request_id)
        blocks: set[int] = set()
        owed = 0
        for group, table in zip(self._geometry.groups, tables, strict=False):
            real = [block for block in table if block != null_block]
            left_behind = next((i for i, block in enumerate(table) if block != null_block), 0)
            blocks.update(real)
            owed += max(0, self._most(group, tokens, left_behind) - len(real))
        self._holders[request_id] = _Holder(frozenset(blocks), owed)
        self._held.update(blocks)
        self._owed += owed

    def gives(self, request_id: str) -> None:
        """The request runs, or has given its blocks back."""
        holder = self._holders.pop(request_id, None)
        if holder is None:
            return
        self._owed -= holder.owed
        for block in holder.blocks:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]

    def _most(self, group: GroupGeometry, tokens: int, left_behind: int = 0) -> int:
        """Blocks a request holds at most until all its tokens are computed."""
        if group.kind is GroupKind.STATE:
            return _STATE_BLOCKS
        if self._draft_tokens:
            tokens += 1 + self._draft_tokens
        blocks = -(-tokens // group.block_tokens) - left_behind
        if group.kind is GroupKind.FULL:
            return blocks
        # The window and what is in flight may begin in the middle of a block.
        seen = group.window - 1 + self._step_tokens
        return min(blocks, -(-seen // group.block_tokens) + 1)
