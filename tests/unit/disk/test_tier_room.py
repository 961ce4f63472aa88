# SPDX-License-Identifier: Apache-2.0
"""What the tier removes: to make room, and what must not be offered any more."""

from __future__ import annotations

import pytest

from tests.unit.disk._tier import FILE, OWN, ROOM, Bench, key_of, name, written
from vllm_tiered_kv.tiers.disk.chores import Remove
from vllm_tiered_kv.tiers.disk.orders import (
    Outcome,
    RankReport,
)

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
