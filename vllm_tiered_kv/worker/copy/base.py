# SPDX-License-Identifier: Apache-2.0
"""What a copier is: blocks' images move between device pages and the CPU pool.

The one interface of the copy engine. `host` implements it where the KV cache is in CPU memory,
`cuda` where it is on a GPU; `open_copier` picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from vllm_tiered_kv.layout import GroupPages
from vllm_tiered_kv.protocol import Direction
from vllm_tiered_kv.worker.pool import HostPool

__all__ = ["BlockCopies", "Copier", "CopyError", "Direction", "Transfer", "open_copier"]


class CopyError(RuntimeError):
    """A copy was refused before it began, or failed; says why."""


class BlockCopies(msgspec.Struct, frozen=True):
    """Blocks of one group, and where in the pool each one's image lies.

    `blocks` are numbers in the group's block table. `offsets` are as many byte offsets into the
    pool, each with room for `GroupPages.block_bytes`. Blocks and images are all different.
    """

    group: int
    blocks: Sequence[int]
    offsets: Sequence[int]


class Transfer(Protocol):
    """Copies under way, or done."""

    def done(self) -> bool:
        """True once no byte moves any more.

        Raises:
            CopyError: the copies failed; nothing is under way any more.
        """

    def wait(self, timeout: float) -> bool:
        """Waits until `done()`, at most `timeout` seconds; False if it isn't.

        Raises:
            CopyError: as for `done()`.
        """


class Copier(Protocol):
    """Copies for one rank. Threads may submit at the same time, for different blocks."""

    def mark(self) -> object | None:
        """Stands for all work enqueued so far on the compute stream; None where there is none.

        Called on the thread that runs the model.
        """

    def submit(
        self, direction: Direction, copies: Sequence[BlockCopies], after: object | None
    ) -> Transfer:
        """Starts copies that come after the mark `after`; some 1 to 32 MiB a call.

        Raises:
            CopyError: a block or an offset is out of range, or the copier is closed; no memory
                was touched.
        """

    def close(self) -> None:
        """Refuses further copies and lets go of the memory. May be called again."""


def open_copier(groups: Sequence[GroupPages], pool: HostPool) -> Copier:
    """The copier for the device that the groups' pages are on; `copies.group` indexes `groups`.

    Raises:
        CopyError: no copier for this device, it failed, or the groups are on several devices.
    """
    devices = {row.device for group in groups for row in group.rows}
    if len(devices) != 1:
        raise CopyError(f"A copier serves one device, not {sorted(map(str, devices))}.")
    device = devices.pop()
    # Imported here, so that neither needs what the other needs.
    if device.type == "cpu":
        from vllm_tiered_kv.worker.copy.host import HostCopier

        return HostCopier(groups, pool)
    if device.type == "cuda":
        from vllm_tiered_kv.worker.copy.cuda import CudaCopier

        try:
            return CudaCopier(groups, pool)
        except RuntimeError as error:
            raise CopyError(f"Could not set up copies on {device}: {error}") from error
    raise CopyError(f"There is no copier for KV caches on {device}.")
