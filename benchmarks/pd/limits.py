# SPDX-License-Identifier: Apache-2.0
"""What the machine can do at most: NIXL alone and memcpy, of a hand-over's bytes."""

from __future__ import annotations

from types import TracebackType

import msgspec
import numpy as np

from benchmarks.pd._peer import Peer, noise
from benchmarks.pd.raw import MIB, Memcpy, Raw, Shape, choose
from vllm_tiered_kv.remote.transport import Options
from vllm_tiered_kv.remote.transport.environment import prepare

BUFFER_BYTES = 512 * MIB


class Limit(msgspec.Struct, frozen=True):
    """The same bytes by other means."""

    nbytes: int
    raw_seconds: float
    """A READ of scattered pages by NIXL alone, in pieces as large as ours, by one thread."""
    memcpy_seconds: float
    """One large copy, by one thread."""


class Limits:
    """A process of its own whose memory is read, until the end of the ``with`` block.

    Args:
        shape: how a prompt's KV lies.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(6)
        self._memory = np.ones(BUFFER_BYTES, dtype=np.uint8)
        self._memcpy = Memcpy(self._memory, noise(BUFFER_BYTES), threads=1)
        prepare("127.0.0.1")
        self._peer = Peer(BUFFER_BYTES)
        try:
            self._raw = Raw(self._memory, self._peer, Options().piece_bytes)
        except BaseException:
            self._peer.close()
            raise

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._peer.close()

    def measure(self, tokens: int) -> Limit:
        """Read a prompt's bytes, and copy them."""
        pages = choose(self._shape, tokens, self._rng, BUFFER_BYTES)
        nbytes = int(pages.nbytes.sum())
        return Limit(nbytes, self._raw.read(pages), self._memcpy.copy(nbytes, self._rng))
