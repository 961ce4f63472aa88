# SPDX-License-Identifier: Apache-2.0
"""How much of a large memcpy's rate do copies between device pages and slots reach?

    python -m benchmarks.tier_copy [--quick]

Chunks of scattered blocks are stored and loaded through the copy engine, one `submit` a chunk, for
page sizes from 8 to 512 KiB. The limit beside it is one large copy of as many bytes between the
same two memories, in the same direction, by the same number of threads. Both run in turns, and each
ratio is of two runs that followed each other.

In CPU memory, threads each copy at least 256 MiB in one `memcpy`: large enough that libc bypasses
the caches, its fastest way. Two buffers of 2 GiB each, all touched before, are visited in random
order, so caches (300 MiB on large servers) hold little of what is read next. The cache's memory is
an ordinary torch allocation, as vLLM's is. The arm "numpy" is the fallback without a streaming
copy.

On a GPU "lanes" take the place of threads: 1 is one direction alone, 2 is a store and a load at the
same time on their two streams. The limit is one `cudaMemcpyAsync` for each. GPU arms have not been
run so far.

Bytes are compared after copies in both directions before anything is timed.
"""

from __future__ import annotations

import argparse
import ctypes
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from benchmarks._report import Report
from benchmarks._threads import in_threads
from vllm_tiered_kv.layout import GroupPages, group_pages
from vllm_tiered_kv.worker.copy import BlockCopies, Copier, Direction, Transfer
from vllm_tiered_kv.worker.copy.cuda import CudaCopier, Way
from vllm_tiered_kv.worker.copy.host import HostCopier, NumpyEngine, StreamingEngine
from vllm_tiered_kv.worker.copy.streaming import streaming_copy
from vllm_tiered_kv.worker.pool import HostPool

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGES = tuple(n * KIB for n in (8, 16, 32, 64, 128, 256, 512))
CHUNKS = (1 * MIB, 2 * MIB, 4 * MIB)
SAMPLE_BYTES = 256 * MIB  # a thread and run
BUFFER_BYTES = 2 * GIB
MAX_LAYERS = 8
IN_FLIGHT = 8  # submits not yet waited for, as a mover would have on a GPU

SMALL_PAGE_GOAL = 0.6
LARGE_PAGE_GOAL = 0.85


