# SPDX-License-Identifier: Apache-2.0
"""What the tier decides when its folder, its file system or its threads are in trouble."""

from __future__ import annotations

from tests.unit.disk._tier import FILE, Bench, key_of, name, written
from vllm_tiered_kv.tiers.disk.chores import Prepare, Scan, ScanEnded, Touch
from vllm_tiered_kv.tiers.disk.orders import (
    OrderResult,
    Outcome,
    RankReport,
    WriteOrder,
)

# -- trouble -------------------------------------------------------------------------------


def test_a_full_file_system_pauses_writes_at_once_and_reads_go_on() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.write(key_of(2))
    bench.tier.report(
        RankReport(0, (OrderResult(bench.orders()[0].job, Outcome.FAILED, reason="no_space"),))
    )
    assert not bench.tier.is_writable
    for seconds in (2, 4):
        assert bench.tier.is_readable
        assert bench.tier.groups(key_of(1)) == 1
        bench.full = True  # it is looked at again
        bench.later(seconds)
        bench.keep()
        assert not bench.tier.is_writable
        assert bench.tier.is_degraded
    bench.full = False
    bench.later(8)
    bench.keep()
    assert bench.tier.is_writable
    assert not bench.tier.is_degraded


def test_what_may_be_wrong_goes_also_from_a_file_system_that_is_full() -> None:
    bench = Bench().open()
    written(bench, 1, 2)
    bench.full = True
    bench.write(key_of(3))
    bench.answer(bench.orders()[0], Outcome.FAILED)
    for _ in range(3):  # in a row
        bench.tier._upkeep.writes.failed(bench.now)
    bench.takes_chores = False
    bench.purge()
    bench.takes_chores = True
    bench.later(2)
    bench.keep()
    assert bench.tier.is_degraded
    assert not bench.disk


def test_an_order_that_hangs_pauses_everything_until_it_returns() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.read(key_of(1))
    hung = bench.orders()[0]
    bench.later(bench.settings.io_deadline + 1)
    assert not bench.tier.is_readable
    assert not bench.tier.is_writable
    assert bench.troubles["disk_hung"] == 1
    for _ in range(50):
        bench.later(30)
    assert not any(isinstance(chore, Prepare) for chore in bench.chores)
    bench.answer(hung)
    for _ in range(3):
        bench.later(61)
        bench.keep()
    assert bench.tier.is_readable
    assert not bench.tier.is_degraded


def test_a_folder_that_does_not_answer_is_asked_nothing_more() -> None:
    bench = Bench().open()
    for _ in range(100):
        bench.later(30, keeper_busy_for=100.0)
    assert bench.tier.is_degraded
    assert len(bench.chores) <= 2
    bench.keep()
    for _ in range(3):
        bench.later(61)
        bench.keep()
    assert not bench.tier.is_degraded


def test_a_keeper_that_takes_no_more_costs_nothing_but_time() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.takes_chores = False
    bench.tier.purge()
    bench.tier.used_now([key_of(1)], 5)
    bench.later(1000)
    bench.takes_chores = True
    for _ in range(3):
        bench.later(10)
        bench.keep()
    assert not bench.disk


def test_a_scan_that_could_not_see_everything_forgets_nothing() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.later(700)
    bench.skip_to(Scan)
    bench.tier.news(ScanEnded(0, 0.1, missed=1))
    assert bench.tier.groups(key_of(1)) == 1
    assert bench.tier.used == FILE


def test_scans_take_a_small_part_of_the_time() -> None:
    bench = Bench(shared=True).open()
    began = 0
    for _ in range(1000):
        bench.later(1)
        while bench.chores:
            if isinstance(bench.chores[0], Scan):
                began += 1
                bench.chores.popleft()
                bench.tier.news(ScanEnded(0, 10.0, 0))
            else:
                bench.do_chore()
    assert began in (4, 5, 6)


def test_uses_are_written_down_oldest_first() -> None:
    bench = Bench().open()
    written(bench, 1, 2)
    bench.tier.used_now([key_of(2), key_of(1), key_of(7)], 1000)
    bench.later(6)
    touches = [chore for chore in bench.chores if isinstance(chore, Touch)]
    assert [list(t.files) for t in touches] == [[(name(2), 1000), (name(1), 2000)]]


def test_what_another_engine_wrote_is_found_when_it_is_asked_for() -> None:
    bench = Bench(shared=True).open()
    bench.disk[name(5)] = FILE
    jobs = [bench.look_for([key_of(5), key_of(6)]) for _ in range(2)]
    bench.keep()
    assert bench.tier.groups(key_of(5)) == 1
    assert bench.tier.groups(key_of(6)) == 0
    assert [bench.outcomes[job] for job in jobs] == [Outcome.DONE] * 2


def test_a_look_that_cannot_be_had_ends_as_well() -> None:
    bench = Bench(shared=True).open()
    job = bench.look_for([key_of(5)])
    bench.fail_chore()
    assert bench.outcomes[job] is Outcome.FAILED
    assert bench.outcomes[bench.look_for([key_of(5)])] is Outcome.DROPPED


def test_a_read_of_what_is_not_there_is_not_ordered() -> None:
    bench = Bench().open()
    assert bench.outcomes[bench.read(key_of(1))] is Outcome.DROPPED


def test_only_orders_are_sent_after_opening() -> None:
    bench = Bench().open()
    bench.write(key_of(1))
    assert all(isinstance(order, WriteOrder) for order in bench.sent[0])
