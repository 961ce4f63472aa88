# SPDX-License-Identifier: Apache-2.0
"""The device's pages are taken away and given back, as vLLM's sleep mode does."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import AttentionConfig

from tests.unit import _fake_cuda
from tests.unit.test_worker_half import BLOCKS, LAYERS, TOKENS, Rank
from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector
from vllm_tiered_kv.protocol import BlockCopy, Direction, JobResult, JobStatus, StoreJob
from vllm_tiered_kv.worker import half as module
from vllm_tiered_kv.worker.copy import BlockCopies, CopyError
from vllm_tiered_kv.worker.copy.cuda import CudaCopier

HOOKS = ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.go.set()
    rank.half.shutdown()


def store_job(job: int, slot: int, blocks: tuple[int, ...]) -> StoreJob:
    return StoreJob(job, (BlockCopy(0, slot, 0, blocks),))


def open_once_closing(rank: Rank, direction: Direction) -> None:
    """Lets the copy under way go on as soon as its lane is being closed, and no earlier."""
    lane = rank.half._lanes[direction]
    close = lane.close

    def opener() -> None:
        while not lane._closing:
            pass
        rank.go.set()

    def closing(timeout: float) -> bool:
        threading.Thread(target=opener).start()
        return close(timeout)

    lane.close = closing  # type: ignore[method-assign]


def move(rank: Rank) -> list[torch.Tensor]:
    """Gives the same tensors other memory, with other contents; returns what they had."""
    old = [tensor.clone() for tensor in rank.pages.values()]
    kept = []
    for tensor, before in zip(rank.pages.values(), old, strict=True):
        kept.append(torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()))
        tensor.set_((255 - before).contiguous())
    return kept


def slot(rank: Rank, index: int) -> bytes:
    half = rank.half
    start = index * half._slot_bytes
    return bytes(half._pool.tensor[start : start + half._slot_bytes].tolist())


def test_stores_under_way_are_dropped_and_nothing_is_read_afterwards(rank: Rank) -> None:
    rank.step()
    rank.go.clear()
    rank.step(stores=tuple(store_job(i, i, (2 * i, 2 * i + 1)) for i in range(3)))
    assert rank.entered.wait(20)
    open_once_closing(rank, Direction.STORE)
    copier = rank.half._copier
    rank.half.unregister()
    _, results = rank.step()
    assert {r.job: r.status for r in results} == dict.fromkeys(range(3), JobStatus.DROPPED)

    pool = [slot(rank, i) for i in range(4)]
    for tensor in rank.pages.values():
        tensor.fill_(7)
    _, (dropped,) = rank.step(stores=(store_job(9, 3, (0, 1)),))
    assert dropped.status is JobStatus.DROPPED
    with pytest.raises(CopyError):
        copier.submit(Direction.STORE, [BlockCopies(0, (0,), (0,))], None)
    assert [slot(rank, i) for i in range(4)] == pool
    assert not [t for t in threading.enumerate() if t.name.startswith("tiered-kv-store")]


def test_loads_under_way_are_reported_as_failed_and_nothing_is_written_afterwards(
    rank: Rank,
) -> None:
    rank.store()
    rank.go.clear()
    rank.entered.clear()
    rank.step(loads=(rank.load_job((0, 6)),))
    assert rank.entered.wait(20)
    open_once_closing(rank, Direction.LOAD)
    rank.half.unregister()
    before = [rank.block(i) for i in range(BLOCKS)]
    outcome, results = rank.step()
    assert outcome.finished == outcome.failed == {"req"}
    assert [r.status for r in results] == [JobStatus.DROPPED]
    outcome, _ = rank.step(loads=(rank.load_job((1, 3), job=10),))
    assert outcome.failed == {"req"}
    assert [rank.block(i) for i in range(BLOCKS)] == before


def test_stores_a_runner_never_came_to_do_not_outlive_their_pages(rank: Rank) -> None:
    rank.half.before_step(module.StepPlan(rank_setup(rank), stores=(store_job(1, 1, (2, 5)),)))
    rank.half.unregister()
    rank.half.restore()
    _, (result,) = rank.step()
    assert result == JobResult(1, Direction.STORE, JobStatus.DROPPED)


def rank_setup(rank: Rank) -> Any:
    rank.step()
    return rank.half._setup


@pytest.mark.parametrize("sleeps", [1, 2])
def test_after_waking_up_jobs_use_the_pages_where_they_are_now(rank: Rank, sleeps: int) -> None:
    rank.store(slot=1, blocks=(2, 5))
    stored = [rank.block(2), rank.block(5)]
    for _ in range(sleeps):
        rank.half.unregister()
        rank.half.unregister()  # said twice
        old = move(rank)
        contents = [memory.clone() for memory in old]
        rank.half.restore()
        rank.half.restore()
    outcome, _ = rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0, 6)),))
    assert not outcome.failed
    assert [rank.block(0), rank.block(6)] == stored
    want = rank.block(3) + rank.block(4)
    _, (result,) = rank.store(job=2, slot=3, blocks=(3, 4))
    assert result.status is JobStatus.DONE
    rank.until(lambda o, _: bool(o.finished), loads=(load_of(rank, 3, (1, 7)),))
    assert rank.block(1) + rank.block(7) == want
    assert all(torch.equal(a, b) for a, b in zip(old, contents, strict=True))


def load_of(rank: Rank, slot: int, blocks: tuple[int, ...]) -> Any:
    return module.LoadJob(20, "other", (BlockCopy(0, slot, 0, blocks),), 30.0)


def test_pages_are_not_kept_alive_and_new_ones_may_be_registered(rank: Rank) -> None:
    memory = np.zeros((BLOCKS, 1, TOKENS, 8), dtype=np.uint8)
    rank.half.unregister()
    rank.pages = {f"layer{i}": torch.from_numpy(memory.copy()) for i in range(LAYERS - 1)}
    rank.pages[f"layer{LAYERS - 1}"] = torch.from_numpy(memory)
    rank.half.register(rank.pages)
    gone = weakref.ref(memory)
    del memory
    rank.store()
    assert gone() is not None
    rank.half.unregister()
    rank.pages = {}
    assert gone() is None

    rank.half.restore()  # nothing is there: said, counted, and no tier
    assert rank.half._counts.take()["failures|pool"] == 1
    _, (dropped,) = rank.store(job=2)
    assert dropped.status is JobStatus.DROPPED

    rank.pages = Rank().pages
    rank.half.register(rank.pages)
    want = rank.block(2)
    _, (stored,) = rank.store(job=3, slot=2)
    assert stored.status is JobStatus.DONE
    assert slot(rank, 2).startswith(want)


def test_pages_of_another_size_are_not_served(rank: Rank) -> None:
    rank.store()
    rank.half.unregister()
    shape = (BLOCKS, 1, TOKENS, 64 * 1024)  # more than a slot has room for
    rank.pages = {name: torch.zeros(shape, dtype=torch.uint8) for name in rank.pages}
    rank.half.register(rank.pages)
    _, (dropped,) = rank.store(job=2)
    assert dropped.status is JobStatus.DROPPED


def test_sleep_before_the_first_step(rank: Rank) -> None:
    rank.half.unregister()
    _, (dropped,) = rank.store()
    assert dropped.status is JobStatus.DROPPED
    rank.half.restore()
    _, (stored,) = rank.store(job=2)
    assert stored.status is JobStatus.DONE


def test_pages_are_not_given_up_under_a_copy_that_hangs(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNREGISTER_TIMEOUT", 0.01)
    rank.step()
    rank.go.clear()
    rank.step(stores=(store_job(1, 1, (2, 5)),))
    assert rank.entered.wait(20)
    with pytest.raises(CopyError, match="hangs"):
        rank.half.unregister()
    _, (dropped,) = rank.step(stores=(store_job(2, 2, (0, 1)),))
    assert (dropped.job, dropped.status) == (2, JobStatus.DROPPED)  # and the first still runs
    rank.go.set()
    monkeypatch.setattr(module, "UNREGISTER_TIMEOUT", 20.0)
    rank.half.unregister()
    rank.half.restore()
    _, (first,) = rank.step()
    assert (first.job, first.status) == (1, JobStatus.DROPPED)
    _, (stored,) = rank.store(job=3)
    assert stored.status is JobStatus.DONE


def test_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in's copies go to addresses: an address of before would show."""
    _fake_cuda.install(monkeypatch)
    rank = Rank()
    rank.half._open_copier = CudaCopier
    rank.store()
    stored = [rank.block(2), rank.block(5)]
    rank.half.unregister()
    old = move(rank)
    contents = [memory.clone() for memory in old]
    rank.half.restore()
    outcome, _ = rank.until(lambda o, _: bool(o.finished), loads=(rank.load_job((0, 6)),))
    assert not outcome.failed
    assert [rank.block(0), rank.block(6)] == stored
    assert all(torch.equal(a, b) for a, b in zip(old, contents, strict=True))
    rank.half.shutdown()


