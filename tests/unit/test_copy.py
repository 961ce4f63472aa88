# SPDX-License-Identifier: Apache-2.0
"""Copies: every byte of a page there and back, none beside it, in every way of copying.

The GPU's ways run on CPU tensors here, with a stand-in for the driver, streams and events.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit._fake_cuda import FakeEvent, FakeLibrary, install
from tests.unit._layouts import ORDERS, Cache, Shape, make_cache, shapes
from vllm_tiered_kv.layout import GroupPages, group_pages
from vllm_tiered_kv.worker.copy import cuda, host, streaming
from vllm_tiered_kv.worker.copy.base import (
    BlockCopies,
    Copier,
    CopyError,
    Direction,
    open_copier,
)
from vllm_tiered_kv.worker.copy.cuda import CudaCopier, Way, choose_way
from vllm_tiered_kv.worker.copy.host import HostCopier, NumpyEngine, StreamingEngine
from vllm_tiered_kv.worker.copy.plan import GroupPlan, Request, Runs, bundles, merge
from vllm_tiered_kv.worker.cuda_driver import CudaDriver, DriverError, MemcpyAttributes
from vllm_tiered_kv.worker.pool import HostPool

OpenCopier = Callable[[Sequence[GroupPages], HostPool], Copier]
WAYS = ("streaming", "numpy", "cuda-batch", "cuda-gather", "cuda-rows", "cuda")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return install(monkeypatch)


@pytest.fixture(params=WAYS)
def open_one(request: pytest.FixtureRequest) -> OpenCopier:
    """Opens a copier that copies in one given way."""
    name: str = request.param
    if name == "numpy":
        return lambda groups, pool: HostCopier(groups, pool, NumpyEngine(groups, pool.tensor))
    if name == "streaming":
        if streaming._obstacle() is not None:
            pytest.skip("no streaming copies on this machine")
        copy = streaming.streaming_copy()
        assert copy is not None
        return lambda groups, pool: HostCopier(
            groups, pool, StreamingEngine(groups, pool.tensor, copy)
        )
    request.getfixturevalue("library")
    way = Way(name.removeprefix("cuda-")) if "-" in name else None
    return lambda groups, pool: CudaCopier(groups, pool, way)


def pool_of(slots: int, slot_bytes: int) -> HostPool:
    pool = HostPool(slots, slot_bytes, pin=True)
    for slot in range(slots):
        assert pool.ensure(slot)
    return pool


# -- every byte ---------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), shape=shapes())
def test_a_block_stored_and_loaded_elsewhere(
    open_one: OpenCopier, data: st.DataObject, shape: Shape
) -> None:
    cache = make_cache(shape)
    group = group_pages(cache.tensors, shape.blocks)
    blocks = data.draw(st.permutations(range(shape.blocks)))
    blocks = blocks[: data.draw(st.integers(1, shape.blocks))]
    slots = data.draw(st.permutations(range(shape.blocks)))[: len(blocks)]
    gap = data.draw(st.sampled_from((0, 1, 64)))
    size = group.block_bytes + gap
    offsets = [slot * size + gap for slot in slots]
    pool = pool_of(shape.blocks, size + gap)
    pool.tensor.fill_(0xAA)
    copier = open_one([group], pool)

    expected = pool.tensor.clone()
    for block, offset in zip(blocks, offsets, strict=True):
        expected[offset : offset + group.block_bytes] = cache.image(block)
    stored = copier.submit(Direction.STORE, [BlockCopies(0, tuple(blocks), offsets)], None)
    assert stored.wait(10)
    assert torch.equal(pool.tensor, expected)

    other = make_cache(shape, seed=1)
    untouched = make_cache(shape, seed=1)
    targets = data.draw(st.permutations(range(shape.blocks)))[: len(blocks)]
    for block, target in zip(blocks, targets, strict=True):
        for layer in range(shape.layers):
            # Through bytes: the random bits of a float may not survive a copy as a number.
            source = cache.entries(layer, block).view(torch.uint8)
            untouched.entries(layer, target).view(torch.uint8).copy_(source)
    copier.close()

    copier = open_one([group_pages(other.tensors, shape.blocks)], pool)
    assert copier.submit(Direction.LOAD, [BlockCopies(0, targets, offsets)], None).wait(10)
    assert torch.equal(other.buffer, untouched.buffer)
    assert torch.equal(pool.tensor, expected)
    copier.close()
    pool.close()


PAGE = 64 << 10
BIG = Shape(
    order=ORDERS["LBHNC"], layers=3, blocks=8, heads=4, tokens=64, content=256, dtype=torch.uint8
)


@pytest.fixture
def cache() -> Cache:
    return make_cache(BIG)


@pytest.fixture
def group(cache: Cache) -> GroupPages:
    return group_pages(cache.tensors, BIG.blocks)


def test_pages_of_a_real_size(open_one: OpenCopier, cache: Cache, group: GroupPages) -> None:
    assert group.row_bytes == (PAGE,) * 3
    pool = pool_of(8, 3 * PAGE)
    copier = open_one([group], pool)
    blocks = (7, 0, 3, 4)
    offsets = [i * 3 * PAGE for i in (5, 1, 2, 3)]
    assert copier.submit(Direction.STORE, [BlockCopies(0, blocks, offsets)], None).wait(10)
    for block, offset in zip(blocks, offsets, strict=True):
        assert torch.equal(pool.tensor[offset : offset + 3 * PAGE], cache.image(block))
    before = cache.buffer.clone()
    for row in group.rows:
        row[list(blocks)] = 0
    assert copier.submit(Direction.LOAD, [BlockCopies(0, blocks, offsets)], None).wait(10)
    assert torch.equal(cache.buffer, before)
    copier.close()
    pool.close()


def test_rows_of_odd_sizes(open_one: OpenCopier) -> None:
    """Images whose parts are not aligned to the elements that would fit each row alone."""
    sizes = (16, 5, 24, 7)
    tensors = [torch.arange(4 * n).to(torch.uint8).view(4, n) + n for n in sizes]
    group = group_pages(tensors, 4)
    expected = torch.cat([tensor[2] for tensor in tensors])
    pool = pool_of(2, 64)
    copier = open_one([group], pool)
    copier.submit(Direction.STORE, [BlockCopies(0, (2, 0), (64, 3))], None)
    assert torch.equal(pool.tensor[64 : 64 + sum(sizes)], expected)
    copier.submit(Direction.LOAD, [BlockCopies(0, (3,), (64,))], None)
    assert torch.equal(torch.cat([tensor[3] for tensor in tensors]), expected)
    copier.close()
    pool.close()


def test_several_groups_in_one_submit(open_one: OpenCopier, cache: Cache) -> None:
    other = make_cache(Shape(order=ORDERS["BLNHC"], layers=2, blocks=5, dtype=torch.float32))
    groups = [group_pages(cache.tensors, 8), group_pages(other.tensors, 5)]
    pool = pool_of(4, 3 * PAGE)
    copier = open_one(groups, pool)
    size = groups[1].block_bytes
    copies = [
        BlockCopies(1, (4, 2), (0, size)),
        BlockCopies(0, (), ()),
        BlockCopies(0, (6,), (3 * PAGE,)),
    ]
    transfer = copier.submit(Direction.STORE, copies, copier.mark())
    assert transfer.wait(10)
    assert transfer.done()
    assert torch.equal(pool.tensor[:size], other.image(4))
    assert torch.equal(pool.tensor[size : 2 * size], other.image(2))
    assert torch.equal(pool.tensor[3 * PAGE : 6 * PAGE], cache.image(6))
    copier.close()
    pool.close()


def test_two_threads(open_one: OpenCopier, cache: Cache, group: GroupPages) -> None:
    pool = pool_of(8, 3 * PAGE)
    copier = open_one([group], pool)
    images = [cache.image(block) for block in range(8)]
    barrier = threading.Barrier(2, timeout=30)
    failures: list[BaseException] = []

    def work(mine: range) -> None:
        """Each round stores this thread's blocks, wipes them and loads them in reverse order."""
        try:
            for _ in range(10):
                barrier.wait()
                offsets = [block * 3 * PAGE for block in mine]
                pages = BlockCopies(0, list(mine), offsets)
                assert copier.submit(Direction.STORE, [pages], None).wait(10)
                for row in group.rows:
                    row[list(mine)] = 0
                assert copier.submit(Direction.LOAD, [pages], None).wait(10)
        except BaseException as error:  # noqa: BLE001 - reported by the main thread
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(range(i, 8, 2),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for block in range(8):
        offset = block * 3 * PAGE
        assert torch.equal(cache.image(block), images[block])
        assert torch.equal(pool.tensor[offset : offset + 3 * PAGE], images[block])
    copier.close()
    pool.close()


def test_caches_made_in_inference_mode_are_written_from_a_thread(open_one: OpenCopier) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(4, 64)
        group = group_pages([tensor], 4)
    pool = pool_of(1, 256)
    pool.tensor.fill_(5)
    copier = open_one([group], pool)
    ended: list[bool] = []

    def load() -> None:
        copies = [BlockCopies(0, (2,), (0,))]
        ended.append(copier.submit(Direction.LOAD, copies, None).wait(10))

    thread = threading.Thread(target=load)
    thread.start()
    thread.join(30)
    assert ended == [True]
    assert int(group.rows[0].sum()) == 5 * 256
    copier.close()
    pool.close()


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        (BlockCopies(1, (0,), (0,)), "no group 1"),
        (BlockCopies(-1, (0,), (0,)), "no group -1"),
        (BlockCopies(0, (8,), (0,)), "block is out of range: 8"),
        (BlockCopies(0, (0, -1), (0, 3 * PAGE)), "block is out of range: -1"),
        (BlockCopies(0, (0, 1), (0, 3 * PAGE + 1)), "offset is out of range"),
        (BlockCopies(0, (0,), (-1,)), "offset is out of range: -1"),
        (BlockCopies(0, (0, 1), (0,)), "2 blocks but 1 offsets"),
        (BlockCopies(0, (1 << 70,), (0,)), "not a number that fits"),
        (BlockCopies(0, (0.5,), (0,)), "not a number that fits"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("direction", Direction)
def test_what_is_out_of_range_is_refused_before_memory_is_touched(
    open_one: OpenCopier,
    cache: Cache,
    group: GroupPages,
    direction: Direction,
    copies: BlockCopies,
    words: str,
) -> None:
    pool = pool_of(2, 3 * PAGE)
    copier = open_one([group], pool)
    before = cache.buffer.clone()
    with pytest.raises(CopyError, match=words):
        copier.submit(direction, [BlockCopies(0, (5,), (0,)), copies], None)
    assert torch.equal(cache.buffer, before)
    assert not pool.tensor.any()
    copier.close()
    pool.close()


def test_a_closed_copier_refuses(open_one: OpenCopier, group: GroupPages) -> None:
    pool = pool_of(1, 3 * PAGE)
    copier = open_one([group], pool)
    copier.close()
    copier.close()
    with pytest.raises(CopyError, match="closed"):
        copier.submit(Direction.STORE, [BlockCopies(0, (0,), (0,))], None)
    pool.close()


def test_the_copier_is_chosen_by_device(group: GroupPages) -> None:
    pool = HostPool(1, 4096, pin=False)
    assert isinstance(open_copier([group], pool), HostCopier)
    elsewhere = group_pages([torch.zeros(4, 8, device="meta")], 4)
    with pytest.raises(CopyError, match="no copier for KV caches on meta"):
        open_copier([elsewhere], pool)
    with pytest.raises(CopyError, match="one device"):
        open_copier([group, elsewhere], pool)
    with pytest.raises(CopyError, match="one device"):
        open_copier([], pool)
    pool.close()


# -- the host's engines -------------------------------------------------------------------


def test_without_a_streaming_copy_numpy_copies(
    group: GroupPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    streaming.streaming_copy.cache_clear()
    monkeypatch.setattr(streaming, "_may_run_new_code", lambda: False)
    pool = HostPool(1, 4096, pin=False)
    try:
        assert isinstance(host.choose_engine([group], pool), NumpyEngine)
        assert "half speed" in caplog.text
    finally:
        streaming.streaming_copy.cache_clear()
        pool.close()


# -- addresses ----------------------------------------------------------------------------


def runs(*triples: tuple[int, int, int]) -> Runs:
    return Runs(*np.array(triples, dtype=np.int64).T)


def triples(runs: Runs) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in runs), strict=True))


