# SPDX-License-Identifier: Apache-2.0
"""Random lives of a disk tier whose file calls fail: in the end all agrees, and nothing lied."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.unit.disk._agent import FaultyFiles, Rig, key_of, on_disk, rig
from tests.unit.disk._files import CALLS
from vllm_tiered_kv.tiers.disk.orders import Outcome, ReadOrder

STEPS = 40


def live(rig: Rig, chance: random.Random) -> None:
    """Writes, reads and all else, with file calls that fail now and then."""
    files = rig.files
    for _ in range(STEPS):
        key = key_of(chance.randrange(40))
        what = chance.random()
        if what < 0.45:
            rig.write(key, chance.choice([(0,), (1,), (0, 1)]))
        elif what < 0.75:
            groups = [g for g in (0, 1) if rig.agent.groups(key) >> g & 1]
            rig.read(key, groups or [0], chance.choice([0.0, 20.0]))
        elif what < 0.8:
            rig.agent.used_now([key_of(chance.randrange(40)) for _ in range(5)])
        elif what < 0.83:
            rig.agent.cancel([j for j, o in rig.orders.items() if isinstance(o, ReadOrder)])
        elif what < 0.84:
            rig.agent.purge()
        elif what < 0.86:
            shutil.rmtree(rig.root, ignore_errors=True)
        elif what < 0.92:
            files.rate = chance.choice([0.0, 0.0, 0.05, 0.3, 1.0])
            files.failing = frozenset(chance.sample(CALLS, chance.choice([2, 5, len(CALLS)])))
        elif what < 0.96:
            rig.settle()
        rig.take()
        held = sum(on_disk_now(rig.root).values())
        assert held <= rig.agent.settings.capacity


def on_disk_now(root: Path) -> dict[str, int]:
    """While files come and go."""
    for _ in range(20):
        try:
            return on_disk(root)
        except OSError:
            continue
    return {}


def check_end(rig: Rig) -> None:
    """Nothing fails any more: everything comes right by itself."""
    rig.files.rate = 0.0
    rig.settle()
    agent, tier = rig.agent, rig.agent._tier
    for health in (tier._upkeep.reads, tier._upkeep.writes, tier._upkeep.keeps):
        health._again_at = 0.0  # pauses last up to a minute
    rig.wait(lambda: not agent.is_degraded and agent.is_readable, "it does not work again")
    rig.wait(lambda: not tier._removal._leaving, "files never leave")
    rig.rescan()
    rig.wait(lambda: not rig.catalogue._distrusted, "what may be wrong is not removed")
    rig.rescan()
    rig.wait(lambda: not tier._removal._leaving, "files never leave")
    there = on_disk(rig.root)
    assert rig.catalogue.used == sum(there.values())
    assert rig.catalogue.files == len(there)
    assert tier._quota.reserved == tier._quota.doubtful == 0
    assert agent.used <= agent.settings.capacity
    assert tier.is_idle
    assert not rig.wrong
    job = rig.write(key_of(99))
    rig.settle()
    assert job is not None
    assert rig.outcomes[job] is Outcome.DONE
    job = rig.read(key_of(99))
    rig.settle()
    assert job is not None
    assert rig.outcomes[job] is Outcome.DONE
    assert not rig.wrong
    assert not rig.failures["internal"]
    assert agent._thread.is_alive()
    assert agent._keeper._thread.is_alive()
    assert all(t.is_alive() for executor in rig.executors for t in executor._threads)


def history(root: Path, seed: int) -> None:
    chance = random.Random(seed)
    with rig(root, FaultyFiles(seed), ranks=chance.choice([1, 2])) as engine:
        engine.open()
        live(engine, chance)
        check_end(engine)
        assert engine.close()


@pytest.mark.timeout(600)
def test_histories(tmp_path: Path) -> None:
    for seed in range(60):
        history(tmp_path / str(seed), seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("block", range(10))
def test_thousands_of_histories(tmp_path: Path, block: int) -> None:
    for seed in range(1000 + 300 * block, 1000 + 300 * (block + 1)):
        history(tmp_path / str(seed), seed)
