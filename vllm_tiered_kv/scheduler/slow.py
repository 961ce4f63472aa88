# SPDX-License-Identifier: Apache-2.0
"""A source that fills slots: the disk, or other engines; as look-ups and as the gate see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_tiered_kv.gate.load import LoadModel
    from vllm_tiered_kv.scheduler.index import Node
    from vllm_tiered_kv.scheduler.requests import RequestState


class Lookups(Protocol):
    """Reads chunks into the CPU tier for requests that are being looked up."""

    def waits(self, state: RequestState, computed: int) -> bool:
        """Whether to ask again later: something is on its way already; cheap.

        Args:
            computed: tokens that the device holds.
        """

    def begins(
        self,
        state: RequestState,
        keys: Sequence[bytes],
        first: int,
        computed: int,
        ends: Sequence[int],
    ) -> bool:
        """Begin to read what is worth it; whether to ask again later.

        Args:
            keys: of the prompt's chunks.
            first: the first chunk that the device does not hold whole.
            computed: tokens it holds.
            ends: how many chunks from ``first`` on the CPU tier can give, all the ways.
        """

    def forget(self, state: RequestState) -> None:
        """Nothing is wanted for a request any more; what was read is nobody's in particular."""


class Probe(Protocol):
    """Finds out now and then how fast a source is that nobody uses."""

    def used(self) -> None:
        """It is used again: should that change, see soon."""

    def refused(self, keys: Sequence[bytes], first: int, content: bytes) -> None:
        """A prompt is not read from it, from chunk ``first`` on; ``content``: see ``chunk_key``."""

    def is_reading(self, node: Node) -> bool:
        """Whether a chunk is being read in the background only: nobody waits for it."""

    def go_on(self) -> None:
        """Take in a probe's end; once a step."""


class SlowTier:
    """What is known of a source.

    Args:
        name: the tier's, in metrics.
        model: how long reads take.
        queued: chunks that are being read.
        has: whether a chunk is known to be there.
    """

    def __init__(
        self,
        name: str,
        model: LoadModel,
        queued: Callable[[], int],
        has: Callable[[bytes], bool],
    ) -> None:
        self.name = name
        self.model = model
        self.queued = queued
        self.has = has
        self.probe: Probe | None = None
