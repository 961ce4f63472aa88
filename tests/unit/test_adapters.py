# SPDX-License-Identifier: Apache-2.0
"""Digests of LoRA adapters, and what several ranks' digests add up to."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_tiered_kv.identity.adapter import Opaque, adapter_digest
from vllm_tiered_kv.identity.hashing import Cancelled
from vllm_tiered_kv.protocol import AdapterReport, AdapterState, AdapterUse
from vllm_tiered_kv.scheduler.adapters import AdapterTable, Content, LoraName, Verdict
from vllm_tiered_kv.worker.adapters import AdapterWatch

ONE = LoraName(1, "one", "/adapters/one", in_place=False)


class Adapter(SimpleNamespace):
    """Unlike its base it can be referred to weakly, as vLLM's can."""


def made(**parts: Any) -> Adapter:
    layer = SimpleNamespace(lora_a=torch.ones(4, 8), lora_b=[torch.zeros(8, 4), None], scaling=2.0)
    return Adapter(**{"id": 1, "rank": 4, "loras": {"q_proj": layer}, **parts})


def digest(adapter: object) -> bytes:
    return adapter_digest(adapter, threading.Event())


def test_equal_weights_have_equal_digests_whatever_their_number() -> None:
    assert digest(made()) == digest(made(id=2))


@pytest.mark.parametrize(
    "parts",
    [
        {"rank": 8},
        {"loras": {}},
        {"loras": {"k_proj": made().loras["q_proj"]}},
        {"loras": {"q_proj": SimpleNamespace(lora_a=torch.ones(4, 8))}},
        {"extra": None},
    ],
)
def test_any_other_part_is_another_digest(parts: dict[str, Any]) -> None:
    assert digest(made(**parts)) != digest(made())


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(8, 4),
        torch.ones(4, 8, dtype=torch.bfloat16),
        torch.ones(4, 8).index_fill(0, torch.tensor([3]), 1.0001),
        torch.ones(4, 0),
    ],
)
def test_a_tensors_kind_shape_and_content_count(other: torch.Tensor) -> None:
    assert digest({"w": other}) != digest({"w": torch.ones(4, 8)})


def test_the_order_in_memory_does_not_count() -> None:
    tensor = torch.arange(32.0).reshape(4, 8)
    assert digest(tensor) == digest(tensor.T.contiguous().T)


def test_what_cannot_be_read_has_no_digest() -> None:
    with pytest.raises(Opaque, match="object"):
        digest({"w": object()})
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(Opaque, match="deeply"):
        digest(loop)


def test_a_digest_that_is_not_wanted_any_more() -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(Cancelled):
        adapter_digest(made(), cancelled)


def known(generation: int, digest: bytes = b"d" * 32) -> AdapterReport:
    return AdapterReport(1, generation, AdapterState.KNOWN, digest)


def state(generation: int, state: AdapterState) -> AdapterReport:
    return AdapterReport(1, generation, state)


def test_a_content_is_known_once_every_rank_has_told_it() -> None:
    table = AdapterTable(2)
    assert table.look(ONE, 0) is Verdict.ASK_AGAIN
    assert table.watch == [1]
    table.report(0, known(1))
    assert table.look(ONE, 0) is Verdict.ASK_AGAIN
    table.report(1, known(2, b"e" * 32))
    found = table.look(ONE, 0)
    assert isinstance(found, Content)
    assert found.use == AdapterUse(1, (1, 2))
    assert table.watch == [1]  # asked for once


def test_ranks_that_hold_other_parts_make_another_content() -> None:
    contents = set()
    for parts in ((b"d", b"e"), (b"e", b"d"), (b"d", b"d")):
        table = AdapterTable(2)
        table.look(ONE, 0)
        for rank, part in enumerate(parts):
            table.report(rank, known(1, part * 32))
        found = table.look(ONE, 0)
        assert isinstance(found, Content)
        contents.add(found.digest)
    assert len(contents) == 3


def test_weights_replaced_before_they_were_digested_leave_doubt() -> None:
    table = AdapterTable(1)
    table.look(ONE, 0)
    table.report(0, known(1))
    table.report(0, state(2, AdapterState.DIGESTING))
    assert table.look(ONE, 16) is Verdict.ASK_AGAIN
    table.report(0, known(3))
    assert table.look(ONE, 16) is Verdict.NEVER  # the device may hold blocks of the second
    assert isinstance(table.look(ONE, 0), Content)


@pytest.mark.parametrize("why", [AdapterState.ABSENT, AdapterState.OPAQUE])
def test_what_will_not_be_known_soon_is_not_waited_for(why: AdapterState) -> None:
    table = AdapterTable(1)
    table.look(ONE, 0)
    table.report(0, state(0, why))
    assert table.look(ONE, 0) is Verdict.GO_WITHOUT


def test_reports_that_make_no_sense_are_passed_over() -> None:
    table = AdapterTable(1)
    table.look(ONE, 0)
    table.report(0, known(1, b"short"))
    table.report(7, known(1))
    table.report(0, AdapterReport(99, 1, AdapterState.KNOWN, b"d" * 32))
    assert table.look(ONE, 0) is Verdict.ASK_AGAIN


def test_too_many_adapters_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_tiered_kv.scheduler.adapters.MAX_ADAPTERS", 1)
    table = AdapterTable(1)
    table.look(ONE, 0)
    assert table.look(LoraName(2, "two", "/adapters/two", in_place=False), 0) is Verdict.NEVER
    table.report(0, known(1))
    assert isinstance(table.look(ONE, 0), Content)


def test_a_rank_refuses_what_was_planned_with_other_weights() -> None:
    loaded: dict[int, object] = {1: made()}
    watch = AdapterWatch(0, lambda: loaded)
    watch.follow([1], [])
    watch.observe()
    use = AdapterUse(1, (1,))
    assert watch.holds(use)
    assert watch.holds(None)
    assert not watch.holds(AdapterUse(1, ()))
    loaded[1] = made()  # equal, but read again
    watch.observe()
    assert not watch.holds(use)
    del loaded[1]
    watch.observe()
    assert not watch.holds(AdapterUse(1, (2,)))
    watch.follow([], [1])
    assert not watch.holds(AdapterUse(1, (2,)))
    watch.close(10)


def test_adapters_that_can_no_longer_be_seen_are_vouched_for_no_more() -> None:
    loaded: dict[int, object] = {1: made()}
    watch = AdapterWatch(0, lambda: loaded)
    watch.follow([1], [])
    watch.observe()
    loaded[1] = 7  # of which nobody can say whether it is still the same
    watch.observe()
    assert not watch.holds(AdapterUse(1, (1,)))
    assert watch.take()[-1].state is AdapterState.OPAQUE
    watch.close(10)
