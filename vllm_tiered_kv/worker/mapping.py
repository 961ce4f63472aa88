# SPDX-License-Identifier: Apache-2.0
"""The anonymous memory that the CPU tier's slots lie in. Without torch, so that it can be tried."""

from __future__ import annotations

import contextlib
import mmap


class PoolError(RuntimeError):
    """The CPU tier's memory can't be had, or is gone; says why."""


def map_memory(nbytes: int) -> mmap.mmap:
    """Private and anonymous memory: nothing is left behind whatever ends the process.

    It takes no memory before it is touched; what limits a process or its commitments counts at
    once.

    Raises:
        PoolError: it can't be mapped.
    """
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise PoolError(f"Could not map {nbytes} bytes for the CPU tier: {error}") from error
    _advise(mapping)
    return mapping


def _advise(mapping: mmap.mmap) -> None:
    """Huge pages; nothing of it in core dumps (it is users' prompts) or in child processes."""
    for name in ("MADV_HUGEPAGE", "MADV_DONTDUMP", "MADV_DONTFORK"):
        option = getattr(mmap, name, None)
        if option is None:
            continue
        with contextlib.suppress(OSError):  # advice: a kernel without it does without
            mapping.madvise(option)