def test_runs_that_continue_each_other_are_joined() -> None:
    apart = [(0, 1000, 8), (8, 1016, 8), (24, 1024, 8)]  # neighbours on one side only
    assert triples(merge(runs(*apart), 0, 0)) == apart
    joined = runs((0, 1000, 8), (8, 1008, 4), (12, 1012, 8), (0, 1020, 8), (8, 1028, 8))
    assert triples(merge(joined, 0, 0)) == [(0, 1000, 20), (0, 1020, 16)]
    assert triples(merge(runs((5, 6, 7)), 0, 0)) == [(5, 6, 7)]


def test_runs_end_where_a_pinned_piece_does() -> None:
    four = runs(*((8 * i, 1000 + 8 * i, 8) for i in range(4)))
    assert triples(merge(four, 1000, 16)) == [(0, 1000, 16), (16, 1016, 16)]


def test_the_runs_of_pages() -> None:
    buffer = torch.zeros(4 * 64, dtype=torch.uint8)
    tensors = [buffer.as_strided((4, 24), (64, 1), start) for start in (0, 32)]
    plan = GroupPlan(group_pages(tensors, 4))
    base = buffer.data_ptr()
    request = Request(0, array("q", (3, 1)), array("q", (100, 0)))
    assert triples(plan.page_runs(request, 5000)) == [
        (base + 192, 5100, 24),
        (base + 224, 5124, 24),
        (base + 64, 5000, 24),
        (base + 96, 5024, 24),
    ]
    assert triples(plan.image_runs(request, 5000, 300, 0)) == [(300, 5100, 48), (348, 5000, 48)]


