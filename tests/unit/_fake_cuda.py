# SPDX-License-Identifier: Apache-2.0
"""A stand-in for libcuda and for torch's streams and events, all in CPU memory.

Copies happen as soon as they are enqueued, so this shows that every byte goes where it should, and
in which order things were asked for; not that a GPU would wait.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_tiered_kv.worker.cuda_driver import BATCH_PROTOTYPE, CudaDriver, MemcpyAttributes

CONTEXT = 0xC0DE
INVALID = 1


class FakeLibrary:
    """libcuda, as far as `CudaDriver` calls it."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.register_limit: int | None = None
        self.batches: list[tuple[int, int]] = []  # (copies, source order)
        self.fail_batch = False
        self.has_batch = True
        self.calls: list[str] = []
        self._batch = BATCH_PROTOTYPE(self._copy_batch)

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = CONTEXT
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.calls.append("enter")
        return 0 if context.value == CONTEXT else INVALID

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        return 0 if mode._obj.value == 2 else INVALID

    def cuCtxGetDevice(self, device: Any) -> int:  # noqa: N802
        device._obj.value = 3
        return 0

    def cuDeviceGetPCIBusId(self, name: Any, size: Any, device: Any) -> int:  # noqa: N802
        name.value = b"0000:1B:00.0" if device.value == 3 else b"?"
        return 0

    def cuGetErrorName(self, code: ctypes.c_int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: Any) -> int:  # noqa: N802
        after = sum(self.registered.values()) + nbytes.value
        if self.register_limit is not None and after > self.register_limit:
            return INVALID
        self.registered[address.value] = nbytes.value
        return 0

    def cuMemHostUnregister(self, address: Any) -> int:  # noqa: N802
        return 0 if self.registered.pop(address.value, None) is not None else INVALID

    def cuGetProcAddress_v2(  # noqa: N802
        self, name: Any, pointer: Any, version: Any, flags: Any, status: Any
    ) -> int:
        if not self.has_batch or name.value != b"cuMemcpyBatchAsync":
            return INVALID
        pointer._obj.value = ctypes.cast(self._batch, ctypes.c_void_p).value
        return 0

    def _copy_batch(self, *arguments: Any) -> int:
        dsts, srcs, sizes, count, attributes, first, attribute_count, failed, stream = arguments
        if self.fail_batch:
            ctypes.c_size_t.from_address(failed).value = 5
            return INVALID
        if attribute_count != 1 or ctypes.c_size_t.from_address(first).value != 0 or not stream:
            return INVALID
        order = MemcpyAttributes.from_address(attributes).src_access_order
        self.batches.append((count, order))
        words = ctypes.c_uint64 * count
        columns = (words.from_address(at) for at in (dsts, srcs, sizes))
        for dst, src, size in zip(*columns, strict=True):
            ctypes.memmove(dst, src, size)
        return 0


class FakeEvent:
    def __init__(self) -> None:
        self.recorded: object | None = None
        self.complete = True

    def record(self, stream: object) -> None:
        self.recorded = stream

    def query(self) -> bool:
        return self.complete


class FakeStream:
    cuda_stream = 0x57AE

    def __init__(self, device: torch.device | None = None) -> None:
        self.waited: list[FakeEvent] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.waited.append(event)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Replaces torch.cuda and libcuda: `CudaCopier` and pinned pools work on CPU tensors."""
    fake = FakeLibrary()

    @contextlib.contextmanager
    def nothing(_: object) -> Iterator[None]:
        yield

    def open_driver(device: object = None) -> CudaDriver:
        return CudaDriver(fake)

    compute = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", nothing)
    monkeypatch.setattr(torch.cuda, "device", nothing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr("vllm_tiered_kv.worker.pool.open_driver", open_driver)
    monkeypatch.setattr("vllm_tiered_kv.worker.copy.cuda.open_driver", open_driver)
    return fake
