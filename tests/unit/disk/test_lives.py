# SPDX-License-Identifier: Apache-2.0
"""Random lives of a disk tier over real files: in the end all agrees, and nothing lied.

What is counted is asserted too: lives in which nothing comes to pass show nothing.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.unit.disk._files import open_descriptors
from tests.unit.disk._life import Life

STEPS = 60
SHARES = {
    "write done": 0.95,
    "read done": 0.9,
    "evicted": 0.5,
    "recovered": 0.7,
    "failed calls": 0.7,
    "interleaved": 0.8,
    "harmed": 0.7,
    "write failed": 0.3,
    "read missing": 0.1,
    "read damaged": 0.05,
    "read failed": 0.05,
    "disk_remove": 0.05,
}
"""Of the lives in which it happens, at least."""


def lives(root: Path, seeds: range) -> None:
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    descriptors = open_descriptors()
    for seed in seeds:
        life = Life(root / str(seed) / "kv", seed)
        try:
            life.live(STEPS)
            life.end()
        except BaseException as error:
            error.args = (f"seed {seed}", *error.args)
            raise
        finally:
            life.close()
        seen.update(kind for kind, count in life.counts.items() if count)
        total.update(life.counts)
        shutil.rmtree(root / str(seed))
    assert open_descriptors() == descriptors
    rare = {kind: seen[kind] for kind, share in SHARES.items() if seen[kind] < share * len(seeds)}
    assert not rare, (rare, total)
    ended = {kind: count for kind, count in total.items() if kind.startswith("write ")}
    assert total["write done"] > 0.4 * sum(ended.values()), ended


@pytest.mark.timeout(600)
def test_lives(tmp_path: Path) -> None:
    lives(tmp_path, range(120))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("block", range(10))
def test_thousands_of_lives(tmp_path: Path, block: int) -> None:
    lives(tmp_path, range(1000 + 500 * block, 1500 + 500 * block))