def test_dense_blocks_make_one_run() -> None:
    cache = make_cache(Shape(order=ORDERS["BLHNC"]))
    plan = GroupPlan(group_pages(cache.tensors, 4))
    request = Request(0, array("q", (1, 2, 3, 0)), array("q", (72, 144, 216, 0)))
    assert [run[2] for run in triples(plan.page_runs(request, 0))] == [216, 72]


def test_bundles_join_rows_at_equal_distances() -> None:
    buffer = torch.zeros(1024, dtype=torch.uint8)
    starts = (0, 64, 128, 200, 272)  # two distances
    tensors = [buffer.as_strided((2, 16), (512, 1), start) for start in starts]
    tensors.append(buffer.as_strided((2, 8), (512, 1), 344))  # another size
    tensors.append(torch.zeros(2, 8, dtype=torch.uint8))  # another allocation
    found = bundles(group_pages(tensors, 2))
    assert [(b.view.shape[1], b.start, b.nbytes) for b in found] == [
        (3, 0, 48),
        (2, 48, 32),
        (1, 80, 8),
        (1, 88, 8),
    ]


@pytest.mark.parametrize(
    ("row_bytes", "stride", "dtype"),
    [
        (16, 64, torch.int64),
        (12, 64, torch.int32),
        (16, 50, torch.int16),
        (15, 64, torch.uint8),
    ],
)
def test_bundles_use_the_widest_elements_that_fit(
    row_bytes: int, stride: int, dtype: torch.dtype
) -> None:
    buffer = torch.zeros(256, dtype=torch.uint8)
    pages = group_pages([buffer.as_strided((3, row_bytes), (stride, 1))], 3)
    assert bundles(pages, widest=8)[0].view.dtype == dtype
    assert bundles(pages)[0].view.dtype == torch.uint8


