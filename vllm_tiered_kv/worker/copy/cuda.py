# SPDX-License-Identifier: Apache-2.0
"""The copier for KV caches on a GPU: side streams, events, pinned memory.

One stream a direction, so that stores and loads overlap each other and the model. Three ways to
copy, picked for each group and request:

- BATCH: all pages in one `cuMemcpyBatchAsync` (driver of CUDA 12.8 or newer);
- GATHER, for small pages: a kernel collects them in a bounded staging buffer on the device, and one
  large copy moves that (the reverse for loads);
- ROWS: torch copies page by page; where neither of the others is there, and for memory that could
  not be pinned.

Not run on a GPU so far: the tests drive all of it on a CPU, with stand-ins for streams, events and
the driver. The ways of copying and the addresses are those that run there.
"""

from __future__ import annotations

import enum
import threading
import time
from collections.abc import Sequence

import torch

from vllm_tiered_kv.layout import GroupPages
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.worker.copy.base import BlockCopies, CopyError, Direction
from vllm_tiered_kv.worker.copy.plan import Bundle, GroupPlan, Request, bundles, check
from vllm_tiered_kv.worker.cuda_driver import CudaDriver, SourceOrder, open_driver
from vllm_tiered_kv.worker.pool import HostPool

logger = get_logger(__name__)

GATHER_BELOW_BYTES = 28 << 10
"""Mean page size below which GATHER is taken."""
STAGING_BYTES = 16 << 20
"""Device memory of one direction's staging buffer."""

_BATCH_RUNS = 8192  # copies in one driver call
_POLL_SECONDS = (20e-6, 1e-3)  # first and longest pause of a waiting thread


class Way(enum.Enum):
    """How pages get to the pool and back; see the module's text."""

    BATCH = "batch"
    GATHER = "gather"
    ROWS = "rows"


def choose_way(pages: GroupPages, *, has_batch: bool, pinned: bool, staging_bytes: int) -> Way:
    """The way for one request of a group.

    `pinned`: all its images lie in pinned memory. GATHER needs room for one image in the staging
    buffer.
    """
    if not pinned:
        return Way.ROWS
    small = pages.block_bytes < GATHER_BELOW_BYTES * len(pages.rows)
    if small and pages.block_bytes <= staging_bytes:
        return Way.GATHER
    return Way.BATCH if has_batch else Way.ROWS


class CudaTransfer:
    """Done when its event is; then raises if some of it could not be enqueued."""

    def __init__(self, event: torch.cuda.Event, error: str | None) -> None:
        self._event = event
        self._error = error

    def done(self) -> bool:
        try:
            complete = bool(self._event.query())
        except RuntimeError as error:
            raise CopyError(f"The GPU failed during a copy: {error}") from error
        if complete and self._error is not None:
            raise CopyError(self._error)
        return complete

    def wait(self, timeout: float) -> bool:
        # Polled: waiting for an event has no deadline. At most an eighth of the time too late.
        start = time.monotonic()
        shortest, longest = _POLL_SECONDS
        while not self.done():
            waited = time.monotonic() - start
            if waited >= timeout:
                return False
            pause = min(max(shortest, waited / 8), longest)
            time.sleep(min(pause, timeout - waited))
        return True


class CudaCopier:
    """Copies between a GPU's pages and the pool, in the order of its two streams.

    `way` fixes the way of copying, for measurements; BATCH and GATHER still give way to ROWS where
    they can't work. The calling thread needs no CUDA device of its own set.
    """

    def __init__(
        self, groups: Sequence[GroupPages], pool: HostPool, way: Way | None = None
    ) -> None:
        self._groups = tuple(groups)
        self._device = next(row.device for group in groups for row in group.rows)
        self._pool = pool
        self._memory: torch.Tensor | None = pool.tensor
        self._driver = open_driver(self._device)
        self._fixed_way = way
        self._lanes = {
            direction: _Lane(direction, self._groups, pool, self._driver, self._device)
            for direction in Direction
        }

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def submit(
        self, direction: Direction, copies: Sequence[BlockCopies], after: object | None
    ) -> CudaTransfer:
        memory, lane = self._memory, self._lanes.get(direction)
        if memory is None or lane is None:
            raise CopyError("The copier is closed.")
        requests = check(self._groups, memory.numel(), copies)
        return lane.enqueue([(request, self._way(request)) for request in requests], after, memory)

    def close(self) -> None:
        """Waits for nothing: every transfer must be done."""
        self._memory = None
        self._lanes = {}
        self._groups = ()

    def _way(self, request: Request) -> Way:
        pages = self._groups[request.group]
        pinned = all(self._pool.is_pinned(offset, pages.block_bytes) for offset in request.offsets)
        has_batch = self._driver is not None and self._driver.has_batch
        chosen = choose_way(pages, has_batch=has_batch, pinned=pinned, staging_bytes=STAGING_BYTES)
        if self._fixed_way is None or not pinned:
            return chosen
        if self._fixed_way is Way.BATCH and not has_batch:
            return Way.ROWS
        if self._fixed_way is Way.GATHER and pages.block_bytes > STAGING_BYTES:
            return Way.ROWS
        return self._fixed_way


