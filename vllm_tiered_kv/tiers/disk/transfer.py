# SPDX-License-Identifier: Apache-2.0
"""Reading and writing several pieces of memory as one run of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_tiered_kv.tiers.disk.format import ALIGNMENT


def transfer(
    call: Callable[[int, Sequence[memoryview], int], int], fd: int, parts: Sequence[memoryview]
) -> bool:
    """Reads or writes all of `parts`, from the file's beginning; False if it gets no further.

    What a call left over is done from a multiple of `ALIGNMENT`, for `O_DIRECT`.

    Raises:
        OSError: of the call.
    """
    total = sum(part.nbytes for part in parts)
    done = call(fd, parts, 0)
    while done < total:
        start = done // ALIGNMENT * ALIGNMENT
        count = call(fd, _rest(parts, start), start)
        if start + count <= done:
            return False
        done = start + count
    return True


def _rest(parts: Sequence[memoryview], start: int) -> list[memoryview]:
    rest = []
    for part in parts:
        if start < part.nbytes:
            rest.append(part[start:])
        start = max(0, start - part.nbytes)
    return rest
