# SPDX-License-Identifier: Apache-2.0
"""The few CUDA driver calls that torch has no name for, through ctypes.

Written after the CUDA driver API's reference (12.8 for `cuMemcpyBatchAsync`). Tested against a
stand-in library only: it has not been run on a GPU. Calls release the GIL. Errors of the driver API
leave no trace in the runtime, so a failed call can't make an unrelated torch call raise later.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_tiered_kv.log import get_logger

Int64s = npt.NDArray[np.int64]

logger = get_logger(__name__)

_SUCCESS = 0
_HOST_REGISTER_PORTABLE = 1
_CAPTURE_MODE_RELAXED = 2
_BATCH_SINCE = 12080  # CUDA 12.8; names the signature that reports the failing index


class DriverError(RuntimeError):
    """A call to the CUDA driver failed; names the call and the error."""


class SourceOrder(enum.IntEnum):
    """When the source of a batched copy may be read."""

    STREAM = 1  # in stream order, as device pages must be
    ANY = 3  # at once: for memory that doesn't change until the copy is done


class MemLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; the location hints matter for managed memory only and stay zero."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_loc_hint", MemLocation),
        ("dst_loc_hint", MemLocation),
        ("flags", ctypes.c_uint),
    )


BATCH_PROTOTYPE = ctypes.CFUNCTYPE(
    ctypes.c_int,  # CUresult
    ctypes.c_void_p,  # dsts: CUdeviceptr[count]
    ctypes.c_void_p,  # srcs: CUdeviceptr[count]
    ctypes.c_void_p,  # sizes: size_t[count]
    ctypes.c_size_t,  # count
    ctypes.c_void_p,  # attrs: CUmemcpyAttributes[numAttrs]
    ctypes.c_void_p,  # attrsIdxs: size_t[numAttrs]
    ctypes.c_size_t,  # numAttrs
    ctypes.c_void_p,  # failIdx: size_t*
    ctypes.c_void_p,  # stream; must not be the legacy default stream
)


class CudaDriver:
    """Driver calls in the context that was current where this was made.

    `library` is libcuda or anything with its functions. Make it with `open_driver()` in a thread in
    which torch uses the GPU; its methods may then be called from any thread.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        if not context.value:
            raise DriverError("cuCtxGetCurrent: this thread has no CUDA context")
        self._context = context
        self._batch = self._resolve_batch()

    @property
    def has_batch(self) -> bool:
        """Whether `memcpy_batch` is there (driver of CUDA 12.8 or newer)."""
        return self._batch is not None

    def enter(self) -> None:
        """Readies the calling thread: the context, and no part in other threads' graph captures.

        A capture on the model's thread would otherwise fail because of what this thread does.

        Raises:
            DriverError: the driver refused.
        """
        self._call("cuCtxSetCurrent", self._context)
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))

    def pci_bus_id(self) -> str:
        """The device's address, such as `0000:1b:00.0`.

        Raises:
            DriverError: the driver didn't tell.
        """
        self.enter()
        device = ctypes.c_int()
        name = ctypes.create_string_buffer(32)
        self._call("cuCtxGetDevice", ctypes.byref(device))
        self._call("cuDeviceGetPCIBusId", name, ctypes.c_int(len(name)), device)
        return name.value.decode("ascii", "replace")

    def host_register(self, address: int, nbytes: int) -> None:
        """Pins memory for all contexts, faulting it in.

        Raises:
            DriverError: the driver refused (limits, overlap with pinned memory).
        """
        self.enter()
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(_HOST_REGISTER_PORTABLE),
        )

    def host_unregister(self, address: int) -> None:
        """Undoes `host_register` of the same address.

        Raises:
            DriverError: the driver refused.
        """
        self.enter()
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def memcpy_batch(
        self,
        dst: Int64s,
        src: Int64s,
        nbytes: Int64s,
        order: SourceOrder,
        stream: int,
    ) -> None:
        """Enqueues `len(dst)` independent copies on a stream.

        `dst`, `src` (addresses) and `nbytes` are contiguous and of one length. The
        driver reads them during the call.

        Raises:
            DriverError: not enqueued, or not wholly; wait for the stream before touching memory.
        """
        if self._batch is None:
            raise DriverError("cuMemcpyBatchAsync: needs a driver of CUDA 12.8 or newer")
        count = len(dst)
        if count == 0:
            return
        self.enter()
        attributes = MemcpyAttributes(src_access_order=int(order))
        first = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(0)
        result = self._batch(
            dst.ctypes.data,
            src.ctypes.data,
            nbytes.ctypes.data,
            count,
            ctypes.addressof(attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if result != _SUCCESS:
            reason = self._error_name(result)
            raise DriverError(f"cuMemcpyBatchAsync: {reason} at copy {failed.value} of {count}")

    def _resolve_batch(self) -> Any | None:
        pointer = ctypes.c_void_p()
        status = ctypes.c_int()
        try:
            self._call(
                "cuGetProcAddress_v2",
                ctypes.c_char_p(b"cuMemcpyBatchAsync"),
                ctypes.byref(pointer),
                ctypes.c_int(_BATCH_SINCE),
                ctypes.c_uint64(0),
                ctypes.byref(status),
            )
        except DriverError as error:
            logger.info("tiered-kv: no batched copies: %s", error)
            return None
        return BATCH_PROTOTYPE(pointer.value) if pointer.value else None

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DriverError(f"{name}: not in this driver")
        result = function(*arguments)
        if result != _SUCCESS:
            raise DriverError(f"{name}: {self._error_name(result)}")

    def _error_name(self, result: int) -> str:
        text = ctypes.c_char_p()
        function = getattr(self._library, "cuGetErrorName", None)
        if function is None or function(ctypes.c_int(result), ctypes.byref(text)) != _SUCCESS:
            return f"error {result}"
        return f"{(text.value or b'unknown').decode('ascii', 'replace')} ({result})"


def open_driver(device: torch.device | None = None) -> CudaDriver | None:
    """The driver in the context of `device` (default: torch's current one); None without one.

    None also on ROCm, where torch's own copies are used.
    """
    if not torch.cuda.is_available():
        return None
    try:
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # a runtime call: makes the context current in this thread
            return CudaDriver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, RuntimeError) as error:
        logger.warning("tiered-kv: the CUDA driver can't be called directly: %s", error)
        return None