class _Lane:
    """One direction: its stream, its staging buffer, and the order of what is enqueued."""

    def __init__(
        self,
        direction: Direction,
        groups: tuple[GroupPages, ...],
        pool: HostPool,
        driver: CudaDriver | None,
        device: torch.device,
    ) -> None:
        self._direction = direction
        self._groups = groups
        self._plans = [GroupPlan(group) for group in groups]
        self._bundles: list[tuple[Bundle, ...]] = [bundles(group, widest=8) for group in groups]
        self._piece_bytes = pool.piece_bytes
        self._driver = driver
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._staging: torch.Tensor | None = None
        self._lock = threading.Lock()

    def enqueue(
        self,
        requests: Sequence[tuple[Request, Way]],
        after: object | None,
        memory: torch.Tensor,
    ) -> CudaTransfer:
        # The staging buffer is reused in the stream's order, so only one thread may enqueue.
        with (
            self._lock,
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            torch.inference_mode(),
        ):
            error = None
            try:
                if self._driver is not None:
                    self._driver.enter()
                if after is not None:
                    self._stream.wait_event(after)
                for request, way in requests:
                    self._copy(request, way, memory)
            except (RuntimeError, MemoryError) as failure:
                # What was enqueued may still be under way: the event tells when it isn't.
                error = f"Could not {self._direction.value} blocks: {failure}"
                logger.warning("tiered-kv: %s", error)
            return CudaTransfer(self._finish(), error)

    def _finish(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        try:
            event.record(self._stream)
        except RuntimeError as error:
            raise CopyError(f"The GPU failed during a copy: {error}") from error
        return event

    def _copy(self, request: Request, way: Way, memory: torch.Tensor) -> None:
        if way is Way.BATCH and self._driver is not None:
            self._batch(request, memory, self._driver)
        elif way is Way.GATHER:
            self._gather(request, memory)
        else:
            self._rows(request, memory)

    def _batch(self, request: Request, memory: torch.Tensor, driver: CudaDriver) -> None:
        runs = self._plans[request.group].page_runs(request, memory.data_ptr(), self._piece_bytes)
        store = self._direction is Direction.STORE
        dst, src = (runs.host, runs.device) if store else (runs.device, runs.host)
        # A slot doesn't change while it is loaded from; device pages do until the stream is there.
        order = SourceOrder.STREAM if store else SourceOrder.ANY
        for i in range(0, len(dst), _BATCH_RUNS):
            part = slice(i, i + _BATCH_RUNS)
            driver.memcpy_batch(
                dst[part], src[part], runs.nbytes[part], order, self._stream.cuda_stream
            )

    def _gather(self, request: Request, memory: torch.Tensor) -> None:
        block_bytes = self._groups[request.group].block_bytes
        if self._staging is None:
            self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=self._device)
        most = self._staging.numel() // block_bytes
        for i in range(0, len(request.blocks), most):
            part = Request(
                request.group, request.blocks[i : i + most], request.offsets[i : i + most]
            )
            images = self._staging[: len(part.blocks) * block_bytes].view(-1, block_bytes)
            index = self._index(part)
            if self._direction is Direction.STORE:
                collect(self._bundles[request.group], index, images)
                self._move_images(part, memory, images)
            else:
                self._move_images(part, memory, images)
                distribute(self._bundles[request.group], index, images)

    def _move_images(self, part: Request, memory: torch.Tensor, images: torch.Tensor) -> None:
        flat = images.view(-1)
        runs = self._plans[part.group].image_runs(part, 0, 0, self._piece_bytes)
        for at, offset, nbytes in zip(*(column.tolist() for column in runs), strict=True):
            self._copy_bytes(flat[at : at + nbytes], memory[offset : offset + nbytes])

    def _rows(self, request: Request, memory: torch.Tensor) -> None:
        pages = self._groups[request.group]
        for block, at in zip(request.blocks, request.offsets, strict=True):
            for row, nbytes in zip(pages.rows, pages.row_bytes, strict=True):
                self._copy_bytes(row[block], memory[at : at + nbytes])
                at += nbytes

    def _copy_bytes(self, device: torch.Tensor, host: torch.Tensor) -> None:
        dst, src = (host, device) if self._direction is Direction.STORE else (device, host)
        # Right for pageable memory too: nothing reads the bytes before the transfer's event.
        dst.copy_(src, non_blocking=True)

    def _index(self, part: Request) -> torch.Tensor:
        """The blocks' numbers on the device, without waiting for the stream."""
        index = torch.tensor(part.blocks.tolist())
        if self._device.type == "cuda":
            index = index.pin_memory()
        return index.to(self._device, non_blocking=True)


def collect(parts: Sequence[Bundle], index: torch.Tensor, images: torch.Tensor) -> None:
    """Gathers the pages of the blocks in `index` into uint8 `[len(index), block_bytes]`."""
    for bundle in parts:
        out = _part_of_images(bundle, images)
        torch.index_select(bundle.view, 0, index, out=out)


def distribute(parts: Sequence[Bundle], index: torch.Tensor, images: torch.Tensor) -> None:
    """Scatters uint8 `[len(index), block_bytes]` to the pages of the blocks in `index`."""
    for bundle in parts:
        bundle.view.index_copy_(0, index, _part_of_images(bundle, images))


def _part_of_images(bundle: Bundle, images: torch.Tensor) -> torch.Tensor:
    part = images[:, bundle.start : bundle.start + bundle.nbytes].view(bundle.view.dtype)
    return part.unflatten(1, bundle.view.shape[1:])