# -- the GPU's ways, with stand-ins -------------------------------------------------------


def pages_of(row_bytes: int, rows: int = 2) -> GroupPages:
    return group_pages([torch.zeros(2, row_bytes, dtype=torch.uint8) for _ in range(rows)], 2)


@pytest.mark.parametrize(
    ("row_bytes", "has_batch", "pinned", "staging", "way"),
    [
        (8 << 10, True, True, 1 << 20, Way.GATHER),
        (8 << 10, False, True, 1 << 20, Way.GATHER),
        (8 << 10, True, True, 10 << 10, Way.BATCH),  # no room for an image
        (8 << 10, True, False, 1 << 20, Way.ROWS),
        (28 << 10, True, True, 1 << 20, Way.BATCH),
        (28 << 10, False, True, 1 << 20, Way.ROWS),
        (512 << 10, True, False, 1 << 20, Way.ROWS),
    ],
)
def test_the_way_of_copying(
    row_bytes: int, has_batch: bool, pinned: bool, staging: int, way: Way
) -> None:
    pages = pages_of(row_bytes)
    chosen = choose_way(pages, has_batch=has_batch, pinned=pinned, staging_bytes=staging)
    assert chosen is way


def cuda_copier(
    group: GroupPages, way: Way | None = None, slots: int = 8
) -> tuple[CudaCopier, HostPool]:
    pool = pool_of(slots, 3 * PAGE)
    return CudaCopier([group], pool, way), pool


