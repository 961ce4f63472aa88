# SPDX-License-Identifier: Apache-2.0
"""The tier's decisions under anything that may happen, over a folder that is a dict."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.disk._tier import FILE, OWN, Bench, key_of
from vllm_tiered_kv.tiers.disk.catalogue import FileName
from vllm_tiered_kv.tiers.disk.chores import Remove
from vllm_tiered_kv.tiers.disk.orders import OrderResult, Outcome, RankReport

keys = st.integers(0, 30).map(key_of)
parts = st.sampled_from([(0,), (1,), (0, 1)])
writes_end = st.sampled_from([Outcome.DONE] * 5 + [Outcome.FAILED, Outcome.DROPPED])
reads_end = st.sampled_from([Outcome.DONE] * 4 + list(Outcome))


class TierMachine(RuleBasedStateMachine):
    """One engine is the folder's only writer, but others may remove what they like."""

    @initialize(
        ranks=st.integers(1, 2),
        others=st.integers(0, 30),
        low=st.sampled_from([0.95, 0.99]),
        shared=st.booleans(),
    )
    def begin(self, ranks: int, others: int, low: float, shared: bool) -> None:
        self.bench = Bench(ranks, 2, low_water=low, high_water=0.995, shared=shared)
        self.bench.disk = {FileName("another", 0, 0, key_of(i)): FILE for i in range(others)}
        self.left_behind = 0
        self.late: list[tuple[int, OrderResult]] = []
        self.bench.open()
        self.fits = self.bench.tier.used <= self.bench.settings.capacity

    # -- what the scheduler half says --------------------------------------------------

    @rule(chosen=st.lists(keys, min_size=1, max_size=6), groups=parts, served=st.booleans())
    def write(self, chosen: list[bytes], groups: tuple[int, ...], served: bool) -> None:
        for key in chosen:
            self.bench.write(key, groups)
        if served:
            self.bench.serve()

    @precondition(lambda self: any(isinstance(c, Remove) for c in self.bench.chores))
    @rule(data=st.data())
    def write_what_has_just_been_removed(self, data: st.DataObject) -> None:
        """Before the tier knows that it is gone."""
        while not isinstance(removal := self.bench.chores[0], Remove):
            self.bench.begin_chore()
        self.bench.begin_chore()
        if own := [name for name in removal.files if name.namespace == OWN]:
            name = data.draw(st.sampled_from(own))
            self.bench.write(name.key, (name.group,))
            self.bench.serve()

    @rule(key=keys, groups=parts)
    def read(self, key: bytes, groups: tuple[int, ...]) -> None:
        self.bench.read(key, groups)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        jobs = sorted(self.bench.wanted - set(self.bench.ended))
        if jobs:
            self.bench.tier.cancel(data.draw(st.lists(st.sampled_from(jobs), unique=True)))

    @rule(chosen=st.lists(keys, max_size=5))
    def use(self, chosen: list[bytes]) -> None:
        self.bench.tier.used_now(chosen, 1)

    @rule()
    def purge(self) -> None:
        self.bench.tier.purge()
        assert not any(self.bench.tier.groups(key_of(i)) for i in range(31))

    @rule(chosen=st.lists(keys, max_size=5))
    def look_for(self, chosen: list[bytes]) -> None:
        self.bench.look_for(chosen)

    # -- what ranks answer -------------------------------------------------------------

    @rule(
        data=st.data(),
        for_write=writes_end,
        for_read=reads_end,
        done=st.integers(0, 1),
        later=st.booleans(),
    )
    def answer(
        self, data: st.DataObject, for_write: Outcome, for_read: Outcome, done: int, later: bool
    ) -> None:
        rank = data.draw(st.integers(0, self.bench.settings.ranks - 1))
        if not (orders := self.bench.orders(rank)):
            return
        order = data.draw(st.sampled_from(orders))
        writing = hasattr(order, "facts")
        result = self.bench.do(rank, order, for_write if writing else for_read, done)
        if later:
            self.late.append((rank, result))
        else:
            self.bench.tier.report(RankReport(rank, (result,)))

    @precondition(lambda self: self.late)
    @rule(data=st.data(), again=st.booleans())
    def hear(self, data: st.DataObject, again: bool) -> None:
        entry = data.draw(st.sampled_from(self.late))
        if not again:
            self.late.remove(entry)
        self.bench.tier.report(RankReport(entry[0], (entry[1], entry[1])))

    @rule(rank=st.sampled_from([None, None, None, 0, 1]))
    def reach(self, rank: int | None) -> None:
        self.bench.unreachable = set() if rank is None else {rank}

    # -- what the keeper does ----------------------------------------------------------

    @precondition(lambda self: self.bench.chores)
    @rule(count=st.integers(1, 4), heard=st.booleans())
    def keep(self, count: int, heard: bool) -> None:
        for _ in range(min(count, len(self.bench.chores))):
            self.bench.begin_chore()
        if heard:
            self.bench.hear()

    @precondition(lambda self: self.bench.news)
    @rule()
    def hear_the_keeper(self) -> None:
        self.bench.hear()

    @precondition(lambda self: self.bench.chores)
    @rule(how=st.sampled_from(["well", "well", "well", "fail", "stick"]))
    def keep_badly(self, how: str) -> None:
        if how == "well":
            self.bench.do_chore()
        elif how == "fail":
            self.bench.fail_chore()
        else:
            self.bench.do_chore(stuck=list(self.bench.disk)[::2])

    @rule(takes=st.sampled_from([True, True, True, False]))
    def take_chores(self, takes: bool) -> None:
        self.bench.takes_chores = takes

    @rule(
        seconds=st.sampled_from([0.2] * 6 + [3.0, 11.0, 70.0, 700.0]),
        busy=st.sampled_from([0] * 5 + [50]),
    )
    def tick(self, seconds: float, busy: float) -> None:
        self.bench.later(seconds, busy)

    @rule(data=st.data())
    def somebody_removes(self, data: st.DataObject) -> None:
        if self.bench.disk:
            del self.bench.disk[data.draw(st.sampled_from(list(self.bench.disk)))]

    # -- what holds --------------------------------------------------------------------

    @invariant()
    def the_folder_never_holds_more_than_its_capacity(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench, capacity = self.bench, self.bench.settings.capacity
        if not self.fits:  # it was so when the engine started
            self.fits = bench.tier.used <= capacity
            return
        assert bench.tier.used <= capacity
        assert sum(bench.disk.values()) <= bench.tier.used

    @invariant()
    def every_order_ends_once(self) -> None:
        if hasattr(self, "bench"):
            assert set(self.bench.ended) <= self.bench.wanted
            assert set(self.bench.ended.values()) <= {1}

    @invariant()
    def what_is_offered_was_whole_when_it_was_last_heard_of(self) -> None:
        if not hasattr(self, "bench"):
            return
        for i in range(31):
            mask = self.bench.tier.groups(key_of(i))
            ranks = range(self.bench.settings.ranks)
            for group in (g for g in range(2) if mask >> g & 1):
                names = [FileName(OWN, rank, group, key_of(i)) for rank in ranks]
                assert all(self.bench.catalogue.has(name) for name in names)

    def teardown(self) -> None:
        """Everybody answers, and nobody fails any more: it all comes right by itself."""
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.unreachable, bench.takes_chores = set(), True
        for rank, result in self.late:
            bench.tier.report(RankReport(rank, (result,)))
        bench.hear()
        for _ in range(60):
            bench.serve()
            bench.keep()
            bench.later(61)
        assert bench.ended == dict.fromkeys(bench.wanted, 1)
        assert bench.tier.is_idle
        assert not bench.tier.is_degraded
        assert bench.tier.is_readable
        self.the_folder_never_holds_more_than_its_capacity()
        assert bench.tier.used == bench.catalogue.used == sum(bench.disk.values())
        assert bench.catalogue.files == len(bench.disk)
        by_file = [name for name in bench.disk if not bench.catalogue.has(name)]
        assert not by_file
        assert bench.tier.used <= bench.settings.capacity
        job = bench.write(key_of(99))
        bench.serve()
        bench.keep()
        bench.serve()
        assert bench.outcomes[job] is Outcome.DONE
        assert bench.tier.groups(key_of(99)) == 1


def run(seed: int, examples: int) -> None:
    machine = type(f"Seed{seed}", (TierMachine,), {})
    options = settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=options)


@pytest.mark.timeout(600)
def test_the_tier_holds_whatever_happens() -> None:
    run(seed=1, examples=60)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(2, 12))
def test_the_tier_holds_whatever_happens_for_long(seed: int) -> None:
    run(seed, examples=300)
