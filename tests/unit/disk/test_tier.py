# SPDX-License-Identifier: Apache-2.0
"""What the tier decides, one thing at a time; `test_tier_model.py` does all of it in any order."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.disk._tier import FILE, OWN, ROOM, Bench, key_of
from vllm_tiered_kv.tiers.disk.chores import Prepare, Remove, Scan, ScanEnded, Touch
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.flight import MAX_WRITES, WRITE_PATIENCE
from vllm_tiered_kv.tiers.disk.format import HEADER_BYTES
from vllm_tiered_kv.tiers.disk.orders import (
    CancelReads,
    OpenFolder,
    OrderResult,
    Outcome,
    RankReport,
    ReadOrder,
    WriteOrder,
)
from vllm_tiered_kv.tiers.disk.ranks import PATIENCE
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES


def name(number: int, namespace: str = OWN, rank: int = 0, group: int = 0) -> FileName:
    return FileName(namespace, rank, group, key_of(number))


def written(bench: Bench, *numbers: int) -> None:
    for number in numbers:
        bench.write(key_of(number))
        bench.serve()
        bench.keep()


# -- opening -------------------------------------------------------------------------------


def test_ranks_are_told_once_they_are_there_and_the_folder_is_known() -> None:
    bench = Bench(ranks=2)
    bench.tier.open(OWN, {"means": "this"})
    assert bench.chores[0] == Prepare(OWN, {"means": "this"})
    bench.connect(1)
    bench.keep()
    assert not bench.tier.is_readable
    assert bench.tier.is_connecting
    bench.connect(2)
    assert bench.tier.is_readable
    assert [list(sent) for sent in bench.sent] == [[OpenFolder("/nowhere", OWN, False)]] * 2


def test_a_rank_that_comes_anew_is_told_again() -> None:
    bench = Bench().open()
    bench.connect(1)
    assert isinstance(bench.sent[0][0], OpenFolder)
    assert bench.tier.is_readable


def test_writes_wait_until_the_tier_is_open() -> None:
    bench = Bench()
    bench.tier.open(OWN, {})
    job = bench.write(key_of(1))
    bench.keep()
    bench.connect(1)
    bench.serve()
    assert bench.outcomes[job] is Outcome.DONE
    assert bench.tier.groups(key_of(1)) == 1


def test_writes_do_not_wait_for_a_folder_that_cannot_be_had() -> None:
    bench = Bench()
    bench.tier.open(OWN, {})
    job = bench.write(key_of(1))
    bench.fail_chore()
    assert bench.outcomes[job] is Outcome.DROPPED
    assert bench.tier.is_degraded
    assert not bench.tier.is_writable


def test_writes_do_not_wait_for_ranks_that_never_come() -> None:
    bench = Bench()
    bench.tier.open(OWN, {})
    job = bench.write(key_of(1))
    bench.keep()
    bench.later(WRITE_PATIENCE + 1)
    assert bench.outcomes[job] is Outcome.DROPPED


def test_it_opens_by_itself_once_the_folder_can_be_had() -> None:
    bench = Bench()
    bench.tier.open(OWN, {})
    bench.connect(1)
    bench.fail_chore()
    for _ in range(5):
        bench.later(70)
        bench.fail_chore()
    bench.later(70)
    bench.keep()
    assert bench.tier.is_readable
    assert bench.tier.is_writable
    assert not bench.tier.is_degraded


def test_attempts_become_rarer() -> None:
    bench = Bench()
    bench.tier.open(OWN, {})
    bench.fail_chore()
    attempts = []
    for _ in range(6000):
        bench.later(0.1)
        if bench.chores:
            attempts.append(bench.now)
            bench.fail_chore()
    gaps = [b - a for a, b in itertools.pairwise(attempts)]
    assert gaps == sorted(gaps)
    assert 59 < gaps[-1] < 62
    assert len(attempts) < 16


# -- orders --------------------------------------------------------------------------------


def test_an_order_ends_when_every_rank_has_answered_with_the_worst_of_them() -> None:
    bench = Bench(ranks=2).open()
    job = bench.write(key_of(1))
    bench.answer(bench.orders(0)[0], rank=0)
    assert bench.tier.groups(key_of(1)) == 0
    assert not bench.ended
    bench.answer(bench.orders(1)[0], Outcome.FAILED, rank=1)
    assert bench.outcomes[job] is Outcome.FAILED
    assert bench.tier.groups(key_of(1)) == 0


def test_a_result_that_comes_twice_counts_once() -> None:
    bench = Bench(ranks=2).open()
    job = bench.write(key_of(1))
    order = bench.orders(0)[0]
    result = bench.do(0, order)
    for _ in range(3):
        bench.tier.report(RankReport(0, (result, result)))
    assert not bench.ended
    bench.serve()
    bench.tier.report(RankReport(0, (result,)))
    assert bench.ended == {job: 1}


def test_results_of_nothing_and_of_ranks_there_are_not_are_passed_over() -> None:
    bench = Bench().open()
    job = bench.write(key_of(1))
    bench.tier.report(RankReport(7, (OrderResult(job, Outcome.DONE),)))
    bench.tier.report(RankReport(0, (OrderResult(job + 99, Outcome.DONE, 5, (5,)),)))
    assert not bench.ended
    assert bench.catalogue.used == 0


def test_a_rank_that_cannot_be_reached_has_dropped_its_part() -> None:
    bench = Bench(ranks=2).open()
    bench.unreachable = {1}
    job = bench.write(key_of(1))
    bench.serve()
    assert bench.outcomes[job] is Outcome.DROPPED
    assert bench.tier.is_idle
    assert bench.tier.used == FILE  # of rank 0; it counts, and goes when room is short


def test_writes_beyond_the_queue_are_dropped() -> None:
    bench = Bench(max_queued=3, capacity=1 << 30).open()
    jobs = [bench.write(key_of(i)) for i in range(MAX_WRITES + 5)]
    assert [job for job in jobs if job in bench.ended] == jobs[-2:]
    assert len(bench.orders()) == MAX_WRITES


def test_a_read_that_waited_too_long_is_dropped_and_what_is_sent_has_less_patience() -> None:
    bench = Bench().open()
    written(bench, 1)
    jobs = [bench.read(key_of(1), patience=5.0) for _ in range(200)]
    sent = len(bench.orders())
    assert 0 < sent < len(jobs)
    bench.later(3.0)
    bench.answer(bench.orders()[0])
    late = bench.orders()[-1]
    assert isinstance(late, ReadOrder)
    assert late.patience == pytest.approx(2.0)
    bench.later(3.0)
    assert set(jobs[sent + 1 :]) <= set(bench.ended)


def test_a_read_that_nobody_waits_for_is_called_off() -> None:
    bench = Bench().open()
    written(bench, 1)
    jobs = [bench.read(key_of(1)) for _ in range(200)]
    sent = len(bench.orders())
    bench.tier.cancel(jobs)
    assert set(bench.ended) & set(jobs) == set(jobs[sent:])
    told = {job for o in bench.sent[0] if isinstance(o, CancelReads) for job in o.jobs}
    assert told == set(jobs[:sent])


def test_nothing_is_offered_or_kept_after_the_end() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.tier.close()
    assert bench.tier.groups(key_of(1)) == 0
    for job in (bench.write(key_of(2)), bench.read(key_of(1))):
        assert bench.outcomes[job] is Outcome.DROPPED


# -- what a file turns out to be -----------------------------------------------------------


def test_only_the_part_that_was_missing_is_forgotten() -> None:
    bench = Bench(groups=2).open()
    bench.write(key_of(1), (0, 1))
    bench.serve()
    del bench.disk[name(1, group=1)]
    bench.read(key_of(1), (0, 1))
    bench.serve()
    assert bench.tier.groups(key_of(1)) == 0b01
    assert bench.catalogue.used == FILE
    assert bench.troubles["disk_missing"] == 1


def test_a_damaged_file_counts_until_a_scan_has_seen_that_it_is_gone() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.read(key_of(1))
    bench.answer(bench.orders()[0], Outcome.DAMAGED)
    assert bench.tier.groups(key_of(1)) == 0
    assert bench.tier.used == FILE
    bench.later(60)
    bench.keep()
    assert bench.tier.used == 0


def test_what_a_failed_write_left_behind_counts_until_a_scan() -> None:
    bench = Bench().open()
    bench.write(key_of(1))
    bench.answer(bench.orders()[0], Outcome.FAILED)
    assert bench.tier.used == FILE
    bench.later(60)
    bench.skip_to(Scan)
    bench.tier.news(ScanEnded(FILE, 0.1, 0))  # it is there
    assert bench.tier.used == FILE
    bench.later(1000)
    bench.keep()
    assert bench.tier.used == 0


def test_a_file_that_was_evicted_meanwhile_is_no_surprise() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.read(key_of(1))
    bench.tier.purge()
    removal = bench.chores[-1]
    assert isinstance(removal, Remove)
    bench.disk.clear()
    bench.serve()
    bench.keep()
    assert not bench.troubles["disk_missing"]


# -- room ----------------------------------------------------------------------------------


def test_the_longest_unused_goes_first_whichever_its_namespace() -> None:
    bench = Bench()
    bench.disk = {name(200 + i, "another"): FILE for i in range(ROOM // 2)}
    bench.open()
    written(bench, *range(ROOM - ROOM // 2))
    bench.tier.used_now([key_of(0)], 0)
    written(bench, *range(100, 100 + ROOM - 6))
    assert {n.namespace for n in bench.disk} == {OWN}
    assert name(0) in bench.disk
    assert name(1) not in bench.disk
    assert bench.tier.evicted > ROOM // 2


def test_a_smaller_capacity_is_met_in_the_background() -> None:
    bench = Bench()
    bench.disk = {name(i, "another"): FILE for i in range(200)}
    bench.disk[name(0)] = FILE
    bench.open()
    assert bench.tier.used <= bench.settings.capacity
    assert len(bench.disk) >= ROOM - 3


def test_a_write_waits_for_its_room() -> None:
    bench = Bench().open()
    written(bench, *range(ROOM - 1))
    before = len(bench.disk)
    jobs = [bench.write(key_of(100 + i)) for i in range(3)]
    bench.serve()
    assert not set(jobs) <= set(bench.ended)
    for _ in range(6):
        bench.keep()
        bench.serve()
    assert all(bench.outcomes[job] is Outcome.DONE for job in jobs)
    assert len(bench.disk) <= before + 2


def test_writes_for_which_no_room_can_be_made_do_not_hold_their_slots() -> None:
    bench = Bench(min_free=1 << 50).open()
    assert bench.outcomes[bench.write(key_of(1))] is Outcome.DROPPED
    assert bench.troubles["disk_room"] == 1
    bench = Bench().open()
    written(bench, *range(ROOM - 1))
    bench.later(0, keeper_busy_for=100.0)
    for i in range(4):
        bench.write(key_of(100 + i))
        bench.serve()
    assert bench.outcomes[max(bench.wanted)] is Outcome.DROPPED
    assert bench.tier.is_idle


def test_a_chunk_that_is_being_removed_is_not_written() -> None:
    """Its file might be written after the removal and before the news of it."""
    bench = Bench().open()
    written(bench, 1)
    bench.tier.purge()
    job = bench.write(key_of(1))
    assert bench.outcomes[job] is Outcome.DROPPED
    bench.keep()
    job = bench.write(key_of(1))
    bench.serve()
    assert bench.outcomes[job] is Outcome.DONE


def test_a_chunk_that_is_being_written_is_not_removed() -> None:
    bench = Bench(ranks=2).open()
    bench.write(key_of(1))
    bench.answer(bench.orders(0)[0], rank=0)
    written_in_part = name(1, rank=0)
    for i in range(2, 2 + 2 * ROOM):
        bench.write(key_of(i))
        for rank in range(2):
            for order in bench.orders(rank):
                if order.key != key_of(1):
                    bench.answer(order, rank=rank)
        bench.keep()
        assert written_in_part in bench.disk
    bench.serve()
    assert bench.tier.groups(key_of(1)) == 1


def test_the_file_system_keeps_its_free_space() -> None:
    bench = Bench(min_free=10 * FILE).open()
    written(bench, *range(10))
    bench.free = 7 * FILE
    bench.later(6)
    bench.keep()
    assert len(bench.disk) == 7
    bench.free = 10 * FILE
    job = bench.write(key_of(50))
    bench.keep()
    bench.serve()
    assert bench.outcomes[job] is Outcome.DONE
    assert len(bench.disk) == 7


def test_what_cannot_be_removed_stays_and_counts() -> None:
    bench = Bench()
    stuck = {name(200 + i, "another"): FILE for i in range(4)}
    bench.disk = dict(stuck)
    bench.open()
    for i in range(3 * ROOM):
        bench.write(key_of(i))
        bench.serve()
        bench.keep(stuck=list(stuck))
        bench.later(70)
        bench.keep(stuck=list(stuck))
    assert stuck.items() <= bench.disk.items()
    assert bench.catalogue.used == sum(bench.disk.values())
    assert bench.troubles["disk_remove"] > 0


# -- purges --------------------------------------------------------------------------------


def test_what_was_written_here_is_removed_and_what_was_there_before_stays() -> None:
    bench = Bench()
    bench.disk = {name(9): FILE}
    bench.open()
    written(bench, 1, 2)
    job = bench.write(key_of(3))
    bench.tier.purge()
    assert [bench.tier.groups(key_of(i)) for i in (1, 2, 3, 9)] == [0, 0, 0, 1]
    bench.serve()
    assert bench.tier.groups(key_of(3)) == 0
    for _ in range(3):
        bench.keep()
        bench.later(1)
    assert bench.outcomes[job] is Outcome.DONE
    assert list(bench.disk) == [name(9)]


def test_what_is_to_be_purged_and_cannot_be_removed_is_never_offered_again() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.tier.purge()
    bench.keep(stuck=[name(1)])
    for _ in range(30):
        bench.later(60)
        bench.keep(stuck=[name(1)])
        assert bench.tier.groups(key_of(1)) == 0
    bench.later(60)
    bench.keep()
    bench.later(60)
    bench.keep()
    assert not bench.disk
    written(bench, 1)
    assert bench.tier.groups(key_of(1)) == 1


def test_a_chunk_that_is_written_twice_is_purged_when_both_have_ended() -> None:
    """What is removed before may be written again: it is of before the purge."""
    bench = Bench().open()
    jobs = [bench.write(key_of(1)) for _ in range(2)]
    first, second = bench.orders()
    bench.answer(first)
    bench.tier.purge()
    bench.tier.purge()
    assert not any(isinstance(chore, Remove) for chore in bench.chores)
    bench.keep()
    bench.answer(second)
    assert [bench.outcomes[job] for job in jobs] == [Outcome.DONE] * 2
    for _ in range(3):
        bench.later(1)
        bench.keep()
    assert not bench.disk
    bench.later(1000)
    bench.keep()
    assert bench.tier.groups(key_of(1)) == 0
    written(bench, 1)
    assert bench.tier.groups(key_of(1)) == 1


def test_what_is_purged_while_it_is_written_is_not_offered_although_its_file_was_gone() -> None:
    bench = Bench().open()
    written(bench, 1)
    bench.write(key_of(1))
    bench.read(key_of(1))
    write, read = bench.orders()
    bench.tier.purge()
    bench.answer(read, Outcome.DAMAGED)
    bench.answer(write)
    assert bench.tier.groups(key_of(1)) == 0
    for _ in range(3):
        bench.later(61)
        bench.keep()
    assert not bench.disk


@pytest.mark.parametrize("stale", [Outcome.MISSING, Outcome.DAMAGED])
@pytest.mark.parametrize("purged", ["before", "after"])
def test_a_file_that_is_written_while_it_is_missed_is_counted_and_purged(
    stale: Outcome, purged: str
) -> None:
    """A read has found nothing, but says so only when the file is there again."""
    bench = Bench().open()
    written(bench, 1)
    bench.read(key_of(1))
    read = bench.orders()[0]
    del bench.disk[name(1)]
    late = bench.do(0, read, stale)
    written(bench, 1)
    bench.disk[name(1)] = FILE
    if purged == "before":
        bench.tier.purge()
    bench.tier.report(RankReport(0, (late,)))
    if purged == "after":
        bench.tier.purge()
    assert bench.tier.used == FILE
    for _ in range(4):
        assert bench.tier.groups(key_of(1)) == 0
        bench.later(61)
        bench.keep()
    assert bench.tier.used == sum(bench.disk.values())
    assert bench.tier.groups(key_of(1)) == 0
    bench.later(1000)
    bench.keep()
    written(bench, 1)
    assert bench.tier.groups(key_of(1)) == 1


def test_what_a_write_left_that_failed_is_purged_when_it_is_found() -> None:
    bench = Bench().open()
    bench.write(key_of(1))
    result = bench.do(0, bench.orders()[0], Outcome.FAILED)
    bench.disk[name(1)] = FILE  # the rename was done, and only its answer lost
    bench.tier.report(RankReport(0, (result,)))
    bench.tier.purge()
    for _ in range(4):
        bench.later(61)
        bench.keep()
        assert bench.tier.groups(key_of(1)) == 0
    assert not bench.disk


def test_an_order_ends_although_something_unexpected_happens() -> None:
    bench = Bench().open()
    job = bench.write(key_of(1))
    order = bench.orders()[0]
    bench.catalogue.wrote = None  # type: ignore[assignment,method-assign]
    with pytest.raises(TypeError):
        bench.answer(order)
    assert bench.ended == {job: 1}
    assert bench.tier.is_idle
    assert bench.tier.used == 0


def test_one_file_that_cannot_be_removed_does_not_stop_the_tier() -> None:
    bench = Bench()
    bench.disk = {name(200 + i, "another"): FILE for i in range(ROOM)}
    bench.open()
    stuck = next(iter(bench.disk))
    for i in range(ROOM):
        bench.write(key_of(i))
        while bench.chores:
            bench.do_chore(stuck=[stuck])
        bench.serve()
        assert not bench.tier.is_degraded
    assert bench.troubles["disk_remove"] > 0
    assert stuck in bench.disk
    assert bench.tier.groups(key_of(ROOM - 1)) == 1


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


# -- ranks that differ ---------------------------------------------------------------------


def staged() -> Bench:
    """Two pipeline stages, of which only the second has layers of group 1."""
    bench = Bench(ranks=2, groups=2)
    bench.part_bytes_of = {0: (FILE - HEADER_BYTES, 0), 1: (FILE - HEADER_BYTES,) * 2}
    return bench


def test_a_rank_without_layers_of_a_group_has_nothing_to_write_of_it() -> None:
    bench = staged().open()
    job = bench.write(key_of(1), (0, 1))
    bench.serve()
    assert bench.outcomes[job] is Outcome.DONE
    assert bench.tier.groups(key_of(1)) == 0b11
    assert set(bench.disk) == {name(1), name(1, rank=1), name(1, rank=1, group=1)}
    job = bench.read(key_of(1), (0, 1))
    bench.serve()
    assert bench.outcomes[job] is Outcome.DONE
    assert bench.tier.used == 3 * FILE


def test_what_lies_there_before_the_ranks_come_is_whole_then() -> None:
    bench = staged()
    bench.disk = {name(1): FILE, name(1, rank=1): FILE, name(1, rank=1, group=1): FILE}
    bench.disk |= {name(2): FILE, name(3, group=1): FILE}
    bench.tier.open(OWN, {})
    bench.keep()
    assert bench.catalogue.groups(key_of(1)) == 0b01
    bench.connect()
    assert [bench.tier.groups(key_of(i)) for i in (1, 2, 3)] == [0b11, 0, 0]
    bench.tier.purge()  # nothing of this was written here
    bench.connect()
    assert bench.tier.groups(key_of(1)) == 0b11


def test_a_group_is_not_whole_without_the_ranks_that_have_it() -> None:
    bench = staged()
    bench.disk = {name(1): FILE, name(1, rank=1): FILE, name(1, rank=1, group=1): FILE}
    bench.open()
    del bench.disk[name(1, rank=1, group=1)]
    job = bench.read(key_of(1), (0, 1))
    bench.serve()
    assert bench.outcomes[job] is Outcome.MISSING
    assert bench.tier.groups(key_of(1)) == 0b01


def test_uses_are_written_down_where_there_is_a_file() -> None:
    bench = staged()
    bench.disk = {name(1, rank=1, group=1): FILE}
    bench.open()
    bench.tier.used_now([key_of(1)], 1000)
    bench.later(6)
    touches = [chore for chore in bench.chores if isinstance(chore, Touch)]
    assert [list(t.files) for t in touches] == [[(name(1, rank=1, group=1), 1000)]]


def test_what_others_wrote_is_looked_for_where_it_can_be() -> None:
    bench = staged()
    bench.open()
    bench.disk = {name(1): FILE, name(1, rank=1): FILE, name(1, rank=1, group=1): FILE}
    bench.look_for([key_of(1)])
    bench.keep()
    assert bench.tier.groups(key_of(1)) == 0b11


def test_room_is_kept_for_what_each_rank_says() -> None:
    """The second stage's layers take more than the scheduler was told of the first's."""
    bench = Bench(ranks=2)
    bench.part_bytes_of = {0: (FILE - HEADER_BYTES,), 1: (9 * FILE - HEADER_BYTES,)}
    bench.open()
    for i in range(ROOM):
        bench.write(key_of(i))
        for rank in range(2):
            for order in bench.orders(rank):
                nbytes = FILE * (9 if rank else 1)
                bench.sent[rank].remove(order)
                bench.disk[name(i, rank=rank)] = nbytes
                result = OrderResult(order.job, Outcome.DONE, nbytes, (nbytes,))
                bench.tier.report(RankReport(rank, (result,)))
                assert bench.tier.used + 2 * FOLDER_BYTES <= bench.settings.capacity
        bench.keep()
    assert sum(bench.disk.values()) > 15 * FILE


def test_ranks_that_are_not_of_this_engine_do_not_open_it() -> None:
    bench = Bench(ranks=2)
    bench.tier.open(OWN, {})
    bench.keep()
    for others in ({0: (1,), 7: (1,)}, {0: (1,), 1: (1, 1)}, {0: (1,), 1: ()}):
        bench.tier.connected(others)
        assert not bench.tier.is_readable
    bench.tier.connected({0: (1,), 1: (1,), 7: (1,)})
    assert bench.tier.is_readable


@pytest.mark.parametrize("work", ["a rank has come", "a write is wanted"])
def test_ranks_that_do_not_come_are_missed(work: str) -> None:
    bench = Bench(ranks=2)
    bench.tier.open(OWN, {})
    bench.keep()
    if work == "a rank has come":
        bench.connect(1)
    job = bench.write(key_of(1))
    bench.later(PATIENCE - 1)
    assert not bench.tier.is_degraded
    bench.later(1)
    assert bench.tier.is_degraded
    assert not bench.tier.is_connecting
    assert bench.outcomes[job] is Outcome.DROPPED
    assert bench.outcomes[bench.write(key_of(2))] is Outcome.DROPPED
    bench.later(1000)
    assert bench.troubles["disk_ranks"] == 1
    bench.connect()
    assert not bench.tier.is_degraded
    assert bench.tier.is_readable


def test_an_engine_that_makes_no_step_misses_nobody() -> None:
    bench = Bench(ranks=2)
    bench.tier.open(OWN, {})
    bench.keep()
    bench.later(1000)
    assert not bench.tier.is_degraded


def test_what_stands_in_one_chunks_place_says_nothing_of_the_others() -> None:
    bench = Bench().open()
    for _ in range(10):
        bench.write(key_of(1))
        order = bench.orders()[0]
        bench.sent[0].clear()
        result = OrderResult(order.job, Outcome.FAILED, reason="occupied")
        bench.tier.report(RankReport(0, (result,)))
    assert bench.tier.is_writable
    assert bench.troubles["disk_write"] == 10
