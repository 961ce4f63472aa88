# SPDX-License-Identifier: Apache-2.0
"""One question to all peers, as who asked it sees it: who has these chunks?"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.remote.handoff import PeerMemory
from vllm_tiered_kv.remote.messages import Hold
from vllm_tiered_kv.remote.options import Address


class InquiryState(enum.Enum):
    """How far it is."""

    ASKING = "asking"
    FOUND = "found"  # something can be read until it is given back
    OVER = "over"  # nothing was found, or it has been given back


class Loan(msgspec.Struct, frozen=True):
    """What one peer lends."""

    address: Address
    memory: PeerMemory
    hold: Hold
    slots: tuple[tuple[int, ...], ...]
    """The peer's, by KV cache group, of the first chunks that were asked for."""
    valid_until: float
    """By our clock."""
    sums: tuple[bytes, ...] = ()
    """Of each chunk, where they are to be compared; see `remote.messages.ChunkSums`."""

    @property
    def chunks(self) -> int:
        return len(self.slots[0]) if self.slots else 0


class Inquiry:
    """Written by the agent's thread alone; the scheduler's reads it.

    Args:
        keys: of the chunks that are looked for, head first; what is not asked for is not found.
        content: what each key ends with.
    """

    __slots__ = ("content", "keys", "loan", "state")

    def __init__(self, keys: Sequence[bytes], content: bytes) -> None:
        self.keys = keys
        self.content = content
        self.state = InquiryState.ASKING
        self.loan: Loan | None = None
        """Set before the state says so."""
