# SPDX-License-Identifier: Apache-2.0
"""Many adapters come and go: what is gone costs neither memory nor time."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from vllm_tiered_kv.worker import adapters
from vllm_tiered_kv.worker.adapters import AdapterWatch


class Weights:
    pass


def test_an_adapter_that_was_pushed_out_undigested_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, go_on = threading.Event(), threading.Event()

    def slow(*_: object) -> bytes:
        busy.set()
        go_on.wait(30)
        return bytes(32)

    monkeypatch.setattr(adapters, "adapter_digest", slow)
    loaded: dict[int, object] = {1: Weights()}
    watch = AdapterWatch(0, lambda: loaded)
    watch.follow([1, 2], ())
    watch.observe()
    assert busy.wait(30)
    loaded[2] = Weights()
    gone = weakref.ref(loaded[2])
    watch.observe()  # waits to be digested
    del loaded[2]
    watch.observe()
    gc.collect()
    try:
        assert gone() is None
    finally:
        go_on.set()
        watch.close(30)


class Counting(dict):  # type: ignore[type-arg]
    asked = 0

    def get(self, *args: object) -> object:
        Counting.asked += 1
        return super().get(*args)


def test_a_step_does_not_look_at_adapters_that_are_not_there() -> None:
    loaded = Counting({1: Weights()})
    watch = AdapterWatch(0, lambda: loaded)
    watch.follow(range(1, 2001), ())
    watch.observe()
    watch.take()
    Counting.asked = 0
    watch.observe()
    watch.close(30)
    assert Counting.asked < 10