class Case(NamedTuple):
    page: int
    chunk: int
    lanes: int

    @property
    def layers(self) -> int:
        return min(MAX_LAYERS, CHUNKS[0] // self.page)

    @property
    def block_bytes(self) -> int:
        return self.page * self.layers

    @property
    def goal(self) -> float | None:
        if self.page >= 64 * KIB:
            return LARGE_PAGE_GOAL
        return SMALL_PAGE_GOAL if self.page == 8 * KIB else None

    def __str__(self) -> str:
        return f"{self.page // KIB} KiB pages, {self.chunk // MIB} MiB chunks, x{self.lanes}"


class Memory:
    """Both sides: the cache's buffer on the device, and the pool; all touched, no zeros."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache = torch.zeros(BUFFER_BYTES, dtype=torch.int8, device=device)
        self.pool = HostPool(BUFFER_BYTES // CHUNKS[-1], CHUNKS[-1], pin=device.type == "cuda")
        self.pool.prefault()
        for slot in range(self.pool.num_slots):
            if not self.pool.ensure(slot):
                raise RuntimeError(f"slot {slot} can't be used")
        noise = torch.randint(-128, 127, (64 * MIB,), dtype=torch.int8)
        for start in range(0, BUFFER_BYTES, len(noise)):
            self.cache[start : start + len(noise)].copy_(noise)
            self.pool.tensor[start : start + len(noise)].copy_(noise.view(torch.uint8))
        if device.type == "cuda":
            torch.cuda.synchronize()

    def group(self, case: Case) -> GroupPages:
        """Layers with regions of their own (the LBHNC layout)."""
        blocks = BUFFER_BYTES // case.block_bytes
        layers = self.cache.view(case.layers, blocks, case.page)
        return group_pages(list(layers), blocks)


class Chunks:
    """An endless supply of chunks for each lane: scattered blocks, and slots one after another."""

    def __init__(self, case: Case, lanes: int, seed: int = 0) -> None:
        self._case = case
        blocks = list(range(BUFFER_BYTES // case.block_bytes))
        random.Random(seed).shuffle(blocks)
        per_chunk = case.chunk // case.block_bytes
        cut = [blocks[i : i + per_chunk] for i in range(0, len(blocks), per_chunk)]
        self._chunks = [cut[lane::lanes] for lane in range(lanes)]
        self._lanes = lanes
        self._next = [0] * lanes

    def take(self, lane: int) -> list[BlockCopies]:
        """A run's chunks for one lane. Lanes never share a block or a slot."""
        return [self._one(lane) for _ in range(SAMPLE_BYTES // self._case.chunk)]

    def _one(self, lane: int) -> BlockCopies:
        number = self._next[lane]
        self._next[lane] = number + 1
        mine = self._chunks[lane]
        blocks = mine[number % len(mine)]
        slot = (number % len(mine)) * self._lanes + lane
        size = self._case.block_bytes
        offsets = [slot * self._case.chunk + i * size for i in range(len(blocks))]
        return BlockCopies(0, blocks, offsets)


def copy_chunks(copier: Copier, direction: Direction, copies: Sequence[BlockCopies]) -> None:
    """One lane's run: a submit for each chunk, a few of them under way at a time."""
    waiting: list[Transfer] = []
    for copy in copies:
        waiting.append(copier.submit(direction, [copy], None))
        if len(waiting) == IN_FLIGHT:
            finish(waiting.pop(0))
    for transfer in waiting:
        finish(transfer)


def finish(transfer: Transfer) -> None:
    if not transfer.wait(60):
        raise RuntimeError("a copy took more than a minute")


class Limit:
    """One large copy a lane, each run in another place."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._run = 0
        self._memcpy = ctypes.CDLL(None).memcpy
        self._memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._streams = (
            [torch.cuda.Stream(memory.device) for _ in range(2)]
            if memory.device.type == "cuda"
            else []
        )

    def works(self, directions: Sequence[Direction]) -> list[Callable[[], None]]:
        works = []
        places = BUFFER_BYTES // SAMPLE_BYTES
        for lane, direction in enumerate(directions):
            start = (self._run * len(directions) + lane) % places * SAMPLE_BYTES
            works.append(self._work(lane, direction, start))
        self._run += 1
        return works

    def _work(self, lane: int, direction: Direction, start: int) -> Callable[[], None]:
        cache = self._memory.cache.view(torch.uint8)[start : start + SAMPLE_BYTES]
        # A copy must not cross the pieces in which memory is pinned; one fills a piece.
        pool = self._memory.pool.tensor[start : start + SAMPLE_BYTES]
        dst, src = (pool, cache) if direction is Direction.STORE else (cache, pool)

        def on_host() -> None:
            self._memcpy(dst.data_ptr(), src.data_ptr(), SAMPLE_BYTES)

        def on_gpu() -> None:
            with torch.cuda.stream(self._streams[lane]):
                dst.copy_(src, non_blocking=True)
            self._streams[lane].synchronize()

        return on_gpu if self._streams else on_host


def copiers(memory: Memory, group: GroupPages, quick: bool) -> dict[str, Copier]:
    """The arms; the first is what the connector would use, the only one in a quick run."""
    arms: dict[str, Copier]
    if memory.device.type == "cuda":
        arms = {"auto": CudaCopier([group], memory.pool)}
        if not quick:
            arms.update({way.value: CudaCopier([group], memory.pool, way) for way in Way})
        return arms
    pool = memory.pool
    arms = {}
    streaming = streaming_copy()
    if streaming is not None:
        engine = StreamingEngine([group], pool.tensor, streaming)
        arms["streaming"] = HostCopier([group], pool, engine)
    if streaming is None or not quick:
        arms["numpy"] = HostCopier([group], pool, NumpyEngine([group], pool.tensor))
    return arms


def directions_of(memory: Memory, lanes: int) -> Iterator[tuple[str, list[Direction]]]:
    """What the lanes of one run do, and its name."""
    if memory.device.type == "cuda" and lanes == 2:
        yield "store and load", [Direction.STORE, Direction.LOAD]
        return
    for direction in Direction:
        yield direction.value, [direction] * lanes


def verify(case: Case, group: GroupPages, copier: Copier, memory: Memory) -> None:
    """Stores a run's chunks, wipes a few blocks and loads them back.

    Raises:
        RuntimeError: a byte is not what it should be.
    """
    chunks = Chunks(case, 1, seed=1).take(0)[:: max(1, SAMPLE_BYTES // case.chunk // 4)]
    copy_chunks(copier, Direction.STORE, chunks)
    for chunk in chunks:
        for block, offset in zip(chunk.blocks, chunk.offsets, strict=True):
            image = torch.cat([row[block] for row in group.rows])
            if not torch.equal(memory.pool.tensor[offset : offset + len(image)], image.cpu()):
                raise RuntimeError(f"{case}: a stored block differs from its pages")
            for row in group.rows:
                row[block] = 0
        if memory.device.type == "cuda":
            torch.cuda.synchronize()
        copy_chunks(copier, Direction.LOAD, [chunk])
        for block, offset in zip(chunk.blocks, chunk.offsets, strict=True):
            image = torch.cat([row[block] for row in group.rows]).cpu()
            if not torch.equal(memory.pool.tensor[offset : offset + len(image)], image):
                raise RuntimeError(f"{case}: a loaded block differs from what was stored")


def measure(
    case: Case, memory: Memory, limit: Limit, report: Report, rounds: int, quick: bool
) -> None:
    group = memory.group(case)
    arms = copiers(memory, group, quick)
    for copier in arms.values():
        verify(case, group, copier, memory)
    for name, directions in directions_of(memory, case.lanes):
        chunks = Chunks(case, case.lanes)
        total = SAMPLE_BYTES * len(directions)
        rates: dict[str, list[float]] = {arm: [] for arm in (*arms, "memcpy")}
        ratios: dict[str, list[float]] = {arm: [] for arm in arms}
        for _ in range(rounds):
            for arm, copier in arms.items():
                runs = [chunks.take(lane) for lane in range(len(directions))]
                works = [
                    lambda c=copier, d=direction, r=run: copy_chunks(c, d, r)
                    for direction, run in zip(directions, runs, strict=True)
                ]
                seconds = in_threads(works)
                at_best = in_threads(limit.works(directions))
                rates[arm].append(total / seconds / GIB)
                rates["memcpy"].append(total / at_best / GIB)
                ratios[arm].append(at_best / seconds)
        first = next(iter(arms))
        for arm in arms:
            goal = case.goal if arm == first else None
            report.add(f"{name}, {case}", arm, ratios[arm], "of memcpy", goal=goal)
        for arm, values in rates.items():
            report.add(f"{name}, {case}", arm, values, "GiB/s")
    for copier in arms.values():
        copier.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tier_copy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="three page sizes, one chunk size")
    quick: bool = parser.parse_args().quick
    pages = (8 * KIB, 64 * KIB, 512 * KIB) if quick else PAGES
    chunk_sizes = (2 * MIB,) if quick else CHUNKS
    rounds = 7 if quick else 9

    memory = Memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    limit = Limit(memory)
    report = Report(
        "tier_copy",
        notes=(
            f"{rounds} rounds; {SAMPLE_BYTES // MIB} MiB a lane and run",
            f"two buffers of {BUFFER_BYTES // MIB} MiB; device {memory.device.type}",
            "ratios are of runs that followed each other; spread is smallest and largest",
        ),
    )
    for page in pages:
        for chunk in chunk_sizes:
            for lanes in (1, 2):
                measure(Case(page, chunk, lanes), memory, limit, report, rounds, quick)
    report.finish()


if __name__ == "__main__":
    main()
