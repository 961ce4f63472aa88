# SPDX-License-Identifier: Apache-2.0
"""What the tier decides, one thing at a time; `test_tier_model.py` does all of it in any order."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.disk._tier import FILE, OWN, ROOM, Bench, key_of, name, written
from vllm_tiered_kv.tiers.disk.chores import Prepare, Remove, Scan, ScanEnded, Touch
from vllm_tiered_kv.tiers.disk.flight import MAX_WRITES, WRITE_PATIENCE
from vllm_tiered_kv.tiers.disk.format import HEADER_BYTES
from vllm_tiered_kv.tiers.disk.orders import (
    CancelReads,
    OpenFolder,
    OrderResult,
    Outcome,
    RankReport,
    ReadOrder,
)
from vllm_tiered_kv.tiers.disk.ranks import PATIENCE
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES

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