@pytest.fixture
def batch(library: FakeLibrary, group: GroupPages) -> Iterator[CudaCopier]:
    copier, pool = cuda_copier(group, Way.BATCH)
    yield copier
    copier.close()
    pool.close()


TWO = [BlockCopies(0, (0, 5), (0, 3 * PAGE))]


def test_copies_wait_for_the_mark_on_their_own_stream(batch: CudaCopier) -> None:
    mark = batch.mark()
    assert isinstance(mark, FakeEvent)
    assert mark.recorded is torch.cuda.current_stream(torch.device("cpu"))
    batch.submit(Direction.STORE, TWO, mark)
    store, load = batch._lanes[Direction.STORE], batch._lanes[Direction.LOAD]
    assert store._stream.waited == [mark]
    assert load._stream.waited == []
    transfer = batch.submit(Direction.LOAD, TWO, None)
    assert transfer._event.recorded is load._stream is not store._stream


def test_only_loads_may_read_their_source_ahead_of_the_stream(
    batch: CudaCopier, library: FakeLibrary
) -> None:
    batch.submit(Direction.STORE, TWO, None)
    batch.submit(Direction.LOAD, TWO, None)
    assert library.batches == [(6, 1), (6, 3)]


def test_a_batch_has_a_bounded_number_of_copies(
    batch: CudaCopier, library: FakeLibrary, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_BATCH_RUNS", 4)
    pool = batch._pool
    batch.submit(Direction.STORE, TWO, None)
    assert [count for count, _ in library.batches] == [4, 2]
    assert torch.equal(pool.tensor[3 * PAGE : 6 * PAGE], cache.image(5))


def test_the_staging_buffer_is_bounded(
    library: FakeLibrary, cache: Cache, group: GroupPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "STAGING_BYTES", 7 * PAGE)  # two images of three
    copier, pool = cuda_copier(group, Way.GATHER)
    blocks, offsets = (4, 2, 6, 1, 0), [i * 3 * PAGE for i in (0, 1, 3, 4, 7)]
    before = cache.buffer.clone()
    copier.submit(Direction.STORE, [BlockCopies(0, blocks, offsets)], None)
    for block, offset in zip(blocks, offsets, strict=True):
        assert torch.equal(pool.tensor[offset : offset + 3 * PAGE], cache.image(block))
    for row in group.rows:
        row[list(blocks)] = 0
    copier.submit(Direction.LOAD, [BlockCopies(0, blocks, offsets)], None)
    assert torch.equal(cache.buffer, before)
    staging = copier._lanes[Direction.STORE]._staging
    assert staging is not None
    assert staging.numel() == 7 * PAGE
    copier.close()
    pool.close()


def test_memory_that_is_not_pinned_goes_row_by_row(
    library: FakeLibrary, cache: Cache, group: GroupPages
) -> None:
    library.register_limit = 0
    copier, pool = cuda_copier(group, Way.BATCH)
    assert copier.submit(Direction.STORE, TWO, None).wait(1)
    assert library.batches == []
    assert torch.equal(pool.tensor[: 3 * PAGE], cache.image(0))
    copier.close()
    pool.close()


def test_a_transfer_is_done_when_its_event_is(batch: CudaCopier) -> None:
    transfer = batch.submit(Direction.STORE, TWO, None)
    event = transfer._event
    assert isinstance(event, FakeEvent)
    event.complete = False
    assert not transfer.done()
    assert not transfer.wait(0.01)
    event.complete = True
    assert transfer.wait(0)


def test_a_copy_that_could_not_be_enqueued_fails_once_nothing_is_under_way(
    batch: CudaCopier, library: FakeLibrary
) -> None:
    library.fail_batch = True
    transfer = batch.submit(Direction.STORE, TWO, None)
    event = transfer._event
    assert isinstance(event, FakeEvent)
    event.complete = False
    assert not transfer.done()
    event.complete = True
    with pytest.raises(CopyError, match=r"CUDA_ERROR_INVALID_VALUE \(1\) at copy 5 of 6"):
        transfer.wait(1)


def test_a_broken_gpu_fails_the_transfer(
    batch: CudaCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = batch.submit(Direction.STORE, TWO, None)

    def query(self: FakeEvent) -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(FakeEvent, "query", query)
    with pytest.raises(CopyError, match="illegal memory access"):
        transfer.done()


def test_the_driver_without_batched_copies(library: FakeLibrary) -> None:
    library.has_batch = False
    driver = CudaDriver(library)
    assert not driver.has_batch
    nothing = np.zeros(1, dtype=np.int64)
    with pytest.raises(DriverError, match=r"CUDA 12\.8"):
        driver.memcpy_batch(nothing, nothing, nothing, cuda.SourceOrder.STREAM, 1)


def test_a_driver_needs_a_context_and_its_functions(library: FakeLibrary) -> None:
    library.cuCtxGetCurrent = lambda context: 0  # type: ignore[method-assign]
    with pytest.raises(DriverError, match="no CUDA context"):
        CudaDriver(library)
    with pytest.raises(DriverError, match="not in this driver"):
        CudaDriver(object())


def test_the_device_address_comes_from_the_driver(library: FakeLibrary) -> None:
    assert CudaDriver(library).pci_bus_id() == "0000:1B:00.0"


def test_the_attributes_have_the_layout_of_the_header() -> None:
    # Four-byte fields throughout: access order, two locations of two fields, flags.
    assert ctypes.sizeof(MemcpyAttributes) == 24
    assert MemcpyAttributes.src_loc_hint.offset == 4
    assert MemcpyAttributes.dst_loc_hint.offset == 12
    assert MemcpyAttributes.flags.offset == 20
