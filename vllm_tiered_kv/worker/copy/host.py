# SPDX-License-Identifier: Apache-2.0
"""The copier for KV caches in CPU memory.

Copies in the calling thread, on that thread alone: torch's own copies would wake a team of OpenMP
threads beside the model's. One call of `streaming` moves everything a `submit` asks for; where that
isn't to be had, numpy moves a block at a time. Both let go of the GIL while bytes move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from vllm_tiered_kv.layout import GroupPages
from vllm_tiered_kv.worker.copy.base import BlockCopies, CopyError, Direction
from vllm_tiered_kv.worker.copy.plan import GroupPlan, Request, bundles, check
from vllm_tiered_kv.worker.copy.streaming import StreamingCopy, streaming_copy
from vllm_tiered_kv.worker.pool import HostPool


class Finished:
    """A transfer that was complete when it was returned."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float) -> bool:
        return True


class Engine(Protocol):
    """Moves checked copies; complete on return."""

    def move(self, direction: Direction, request: Request) -> None: ...


class StreamingEngine:
    """All pages of a request in one call that bypasses the caches."""

    def __init__(self, groups: Sequence[GroupPages], memory: torch.Tensor, copy: StreamingCopy):
        self._tables = [GroupPlan(group).table() for group in groups]
        self._base = memory.data_ptr()
        self._copy = copy

    def move(self, direction: Direction, request: Request) -> None:
        self._copy(direction, request, self._tables[request.group], self._base)


class NumpyEngine:
    """A strided numpy copy for each block: any layout, no help needed, about half the speed."""

    def __init__(self, groups: Sequence[GroupPages], memory: torch.Tensor):
        self._memory = memory.numpy()
        self._bundles = [
            [(bundle.view.numpy(), bundle.start, bundle.nbytes) for bundle in bundles(group)]
            for group in groups
        ]

    def move(self, direction: Direction, request: Request) -> None:
        for view, start, nbytes in self._bundles[request.group]:
            for block, offset in zip(request.blocks, request.offsets, strict=True):
                begin = offset + start
                pages = view[block]
                image = self._memory[begin : begin + nbytes].reshape(pages.shape)
                if direction is Direction.STORE:
                    np.copyto(image, pages)
                else:
                    np.copyto(pages, image)


class HostCopier:
    """Copies at once, in the calling thread; any number of threads may call it.

    `engine` is chosen by what this machine can do, unless one is given.
    """

    def __init__(
        self, groups: Sequence[GroupPages], pool: HostPool, engine: Engine | None = None
    ) -> None:
        # Held until close(): the engine works on addresses.
        self._groups: tuple[GroupPages, ...] = tuple(groups)
        self._memory: torch.Tensor | None = pool.tensor
        self._engine: Engine | None = engine or choose_engine(groups, pool)

    def mark(self) -> None:
        return None

    def submit(
        self, direction: Direction, copies: Sequence[BlockCopies], after: object | None
    ) -> Finished:
        groups, memory, engine = self._groups, self._memory, self._engine
        if memory is None or engine is None:
            raise CopyError("The copier is closed.")
        for request in check(groups, memory.numel(), copies):
            try:
                engine.move(direction, request)
            except (MemoryError, RuntimeError, ValueError) as error:
                raise CopyError(f"Could not {direction.value} blocks: {error}") from error
        return Finished()

    def close(self) -> None:
        self._engine = None
        self._memory = None
        self._groups = ()


def choose_engine(groups: Sequence[GroupPages], pool: HostPool) -> Engine:
    """The fastest engine that works on this machine."""
    copy = streaming_copy()
    if copy is not None:
        return StreamingEngine(groups, pool.tensor, copy)
    return NumpyEngine(groups, pool.tensor)
