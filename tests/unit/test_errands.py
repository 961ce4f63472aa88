# SPDX-License-Identifier: Apache-2.0
"""What a sleeping thread is told: in order, none lost, and it wakes for each."""

from __future__ import annotations

import threading

import pytest

from vllm_tiered_kv import errands
from vllm_tiered_kv.errands import Errands


def test_they_are_done_in_order_and_once() -> None:
    done: list[int] = []
    told = Errands(lambda: None)
    for i in range(3):
        assert told.tell(done.append, i)
    for call in told.take():
        call()
        told.insist(done.append, 7)  # for the next time
    assert done == [0, 1, 2]
    assert len(list(told.take())) == 3


def test_who_sleeps_is_woken_and_who_has_something_to_do_does_not_sleep() -> None:
    woken: list[str] = []
    told = Errands(lambda: woken.append("awake"))
    told.insist(print)
    assert woken == []
    with told.sleep() as idle:
        assert not idle
    list(told.take())
    with told.sleep() as idle:
        assert idle
        told.insist(print)
    assert woken == ["awake"]
    told.insist(print)
    assert woken == ["awake"]


def test_too_many_and_those_after_the_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "MAX_ERRANDS", 2)
    woken: list[str] = []
    told = Errands(lambda: woken.append("awake"))
    assert [told.tell(print), told.tell(print), told.tell(print)] == [True, True, False]
    told.insist(print)
    assert len(list(told.take())) == 3
    told.close()
    assert woken == ["awake"]
    assert not told.tell(print)


def test_no_wake_is_lost() -> None:
    """A thread that would sleep for ever comes to everything that others tell it."""
    wake, done = threading.Semaphore(0), []
    told = Errands(wake.release)
    count = 2000

    def run() -> None:
        while len(done) < 2 * count:
            with told.sleep() as idle:
                if idle:
                    assert wake.acquire(timeout=30)
            for call in told.take():
                call()

    def tell() -> None:
        for i in range(count):
            told.insist(done.append, i)

    threads = [threading.Thread(target=target) for target in (run, tell, tell)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 2 * count