def test_the_connector_hands_on(rank: Rank) -> None:
    connector = TieredKVConnector.__new__(TieredKVConnector)
    connector._worker = rank.half
    connector.unregister_kv_caches()
    _, (dropped,) = rank.store()
    connector.restore_kv_caches()
    _, (stored,) = rank.store(job=2)
    assert (dropped.status, stored.status) == (JobStatus.DROPPED, JobStatus.DONE)
    assert TieredKVConnector.supports_sleep_mode(None)


def config_with_sleep() -> Any:
    return SimpleNamespace(
        speculative_config=None,
        attention_config=AttentionConfig(),
        model_config=SimpleNamespace(
            runner_type="generate", is_prefix_caching_supported=True, enable_sleep_mode=True
        ),
    )


def test_sleep_mode_is_refused_by_name_where_vllm_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for hook in HOOKS:
        monkeypatch.delattr(compat.KVConnectorBase_V1, hook, raising=False)
    with pytest.raises(compat.UnsupportedModel, match=r"sleep mode needs vLLM 0\.33"):
        compat.check_supported(config_with_sleep(), SimpleNamespace(kv_cache_groups=[]))


def test_sleep_mode_is_served_where_vllm_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in HOOKS:
        monkeypatch.setattr(compat.KVConnectorBase_V1, hook, None, raising=False)
    group = SimpleNamespace(is_eagle_group=False, kv_cache_spec=None)
    compat.check_supported(
        config_with_sleep(),
        SimpleNamespace(kv_cache_groups=[group], prefix_cacheable_group_ids=[0]),
    )
