# SPDX-License-Identifier: Apache-2.0
"""The pool: never more memory than configured, pinned in whole slots, gone after close()."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit._fake_cuda import FakeLibrary, install
from vllm_tiered_kv.worker import pool as pool_module
from vllm_tiered_kv.worker.numa import cpus_near_pci_device, parse_cpu_list
from vllm_tiered_kv.worker.pool import HostPool, PoolError

KIB, MIB = 1 << 10, 1 << 20
SMAPS = Path("/proc/self/smaps")


def mapping(address: int) -> str | None:
    """The entry of /proc/self/smaps that covers an address."""
    entry: list[str] = []
    for line in SMAPS.read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if header:
            if entry:
                break
            start, end = (int(bound, 16) for bound in header.groups())
            if start <= address < end:
                entry.append(line)
        elif entry:
            entry.append(line)
    return "\n".join(entry) or None


def kib(address: int, field: str) -> int:
    found = re.search(rf"^{field}: +(\d+) kB", mapping(address) or "", re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(6, 3 * MIB + 4 * KIB, pin=False)
    yield pool
    pool.close()


def finish(pool: HostPool) -> None:
    assert pool._thread is not None
    pool._thread.join(60)
    assert not pool._thread.is_alive()


def test_slots_are_one_tensor_of_bytes(pool: HostPool) -> None:
    assert pool.tensor.shape == (6 * (3 * MIB + 4 * KIB),)
    assert pool.tensor.dtype == torch.uint8
    assert not pool.tensor.any()
    assert pool.tensor.data_ptr() % mmap.PAGESIZE == 0


def test_nothing_is_resident_before_it_is_used(pool: HostPool) -> None:
    assert kib(pool.tensor.data_ptr(), "Rss") == 0


def test_prefault_makes_all_of_it_resident_and_no_more(pool: HostPool) -> None:
    pool.prefault()
    finish(pool)
    if _has_populate():
        assert kib(pool.tensor.data_ptr(), "Rss") * KIB == pool.tensor.numel()
    assert kib(pool.tensor.data_ptr(), "Size") * KIB == pool.tensor.numel()


def _has_populate() -> bool:
    major, minor = re.match(
        r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text()
    ).groups()
    return (int(major), int(minor)) >= (5, 14)


def test_resident_memory_stays_within_the_configured_size_when_all_is_written() -> None:
    pool = HostPool(3, 1000, pin=False)  # not a whole number of memory pages
    pool.tensor.fill_(1)
    assert kib(pool.tensor.data_ptr(), "Rss") * KIB == mmap.PAGESIZE
    pool.close()


def test_prefault_leaves_contents_alone(pool: HostPool) -> None:
    pool.tensor[::4096] = 7
    pool.tensor[1] = 9
    expected = pool.tensor.clone()
    pool.prefault()
    finish(pool)
    assert torch.equal(pool.tensor, expected)


def test_prefault_runs_once_and_not_after_close(pool: HostPool) -> None:
    pool.prefault()
    thread = pool._thread
    pool.prefault()
    assert pool._thread is thread
    pool.close()

    closed = HostPool(1, 4096, pin=False)
    closed.close()
    closed.prefault()
    assert closed._thread is None


def test_the_thread_stops_between_two_pieces(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []

    def madvise(address: int, nbytes: int, advice: int) -> int:
        pieces.append(nbytes)
        pool._stop.set()
        return 0

    monkeypatch.setattr(pool_module, "_FAULT_PIECE_BYTES", 4 * MIB)
    monkeypatch.setattr(pool_module, "_libc_madvise", lambda: madvise)
    pool.prefault()
    finish(pool)
    assert pieces == [4 * MIB]


def test_close_stops_the_thread_and_unmaps() -> None:
    pool = HostPool(64, 4 * MIB, pin=False)
    address = pool.tensor.data_ptr()
    pool.prefault()
    thread = pool._thread
    pool.close()
    assert thread is not None
    assert not thread.is_alive()
    assert mapping(address) is None or kib(address, "Size") != 64 * 4 * KIB
    pool.close()
    with pytest.raises(PoolError, match="closed"):
        _ = pool.tensor
    assert not pool.ensure(0)


def test_views_outlive_close() -> None:
    pool = HostPool(2, 4 * MIB, pin=False)
    pool.tensor[5:10] = 3
    view = pool.tensor[:16]
    address = view.data_ptr()
    pool.close()
    assert int(view.sum()) == 15
    view.fill_(1)
    assert int(view.sum()) == 16
    del view
    assert mapping(address) is None or kib(address, "Size") != 8 * KIB


def test_contents_are_kept_from_core_dumps_and_children(pool: HostPool) -> None:
    flags = re.search(r"VmFlags: (.*)", mapping(pool.tensor.data_ptr()) or "")
    assert flags is not None
    assert {"dd", "dc"} <= set(flags[1].split())


@pytest.mark.parametrize(("slots", "size"), [(0, 1), (1, 0), (-1, 5), (1, 1 << 60), (1, 1 << 70)])
def test_memory_that_cannot_be_had(slots: int, size: int) -> None:
    with pytest.raises(PoolError):
        HostPool(slots, size, pin=False)


def test_without_a_gpu_every_slot_is_ready(pool: HostPool) -> None:
    assert [pool.ensure(slot) for slot in range(-1, 7)] == [False] + [True] * 6 + [False]
    assert not pool.is_pinned(0, 1)


def test_pin_has_no_effect_where_torch_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pool = HostPool(2, 4096, pin=True)
    assert pool.ensure(1)
    assert not pool.is_pinned(4096, 4096)
    pool.close()


@given(st.integers(1, 300), st.integers(1, 3 * MIB))
def test_pieces_are_whole_slots_and_whole_memory_pages(slots: int, size: int) -> None:
    piece = pool_module._slots_per_piece(slots, size)
    assert 1 <= piece <= slots
    assert piece == slots or piece * size % mmap.PAGESIZE == 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return install(monkeypatch)


@pytest.fixture
def pinned(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostPool]:
    monkeypatch.setattr(pool_module, "PIN_PIECE_BYTES", 8 * MIB)
    pool = HostPool(9, 4 * MIB, pin=True)  # pieces of two slots, and one
    yield pool
    pool.close()


def test_a_slot_is_pinned_with_its_piece_when_it_is_needed(
    pinned: HostPool,
    library: FakeLibrary,
) -> None:
    base = pinned.tensor.data_ptr()
    assert pinned.piece_bytes == 8 * MIB
    assert pinned.ensure(3)
    assert library.registered == {base + 8 * MIB: 8 * MIB}
    assert pinned.ensure(2)
    assert pinned.ensure(8)
    assert library.registered == {base + 8 * MIB: 8 * MIB, base + 32 * MIB: 4 * MIB}
    assert pinned.is_pinned(8 * MIB, 8 * MIB)
    assert not pinned.is_pinned(8 * MIB - 1, 2)
    assert not pinned.is_pinned(16 * MIB - 1, 2)
    pinned.close()
    assert library.registered == {}


def test_prefault_pins_everything(
    pinned: HostPool,
    library: FakeLibrary,
) -> None:
    pinned.prefault()
    finish(pinned)
    assert len(library.registered) == 5
    assert sum(library.registered.values()) == pinned.tensor.numel()


def test_prefault_pins_also_where_memory_cannot_be_populated(
    pinned: HostPool,
    library: FakeLibrary,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "_MADV_POPULATE_WRITE", 12345)
    pinned.prefault()
    finish(pinned)
    assert sum(library.registered.values()) == pinned.tensor.numel()


def test_where_pinning_is_refused_the_slot_is_usable_but_not_pinned(
    pinned: HostPool,
    library: FakeLibrary,
    caplog: pytest.LogCaptureFixture,
) -> None:
    library.register_limit = 8 * MIB
    assert pinned.ensure(0)
    assert pinned.ensure(2)
    assert pinned.ensure(4)
    assert pinned.is_pinned(0, 8 * MIB)
    assert not pinned.is_pinned(8 * MIB, 4 * MIB)
    assert caplog.text.count("only 8 MiB of the CPU tier could be pinned") == 1
    assert "CUDA_ERROR_INVALID_VALUE (1)" in caplog.text


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == frozenset()
    with pytest.raises(ValueError, match="invalid literal"):
        parse_cpu_list("all")


def test_the_cpus_near_a_device(tmp_path: Path) -> None:
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    node = tmp_path / "devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("8-9\n")

    assert cpus_near_pci_device("0000:1B:00.0", tmp_path) is None
    (device / "numa_node").write_text("-1\n")
    assert cpus_near_pci_device("0000:1B:00.0", tmp_path) is None
    (device / "numa_node").write_text("1\n")
    assert cpus_near_pci_device("0000:1B:00.0", tmp_path) == {8, 9}
