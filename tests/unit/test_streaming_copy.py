# SPDX-License-Identifier: Apache-2.0
"""The trial that a freshly compiled copy has to pass before it is used."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from vllm_tiered_kv.worker.copy import streaming
from vllm_tiered_kv.worker.copy.base import Direction
from vllm_tiered_kv.worker.copy.plan import Request


@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("misalignment", [0, 16, 48])
def test_a_streaming_copy_that_copies_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, stream: int, misalignment: int
) -> None:
    """Wherever the allocator has put the memory on which it is tried."""
    if streaming._obstacle() is not None:
        pytest.skip("no streaming copies on this machine")
    right = streaming._ir()
    # One vector of each turn is left out.
    wrong = "\n".join(
        line for line in right.splitlines() if f"store <8 x i64> %value{stream}_1" not in line
    )
    assert wrong != right
    monkeypatch.setattr(streaming, "_ir", lambda: wrong)
    empty = np.empty

    def misaligned(nbytes: int, dtype: type) -> np.ndarray:
        memory = empty(nbytes + 128, dtype=dtype)
        return memory[(misalignment - memory.ctypes.data) % 64 :][:nbytes]

    monkeypatch.setattr(np, "empty", misaligned)
    streaming.streaming_copy.cache_clear()
    try:
        assert streaming.streaming_copy() is None
    finally:
        streaming.streaming_copy.cache_clear()


@pytest.mark.parametrize("direction", Direction)
def test_the_trial_of_a_streaming_copy_streams_every_page_that_can_be(direction: Direction) -> None:
    """Both ways: whether one way is right says nothing about the other."""
    right = streaming.streaming_copy()
    if right is None:
        pytest.skip("no streaming copies on this machine")
    streamed = set()

    def copy(way: Direction, request: Request, table: array[int], pool: int) -> None:
        for block, offset in zip(request.blocks, request.offsets, strict=True):
            for base, stride, length, start in np.array(table).reshape(-1, 4).tolist():
                stored, page = pool + offset + start, base + block * stride
                if (stored if way is Direction.STORE else page) % 64 == 0 and way is direction:
                    streamed.add(length)
        right(way, request, table, pool)

    assert streaming._works(copy)  # type: ignore[arg-type]
    assert streamed >= {512, 4113, 66048}
