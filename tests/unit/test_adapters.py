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


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two adapters are followed at once."""
    monkeypatch.setattr("vllm_tiered_kv.scheduler.adapters.MAX_ADAPTERS", 2)


def numbered(number: int, name: str = "", *, in_place: bool = False) -> LoraName:
    return LoraName(number, name or f"name {number}", f"/adapters/{number}", in_place)


def of(number: int, generation: int, state: AdapterState, digest: bytes = b"") -> AdapterReport:
    return AdapterReport(number, generation, state, digest)


def follow(table: AdapterTable, lora: LoraName, generation: int, digest: bytes) -> None:
    """An adapter is asked for, loaded and digested."""
    table.look(lora, 0)
    table.watch.clear()  # the plan goes out
    table.report(0, of(lora.adapter, generation, AdapterState.DIGESTING))
    table.report(0, of(lora.adapter, generation, AdapterState.KNOWN, digest * 32))
    assert isinstance(table.look(lora, 0), Content)


def leave(table: AdapterTable, number: int, generation: int) -> None:
    table.report(0, of(number, generation, AdapterState.ABSENT))


@pytest.mark.usefixtures("narrow")
def test_adapters_that_are_loaded_are_not_forgotten_for_others() -> None:
    table = AdapterTable(1)
    follow(table, numbered(1), 1, b"a")
    follow(table, numbered(2), 1, b"b")
    assert table.look(numbered(3), 0) is Verdict.NO_ROOM
    assert not table.watch
    assert isinstance(table.look(numbered(1), 16), Content)
    assert isinstance(table.look(numbered(2), 16), Content)
    # What was computed with the third meanwhile is nobody's, whenever there is room for it.
    leave(table, 2, 1)
    follow(table, numbered(3), 1, b"c")
    assert table.look(numbered(3), 16) is Verdict.NEVER


@pytest.mark.usefixtures("narrow")
def test_weeks_of_adapters_are_all_served() -> None:
    table = AdapterTable(1)
    for number in range(1, 100):
        follow(table, numbered(number), 1, b"a")
        leave(table, number, 1)
        assert len(table._adapters) <= 2
        assert len(table._aliases) <= 2
        assert len(table._idle) <= 2
    assert table.unwatch == list(range(1, 98))


@pytest.mark.usefixtures("narrow")
def test_the_adapter_used_least_recently_goes_first() -> None:
    table = AdapterTable(1)
    for number in (1, 2):
        follow(table, numbered(number), 1, b"a")
        leave(table, number, 1)
    table.look(numbered(1), 0)
    table.look(numbered(3), 0)
    assert table.unwatch == [2]


@pytest.mark.usefixtures("narrow")
def test_one_that_was_loaded_in_place_can_be_forgotten_and_is_not_watched() -> None:
    table = AdapterTable(1)
    for number in range(1, 5):
        assert table.look(numbered(number, in_place=True), 0) is Verdict.NEVER
    assert table.watch == table.unwatch == []  # ranks would keep it for good


@pytest.mark.usefixtures("narrow")
def test_a_forgotten_name_is_not_trusted_with_what_the_device_holds_under_it() -> None:
    """A request that is still there may have gone on with other weights, unwatched."""
    table = AdapterTable(1)
    follow(table, numbered(1), 1, b"a")
    leave(table, 1, 1)
    follow(table, numbered(2), 1, b"b")
    follow(table, numbered(3), 1, b"c")
    assert 1 not in table._adapters
    leave(table, 2, 1)
    follow(table, numbered(1), 2, b"a")
    assert table.look(numbered(1), 16) is Verdict.NEVER
    table.device_emptied()
    assert isinstance(table.look(numbered(1), 16), Content)


@pytest.mark.usefixtures("narrow")
def test_a_name_that_another_adapter_has_too_is_kept_and_not_trusted() -> None:
    table = AdapterTable(1)
    follow(table, ONE, 1, b"a")
    leave(table, 1, 1)
    again = LoraName(2, ONE.name, ONE.path, in_place=False)
    follow(table, again, 1, b"a")
    assert isinstance(table.look(again, 16), Content)
    follow(table, numbered(3), 1, b"c")  # for which the first has to go
    assert table.look(again, 16) is Verdict.NEVER


@pytest.mark.usefixtures("narrow")
def test_doubts_about_a_forgotten_adapter_are_never_settled() -> None:
    table = AdapterTable(1)
    again = LoraName(2, ONE.name, ONE.path, in_place=False)
    table.look(ONE, 0)
    leave(table, 1, 0)
    table.went_without(ONE)
    follow(table, again, 1, b"a")
    assert table.look(again, 16) is Verdict.GO_WITHOUT
    table.look(numbered(3), 0)
    assert table.look(again, 16) is Verdict.NEVER


def test_no_generation_of_a_rank_is_ever_given_twice() -> None:
    """A job planned before an adapter was forgotten must not fit what is loaded after."""
    loaded: dict[int, object] = {1: made(), 2: made()}
    watch = AdapterWatch(0, lambda: loaded)
    watch.follow([1], [])
    watch.observe()
    loaded[1] = made()
    watch.observe()
    watch.follow([], [1])
    loaded[1] = made(rank=8)
    watch.follow([1], [])
    watch.observe()
    assert not watch.holds(AdapterUse(1, (1,)))
    assert not watch.holds(AdapterUse(1, (2,)))
    assert watch.holds(AdapterUse(1, (3,)))
    watch.close(10)


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
