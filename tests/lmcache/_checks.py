# SPDX-License-Identifier: Apache-2.0
"""Checks of the adapter with LMCache's own classes; run in LMCache's environment, without pytest.

``python -m tests.lmcache._checks FOLDER`` runs them all, one folder each, and says which failed.
"""

from __future__ import annotations

import os
import random
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import (
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import (
    L2AdaptersConfig,
    get_l2_adapter_config_class,
)
from lmcache.v1.distributed.serde import SerdeConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

PATIENCE = 60.0
SHAPE = (2, 4, 16, 8)
MODEL = "org/model"

CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def key(number: int, **changes: Any) -> ObjectKey:
    usual: dict[str, Any] = {
        "chunk_hash": random.Random(number).randbytes(32),
        "model_name": MODEL,
        "kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1),
    }
    return ObjectKey(**{**usual, **changes})


def content(seed: int | None, dtype: torch.dtype = torch.bfloat16) -> bytes:
    """Of an object of one chunk: random bytes of a seed, or zeros."""
    nbytes = torch.Size(SHAPE).numel() * dtype.itemsize
    return bytes(nbytes) if seed is None else random.Random(f"of {seed}").randbytes(nbytes)


def memory(seed: int | None, dtype: torch.dtype = torch.bfloat16) -> TensorMemoryObj:
    """An object with this :func:`content`."""
    held = bytearray(content(seed, dtype))
    meta = MemoryObjMetadata(
        shape=torch.Size(SHAPE),
        dtype=dtype,
        address=0,
        phy_size=len(held),
        ref_count=1,
        fmt=MemoryFormat.KV_2LTD,
        shapes=[torch.Size(SHAPE)],
        dtypes=[dtype],
    )
    raw = torch.frombuffer(held, dtype=torch.uint8)
    return TensorMemoryObj(raw, meta, parent_allocator=None)


def layout(dtype: torch.dtype = torch.bfloat16) -> dict[int, MemoryLayoutDesc]:
    return {0: MemoryLayoutDesc(shapes=[torch.Size(SHAPE)], dtypes=[dtype])}


def plugin_config(root: Path, **params: Any) -> Any:
    return get_l2_adapter_config_class("plugin").from_dict(
        {
            "type": "plugin",
            "module_path": "vllm_tiered_kv.integrations.lmcache",
            "class_name": "TieredKVL2Adapter",
            "adapter_params": {
                "path": str(root),
                "capacity": "64MiB",
                "min_free": 1,
                **params,
            },
        }
    )


class Heard(L2AdapterListener):
    def __init__(self) -> None:
        self.stored: dict[ObjectKey, int] = {}
        self.accessed: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        for one, size in zip(keys, sizes, strict=True):
            self.stored[one] = self.stored.get(one, 0) + size

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        for one in keys:
            del self.stored[one]


class Driver:
    """Calls the adapter as LMCache's controllers do: submit, wait for the descriptor, ask once."""

    def __init__(self, root: Path, **params: Any) -> None:
        memory = L1MemoryDesc(0, 1 << 30, 4096)
        self.adapter: Any = create_l2_adapter(plugin_config(root, **params), memory)
        self.adapter.set_backend_identity("plugin")
        self.heard = Heard()
        self.adapter.register_listener(self.heard)

    def signalled(self, fd: int, ask: Callable[[], Any]) -> Any:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if poller.poll(500):
                consume_fd(fd)
                result = ask()
                if result is not None:
                    return result
        raise AssertionError("no result")

    def store(self, keys: list[ObjectKey], objects: list[Any]) -> Any:
        task = self.adapter.submit_store_task(keys, objects)
        fd = self.adapter.get_store_event_fd()
        return self.signalled(fd, lambda: self.adapter.pop_completed_store_tasks().get(task))

    def look_up(self, keys: list[ObjectKey], layouts: Any = None) -> list[int]:
        layouts = layout() if layouts is None else layouts
        task = self.adapter.submit_lookup_and_lock_task(keys, layouts)
        fd = self.adapter.get_lookup_and_lock_event_fd()
        query = self.adapter.query_lookup_and_lock_result
        found = self.signalled(fd, lambda: query(task))
        assert query(task) is None  # told once
        return list(found.get_indices_list())

    def finds(self, keys: list[ObjectKey], layouts: Any = None) -> list[int]:
        found = self.look_up(keys, layouts)
        self.adapter.submit_unlock([keys[i] for i in found])
        return found

    def load(self, keys: list[ObjectKey], objects: list[Any]) -> list[int]:
        task = self.adapter.submit_load_task(keys, objects)
        fd = self.adapter.get_load_event_fd()
        loaded = self.signalled(fd, lambda: self.adapter.query_load_result(task))
        assert self.adapter.query_load_result(task) is None
        return list(loaded.get_indices_list())

    def loads(self, numbers: list[int]) -> list[int]:
        """Load, and see that what is said to be loaded is what was stored."""
        objects = [memory(None) for _ in numbers]
        done = self.load([key(n) for n in numbers], objects)
        for i in done:
            assert bytes(objects[i].byte_array) == content(numbers[i])
        return [numbers[i] for i in done]

    def status(self) -> dict[str, Any]:
        return dict(self.adapter.report_status())


@contextmanager
def driver(root: Path, **params: Any) -> Iterator[Driver]:
    one = Driver(root, **params)
    try:
        deadline = time.monotonic() + PATIENCE
        while not one.status()["scanned"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield one
    finally:
        one.adapter.close()


def stored(one: Driver, *numbers: int) -> None:
    result = one.store([key(n) for n in numbers], [memory(n) for n in numbers])
    assert result.is_successful()


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


@check
def round_trip_and_restart(root: Path) -> None:
    with driver(root) as one:
        result = one.store([key(1), key(2)], [memory(1), memory(2)])
        assert result.is_successful()
        assert result.bytes_transferred() == 2 * len(content(1))
        assert one.finds([key(1), key(9), key(2)]) == [0, 2]
        assert one.loads([1, 9, 2]) == [1, 2]
        assert one.heard.accessed == [key(1), key(2)]
        again = one.store([key(1)], [memory(1)])
        assert again.is_successful()
        assert again.bytes_transferred() == 0
        assert one.heard.stored == {key(n): len(content(n)) for n in (1, 2)}
    with driver(root) as one:
        assert one.finds([key(1), key(2)]) == [0, 1]
        assert one.finds([key(1)], {}) == [0]
        assert one.loads([1, 2]) == [1, 2]


@check
def descriptors_differ_and_are_closed(root: Path) -> None:
    one, other = Driver(root / "a"), Driver(root / "b")
    fds = [
        fd
        for each in (one.adapter, other.adapter)
        for fd in (
            each.get_store_event_fd(),
            each.get_lookup_and_lock_event_fd(),
            each.get_load_event_fd(),
        )
    ]
    assert len(set(fds)) == 6
    for each in (one, other):
        each.adapter.close()
    assert not [fd for fd in fds if Path(f"/proc/self/fd/{fd}").exists()]


@check
def every_part_of_the_key_and_the_type_count(root: Path) -> None:
    with driver(root) as one:
        stored(one, 1)
        others = [
            key(1, model_name="org/other"),
            key(1, kv_rank=ObjectKey.ComputeKVRank(2, 0, 2, 0)),
            key(1, object_group_id=1),
            key(1, cache_salt="tenant"),
            key(2),
        ]
        assert one.finds(others) == []
        assert one.load(others, [memory(None) for _ in others]) == []
        assert one.finds([key(1)], layout(torch.float16)) == []
        assert one.load([key(1)], [memory(None, torch.float16)]) == []
        assert one.load([key(1)], [memory(None, torch.float32)]) == []
        assert one.loads([1]) == [1]
        assert len(files(root)) == 1
    with driver(root, revision="2") as one:
        assert one.finds([key(1)]) == []


@check
def damage_is_a_miss_and_is_mended(root: Path) -> None:
    with driver(root) as one:
        stored(one, 1, 2, 3)
        flipped, cut, whole = files(root)
        data = bytearray(flipped.read_bytes())
        data[len(data) // 2] ^= 1
        flipped.write_bytes(data)
        os.truncate(cut, 5000)
        objects = [memory(None) for _ in range(3)]
        loaded = one.load([key(n) for n in (1, 2, 3)], objects)
        assert len(loaded) == 1
        assert files(root) == [whole]
        assert len(one.heard.stored) == 1
        lost = [n for n in (1, 2, 3) if n - 1 not in loaded]
        assert one.finds([key(n) for n in lost]) == []
        stored(one, *lost)
        assert one.loads([1, 2, 3]) == [1, 2, 3]
        assert one.status()["damaged"] == 2


@check
def deleted_but_not_while_locked(root: Path) -> None:
    with driver(root) as one:
        stored(one, 1, 2)
        assert one.look_up([key(1)]) == [0]
        one.adapter.delete([key(1), key(2), key(3)])
        assert one.finds([key(1), key(2)]) == [0]
        assert set(one.heard.stored) == {key(1)}
        one.adapter.submit_unlock([key(1)])
        one.adapter.submit_unlock([key(1)])  # once too often
        one.adapter.delete([key(1)])
        assert not files(root)
        assert not one.heard.stored
        usage = one.adapter.get_usage()
        assert not usage.bytes_by_cache_salt


@check
def usage_is_the_folders(root: Path) -> None:
    with driver(root) as one:
        assert one.adapter.supports_global_eviction
        result = one.store([key(1, cache_salt="tenant"), key(2)], [memory(1), memory(2)])
        assert result.is_successful()
        usage = one.adapter.get_usage()
        size = len(content(1))
        assert dict(usage.bytes_by_cache_salt) == {"tenant": size, "": size}
        assert usage.total_bytes_used >= sum(file.stat().st_size for file in files(root))
        assert usage.total_capacity_bytes == 64 << 20
        assert 0 < usage.usage_fraction < 1


@check
def quota(root: Path) -> None:
    with driver(root, capacity="8600KiB") as one:
        for first in range(0, 1200, 100):
            numbers = range(first, first + 100)
            one.store([key(n) for n in numbers], [memory(n) for n in numbers])
        assert one.status()["evicted"] > 100
        assert one.loads([1199]) == [1199]
        assert set(one.heard.stored) >= {key(1199)}
        assert len(one.heard.stored) <= one.status()["objects"]
    assert sum(file.stat().st_size for file in root.rglob("*")) <= 8600 << 10


@check
def listed_page_by_page(root: Path) -> None:
    salted = key(8, cache_salt="tenant")
    with driver(root) as one:
        stored(one, *range(7))
        assert one.store([salted], [memory(8)]).is_successful()

        def pages(model: str | None = None) -> list[ObjectKey]:
            found, cursor = [], None
            while True:
                page = one.adapter.list_l2_keys(model, 3, cursor)
                found += [entry.key.to_object_key() for entry in page.entries]
                cursor = page.next_page_token
                if cursor is None:
                    return found

        assert set(pages()) == {salted, *(key(n) for n in range(7))}
        assert len(pages()) == 8
        assert not pages("org/other")
        assert len(pages(MODEL)) == 8
        for bad in ((0, None), (5, "nonsense"), (5, "a.b.c.d")):
            try:
                one.adapter.list_l2_keys(None, *bad)
            except ValueError:
                continue
            raise AssertionError(f"{bad} was taken")
    with driver(root) as one:  # nobody has said the salt
        assert set(pages()) == {key(n) for n in range(7)}


@check
def a_folder_that_cannot_be_had(root: Path) -> None:
    root.write_text("a file")
    one = Driver(root)
    try:
        assert not one.store([key(1)], [memory(1)]).is_successful()
        assert one.look_up([key(1)]) == []
        assert one.load([key(1)], [memory(None)]) == []
        one.adapter.delete([key(1)])
        assert one.status()["is_healthy"]
        assert one.status()["degraded"]
    finally:
        one.adapter.close()


@check
def memory_that_was_freed_is_left_alone(root: Path) -> None:
    with driver(root) as one:
        freed = memory(1)
        freed.invalidate()
        assert not one.store([key(1)], [freed]).is_successful()
        assert not files(root)
        stored(one, 1)
        target = memory(None)
        target.invalidate()
        assert one.load([key(1)], [target]) == []
        assert bytes(target.byte_array) == bytes(target.get_size())


@check
def below_lmcaches_own_controllers(root: Path) -> None:
    """Its storage manager stores behind its back, and prefetches what only the folder has."""
    keys = [key(n) for n in range(6)]
    with storage_manager(root) as manager:
        write_behind(manager, keys)
    damaged = next(path for path in files(root) if keys[4].chunk_hash.hex() in path.name)
    os.truncate(damaged, 100)
    with storage_manager(root) as manager:
        assert prefetched(manager, keys) == [0, 1, 2, 3]
        with manager.read_prefetched_results(keys[:4]) as objects:
            for n, one in enumerate(objects):
                assert bytes(one.byte_array) == content(n)
        manager.finish_read_prefetched(keys[:4])
        assert l2_status(manager)["damaged"] == 1
        wait_until(lambda: l2_status(manager)["locked"] == 0)


@check
def below_lmcaches_own_serializer(root: Path) -> None:
    """It looks up with the KV's layout, and stores and loads bytes."""
    keys = [key(n) for n in range(6)]
    with storage_manager(root, SerdeConfig("fp8", {})) as manager:
        write_behind(manager, keys)
    assert all(file.stat().st_size < len(content(0)) + (8 << 10) for file in files(root))
    with storage_manager(root, SerdeConfig("fp8", {})) as manager:
        assert prefetched(manager, keys) == [0, 1, 2, 3, 4, 5]
    with storage_manager(root) as manager:
        assert prefetched(manager, keys) == []


@contextmanager
def storage_manager(root: Path, serde: SerdeConfig | None = None) -> Iterator[Any]:
    adapter = plugin_config(root)
    adapter.serde_config = serde
    config = StorageManagerConfig(
        L1ManagerConfig(L1MemoryManagerConfig(16 << 20, use_lazy=False, shm_name="")),
        EvictionConfig("LRU"),
        L2AdaptersConfig([adapter]),
    )
    manager = StorageManager(config)
    try:
        wait_until(lambda: l2_status(manager)["scanned"])
        yield manager
    finally:
        manager.close()


def l2_status(manager: Any) -> Any:
    return manager.report_status()["l2_adapters"][0]


def write_behind(manager: Any, keys: list[ObjectKey]) -> None:
    reserved = manager.reserve_write(keys, layout()[0])
    for n, one in enumerate(keys):
        copy_into(reserved[one], content(n))
    manager.finish_write(keys)
    wait_until(lambda: l2_status(manager)["stored"] == len(keys))
    wait_until(lambda: manager.report_status()["store_controller"]["in_flight_task_count"] == 0)


def prefetched(manager: Any, keys: list[ObjectKey]) -> list[int]:
    """Which of these come from the folder."""
    row = GroupedObjectKeys(keys, 0, layout()[0])
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([row]))
    assert manager.wait_prefetch_status(handle, PATIENCE)
    result = manager.query_prefetch_status(handle)
    return list(result.l2_hit_cells[0].get_indices_list())


def copy_into(memory: Any, data: bytes) -> None:
    memory.raw_data[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Broken(L2AdapterListener):
    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        raise RuntimeError("broken")

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        raise RuntimeError("broken")

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        raise RuntimeError("broken")


@check
def a_listener_that_fails_holds_nothing_up(root: Path) -> None:
    with driver(root) as one:
        one.adapter.register_listener(Broken())
        stored(one, 1)
        assert one.loads([1]) == [1]
        one.adapter.delete([key(1)])
        assert one.finds([key(1)]) == []


@check
def closed_with_tasks_under_way(root: Path) -> None:
    for _ in range(5):
        one = Driver(root)
        numbers = range(200)
        one.adapter.submit_store_task([key(n) for n in numbers], [memory(n) for n in numbers])
        one.adapter.submit_load_task([key(n) for n in numbers], [memory(None) for _ in numbers])
        one.adapter.submit_lookup_and_lock_task([key(n) for n in numbers], layout())
        one.adapter.close()
    with driver(root) as one:
        there = one.finds([key(n) for n in range(200)])
        assert one.loads(there) == there


def main(root: Path) -> int:
    failed = 0
    for name, function in CHECKS.items():
        try:
            function(root / name)
        except Exception:  # noqa: BLE001 - the others are run too
            traceback.print_exc()
            failed += 1
            print(f"FAILED {name}")
        else:
            print(f"passed {name}")
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
