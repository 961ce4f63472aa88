# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's memory: equal slots in one anonymous mapping.

Anonymous, so that nothing is left behind whatever ends the process. A background thread faults the
memory in, so that start-up isn't held up and no copy pays for page faults, and pins it for a GPU
piece by piece. Pinning and NUMA binding were tested against a stand-in driver, not on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import threading
import time

import torch

from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.worker.cuda_driver import CudaDriver, DriverError, open_driver
from vllm_tiered_kv.worker.mapping import PoolError, map_memory
from vllm_tiered_kv.worker.numa import bind_calling_thread, cpus_near_pci_device

logger = get_logger(__name__)

PIN_PIECE_BYTES = 256 << 20
"""About this much is pinned at a time; a piece is a whole number of slots."""

__all__ = ["HostPool", "PoolError"]

_FAULT_PIECE_BYTES = 8 << 20  # the kernel holds the mapping's lock for one piece: milliseconds
_PIN_LOCK_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_NICEST = 19


class HostPool:
    """`num_slots` slots of `slot_bytes` bytes each, page-aligned as a whole.

    `pin` asks for pinned memory; it has no effect where torch sees no GPU. Never more than
    `num_slots * slot_bytes` bytes (rounded up to a memory page) become resident.

    Raises:
        PoolError: the sizes make no sense, or the memory can't be mapped.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pin: bool) -> None:
        if num_slots < 1 or slot_bytes < 1:
            raise PoolError(f"A pool needs slots: {num_slots} of {slot_bytes} bytes asked for.")
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        mapping = map_memory(num_slots * slot_bytes)
        self._mapping: mmap.mmap | None = mapping
        # Through a memoryview: torch keeps that alive, and it keeps the mapping open.
        self._tensor: torch.Tensor | None = torch.frombuffer(memoryview(mapping), dtype=torch.uint8)
        self._base: int = self.tensor.data_ptr()
        self._driver = open_driver() if pin else None
        self._piece_slots = _slots_per_piece(num_slots, slot_bytes)
        self._pin_lock = threading.Lock()
        self._pinned: set[int] = set()
        self._refused = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The memory: uint8 `[num_slots * slot_bytes]`.

        Raises:
            PoolError: the pool is closed.
        """
        tensor = self._tensor
        if tensor is None:
            raise PoolError("The CPU tier's memory was closed.")
        return tensor

    def view(self, slot: int, nbytes: int) -> memoryview | None:
        """The first bytes of a slot; None if it may not be used, see `ensure`."""
        if nbytes > self.slot_bytes or not self.ensure(slot):
            return None
        mapping = self._mapping
        if mapping is None:
            return None
        start = slot * self.slot_bytes
        return memoryview(mapping)[start : start + nbytes]

    @property
    def piece_bytes(self) -> int:
        """Copies by the GPU must not cross a multiple of this: pieces are pinned one by one."""
        return self._piece_slots * self.slot_bytes

    def ensure(self, slot: int) -> bool:
        """Whether the slot may be used; pins its piece if the background hasn't come to it.

        Where pinning was refused the answer is still True: copies between pageable memory and a
        GPU are right, only slower, and the copier sees to it through `is_pinned`. False for a slot
        that doesn't exist, after `close()`, and if another thread's pinning takes longer than ten
        seconds. Never raises.
        """
        if self._tensor is None or not 0 <= slot < self.num_slots:
            return False
        return self._driver is None or self._pin(slot // self._piece_slots)

    def is_pinned(self, offset: int, nbytes: int) -> bool:
        """Whether a GPU can copy these bytes of the pool directly: pinned, and in one piece."""
        piece = offset // self.piece_bytes
        return piece in self._pinned and (offset + nbytes - 1) // self.piece_bytes == piece

    def prefault(self) -> None:
        """Starts the thread that faults in, and pins, the memory; contents are left alone.

        Does nothing where the kernel can't populate memory (before Linux 5.14) and there is
        nothing to pin, on a second call, and after `close()`.
        """
        if self._thread is not None or self._tensor is None:
            return
        self._thread = threading.Thread(
            target=self._populate, name="tiered-kv-prefault", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops the thread (within five seconds), unpins and unmaps. May be called again.

        No copy may be under way. Views of `tensor` that are still alive keep the mapping until
        they are gone, so that touching them stays harmless.
        """
        if self._tensor is None:
            return
        self._tensor = None
        self._stop.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if not self._unpin_all(deadline) or (self._thread is not None and self._thread.is_alive()):
            logger.warning("tiered-kv: the CPU tier's memory is still in use; left to the exit")
            return
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            # Refused while there are views: then it goes with the last one.
            with contextlib.suppress(BufferError):
                mapping.close()

    def _pin(self, piece: int) -> bool:
        """False if there was no time to."""
        if piece in self._pinned or self._refused:
            return True
        if not self._pin_lock.acquire(timeout=_PIN_LOCK_SECONDS):
            return False
        try:
            if self._stop.is_set():
                return False
            if self._driver is not None and piece not in self._pinned and not self._refused:
                self._register(self._driver, piece)
            return True
        finally:
            self._pin_lock.release()

    def _register(self, driver: CudaDriver, piece: int) -> None:
        start = piece * self.piece_bytes
        nbytes = min(self.piece_bytes, self.num_slots * self.slot_bytes - start)
        try:
            driver.host_register(self._base + start, nbytes)
        except DriverError as error:
            # Not tried again: a limit that was reached once costs time at every piece.
            self._refused = True
            logger.warning(
                "tiered-kv: only %d MiB of the CPU tier could be pinned, the rest is copied "
                "more slowly (check the container's memory and memlock limits): %s",
                len(self._pinned) * self.piece_bytes >> 20,
                error,
            )
            return
        self._pinned.add(piece)

    def _unpin_all(self, deadline: float) -> bool:
        """False if a thread is still pinning."""
        if not self._pin_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        try:
            for piece in sorted(self._pinned):
                try:
                    if self._driver is not None:
                        self._driver.host_unregister(self._base + piece * self.piece_bytes)
                except DriverError as error:
                    logger.warning("tiered-kv: could not unpin the CPU tier: %s", error)
            self._pinned.clear()
            return True
        finally:
            self._pin_lock.release()

    def _populate(self) -> None:
        """The background thread: faults in and pins piece after piece."""
        _be_nice()
        self._move_near_device()
        madvise = _libc_madvise()
        size = self.num_slots * self.slot_bytes
        for start in range(0, size, self.piece_bytes):
            end = min(start + self.piece_bytes, size)
            at = start
            while madvise is not None and at < end:
                if self._stop.is_set():
                    return
                nbytes = min(_FAULT_PIECE_BYTES, end - at)
                if madvise(self._base + at, nbytes, _MADV_POPULATE_WRITE) != 0:
                    logger.debug("tiered-kv: no pre-faulting: errno %d", ctypes.get_errno())
                    madvise = None
                at += nbytes
            if self._stop.is_set() or (madvise is None and self._driver is None):
                return
            if self._driver is not None:
                self._pin(start // self.piece_bytes)

    def _move_near_device(self) -> None:
        if self._driver is None:
            return
        try:
            cpus = cpus_near_pci_device(self._driver.pci_bus_id())
        except DriverError as error:
            logger.debug("tiered-kv: the GPU's address is unknown: %s", error)
            return
        if cpus is not None:
            bind_calling_thread(cpus)


def _slots_per_piece(num_slots: int, slot_bytes: int) -> int:
    """Slots pinned together: pieces begin on memory pages, and no slot is cut in two."""
    step = mmap.PAGESIZE // math.gcd(slot_bytes, mmap.PAGESIZE)
    pieces = max(1, PIN_PIECE_BYTES // (slot_bytes * step))
    return min(pieces * step, num_slots)


def _libc_madvise() -> ctypes._NamedFuncPointer | None:
    """libc's madvise, which unlike the mmap module's releases the GIL."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise.restype = ctypes.c_int
    return madvise


def _be_nice() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
    except OSError as error:
        logger.debug("tiered-kv: pre-faulting at normal priority: %s", error)
