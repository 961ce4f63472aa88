# SPDX-License-Identifier: Apache-2.0
"""The tier's decisions under anything that may happen, over a folder that is a dict.

What comes to pass is counted and asserted: histories in which nothing does show nothing.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.unit.disk._tier import FILE, OWN, ROOM, Bench, key_of
from vllm_tiered_kv.bits import bits_of
from vllm_tiered_kv.tiers.disk.chores import Remove
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.orders import OrderResult, Outcome, RankReport
from vllm_tiered_kv.tiers.disk.settings import FOLDER_BYTES

STEPS = 80
NUMBERS = range(31)
PARTS = [(0,), (1,), (0, 1)]
SHARES = {
    "written": 0.95,
    "read": 0.85,
    "evicted": 0.7,
    "recovered": 0.4,
    "failed": 0.5,
    "damaged": 0.03,
    "removed behind our back": 0.3,
    "written while it was removed": 0.1,
    "purged": 0.3,
}
"""Of the histories in which it happens, at least."""


class History:
    """One engine is the folder's only writer, but others may remove what they like."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        ranks, low = chance.choice([1, 2]), chance.choice([0.95, 0.99])
        shared = chance.random() < 0.5
        self.bench = Bench(ranks, 2, low_water=low, high_water=0.995, shared=shared)
        if ranks == 2 and chance.random() < 0.3:  # a stage without layers of group 1
            self.bench.part_bytes_of[chance.randrange(2)] = (FILE - 4096, 0)
        others = chance.choice([0, 0, 10, 30])
        self.bench.disk = {FileName("another", 0, 0, key_of(i)): FILE for i in range(others)}
        self.late: list[tuple[int, OrderResult]] = []
        self.seen: Counter[str] = Counter()
        self.bench.open()
        self.fits = others <= ROOM
        self.was_degraded = False

    def key(self) -> bytes:
        return key_of(self.chance.choice(NUMBERS))

    def step(self) -> None:
        act = self.chance.choices(*zip(*self.ACTS, strict=True))[0]
        act(self)
        for _ in range(self.chance.choice([0, 1, 3])):
            self.chance.choice([History.answer, History.keep, History.hear])(self)
        self.check()

    # -- what the scheduler half says --------------------------------------------------

    def write(self) -> None:
        for _ in range(self.chance.choice([1, 2, 6])):
            self.bench.write(self.key(), self.chance.choice(PARTS))

    def write_what_has_just_been_removed(self) -> None:
        """Before the tier knows that it is gone."""
        bench = self.bench
        if not any(isinstance(chore, Remove) for chore in bench.chores):
            return
        while not isinstance(removal := bench.chores[0], Remove):
            bench.begin_chore()
        bench.begin_chore()
        if own := [name for name in removal.files if name.namespace == OWN]:
            name = self.chance.choice(own)
            bench.write(name.key, (name.group,))
            bench.serve()
            self.seen["written while it was removed"] += 1

    def read(self) -> None:
        for _ in range(self.chance.choice([1, 4])):
            self.bench.read(self.key(), self.chance.choice(PARTS))

    def read_what_is_there(self) -> None:
        for number in self.chance.sample(NUMBERS, 8):
            if mask := self.bench.tier.groups(key_of(number)):
                self.bench.read(key_of(number), bits_of(mask))

    def cancel(self) -> None:
        jobs = sorted(self.bench.wanted - set(self.bench.ended))
        self.bench.tier.cancel(self.chance.sample(jobs, len(jobs) // 2))

    def use(self) -> None:
        keys = [self.key() for _ in range(4)]
        self.bench.tier.used_now(keys[:2], 1, keys[2:])
        self.bench.tier.renew(keys)

    def purge(self) -> None:
        self.bench.purge()
        self.seen["purged"] += 1

    def look(self) -> None:
        self.bench.look_for([self.key() for _ in range(self.chance.randrange(5))])

    # -- what ranks answer -------------------------------------------------------------

    def answer(self) -> None:
        chance, bench = self.chance, self.bench
        rank = chance.randrange(bench.settings.ranks)
        if not (orders := bench.orders(rank)):
            return
        order = chance.choice(orders)
        well = chance.random() < 0.85
        ends = [Outcome.FAILED, Outcome.DROPPED] if order.job in bench.writes else [*Outcome]
        outcome = Outcome.DONE if well else chance.choice(ends)
        self.seen["damaged"] += outcome is Outcome.DAMAGED
        result = bench.do(rank, order, outcome, chance.randrange(2))
        if chance.random() < 0.2:
            self.late.append((rank, result))
        else:
            bench.tier.report(RankReport(rank, (result,)))

    def serve(self) -> None:
        self.bench.serve()

    def hear(self) -> None:
        """Somebody is late, and maybe heard twice."""
        self.bench.hear()
        if self.late:
            entry = self.chance.choice(self.late)
            if self.chance.random() < 0.7:
                self.late.remove(entry)
            self.bench.tier.report(RankReport(entry[0], (entry[1], entry[1])))

    def reach(self) -> None:
        self.bench.unreachable = self.chance.choice([set(), set(), {0}, {1}])

    def connect(self) -> None:
        self.bench.connect()

    # -- what the keeper does ----------------------------------------------------------

    def keep(self) -> None:
        for _ in range(min(self.chance.choice([1, 4]), len(self.bench.chores))):
            self.bench.begin_chore()
        if self.chance.random() < 0.7:
            self.bench.hear()

    def keep_badly(self) -> None:
        if not self.bench.chores:
            return
        if self.chance.random() < 0.5:
            self.bench.fail_chore()
        else:
            self.bench.do_chore(stuck=list(self.bench.disk)[::2])

    def take_chores(self) -> None:
        self.bench.takes_chores = self.chance.random() < 0.75

    # -- time, and others --------------------------------------------------------------

    def tick(self) -> None:
        self.bench.later(self.chance.choice([0.2] * 8 + [1.0, 3.0]))

    def long_while(self) -> None:
        self.bench.later(self.chance.choice([11.0, 70.0, 700.0]), self.chance.choice([0, 0, 50]))

    def all_goes_well(self) -> None:
        """For a while everybody can be reached and does what he is told."""
        self.bench.unreachable, self.bench.takes_chores = set(), True
        for _ in range(3):
            self.bench.serve()
            self.bench.keep()
            self.bench.later(self.chance.choice([0.2, 61.0]))

    def somebody_removes(self) -> None:
        if self.bench.disk:
            del self.bench.disk[self.chance.choice(list(self.bench.disk))]
            self.seen["removed behind our back"] += 1

    ACTS = (
        (write, 12),
        (serve, 8),
        (read_what_is_there, 5),
        (read, 3),
        (tick, 6),
        (all_goes_well, 4),
        (write_what_has_just_been_removed, 2),
        (cancel, 1),
        (use, 2),
        (purge, 1),
        (look, 1),
        (reach, 1),
        (connect, 1),
        (keep_badly, 1),
        (take_chores, 1),
        (long_while, 1),
        (somebody_removes, 1),
    )

    # -- what holds --------------------------------------------------------------------

    def check(self) -> None:
        bench = self.bench
        capacity = bench.settings.capacity - FOLDER_BYTES * bench.settings.ranks
        self.seen["recovered"] += self.was_degraded and not bench.tier.is_degraded
        self.was_degraded = bench.tier.is_degraded
        held = sum(bench.disk.values())
        self.fits = self.fits or held <= capacity  # it was too much when the engine started
        assert held <= capacity or not self.fits
        assert held <= bench.tier.used
        assert set(bench.ended) <= bench.wanted
        assert set(bench.ended.values()) <= {1}
        for key in map(key_of, NUMBERS):
            for group in bits_of(bench.tier.groups(key)):
                sizes = bench.part_bytes_of.items()
                names = [FileName(OWN, r, group, key) for r, of_group in sizes if of_group[group]]
                assert all(bench.catalogue.has(name) for name in names)
                here = [name for name in names if name in bench.disk]
                after = [bench.written_after.get(name, bench.purges) for name in here]
                assert all(purges == bench.purges for purges in after), "of before a purge"

    def end(self) -> None:
        """Everybody answers, and nobody fails any more: it all comes right by itself."""
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
        assert bench.tier.used == bench.catalogue.used == sum(bench.disk.values())
        assert bench.catalogue.files == len(bench.disk)
        assert all(bench.catalogue.has(name) for name in bench.disk)
        self.check()
        job = bench.write(key_of(99))
        for _ in range(2):
            bench.serve()
            bench.keep()
        assert bench.outcomes[job] is Outcome.DONE
        assert bench.tier.groups(key_of(99)) == 1
        self._note()

    def _note(self) -> None:
        ended = self.bench.outcomes
        done = {job for job, outcome in ended.items() if outcome is Outcome.DONE}
        self.seen["written"] += len(done & self.bench.writes)
        self.seen["read"] += len(done & self.bench.reads)
        self.seen["evicted"] += self.bench.tier.evicted
        self.seen["failed"] += Outcome.FAILED in ended.values()
        self.seen["writes"] += len(self.bench.writes)


def histories(seeds: range) -> None:
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for seed in seeds:
        history = History(seed)
        try:
            for _ in range(STEPS):
                history.step()
            history.end()
        except BaseException as error:
            error.args = (f"seed {seed}", *error.args)
            raise
        seen.update(kind for kind, count in history.seen.items() if count)
        total.update(history.seen)
    rare = {kind: seen[kind] for kind, share in SHARES.items() if seen[kind] < share * len(seeds)}
    assert not rare, (rare, total)
    assert total["written"] > 0.3 * total["writes"], total


@pytest.mark.timeout(600)
def test_the_tier_holds_whatever_happens() -> None:
    histories(range(500))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("block", range(1, 11))
def test_the_tier_holds_whatever_happens_for_long(block: int) -> None:
    histories(range(2000 * block, 2000 * (block + 1)))
