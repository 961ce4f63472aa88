# SPDX-License-Identifier: Apache-2.0
"""Who gets what when."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_tiered_kv.bench.config import Load, Mode
from vllm_tiered_kv.bench.schedule import make_schedule, orders, split
from vllm_tiered_kv.bench.workloads.build import Session, Step

OPEN = Load(mode=Mode.OPEN, rate=5.0)


def sessions(count: int, *, due: bool = False) -> list[Session]:
    step = Step((1, 2), 1)
    return [Session(n, (step,), due=10.0 + n / 4 if due else None) for n in range(count)]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 1 << 40))
def test_every_arm_stands_at_every_place_equally_often(blocks: int, arms: int, seed: int) -> None:
    found = orders(blocks * arms, arms, seed)
    assert found == orders(blocks * arms, arms, seed)
    for order in found:
        assert sorted(order) == list(range(arms))
    for place in range(arms):
        counts = Counter(order[place] for order in found)
        assert set(counts.values()) == {blocks}


def test_the_order_depends_on_the_seed() -> None:
    assert len({orders(12, 2, seed) for seed in range(10)}) > 5
    assert len(set(orders(12, 2, 0))) == 2


@given(st.integers(1, 100), st.integers(0, 20), st.data())
def test_blocks_hold_every_session_once(measured: int, warmup: int, data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, measured))
    made = make_schedule(sessions(warmup + measured), warmup, blocks, 2, Load(), seed=0)
    assert [session.number for session in made.warmup.sessions] == list(range(warmup))
    assert len(made.blocks) == len(made.orders) == blocks
    held = [session.number for block in made.blocks for session in block.sessions]
    assert held == list(range(warmup, warmup + measured))
    sizes = {len(block.sessions) for block in made.blocks}
    assert max(sizes) - min(sizes) <= 1


def test_sessions_of_an_open_loop_come_by_the_clock() -> None:
    made = make_schedule(sessions(1000), 0, 2, 2, OPEN, seed=3)
    for block in made.blocks:
        assert block.starts[0] == 0
        assert list(block.starts) == sorted(block.starts)
        assert 80 < block.starts[-1] < 120
    assert made == make_schedule(sessions(1000), 0, 2, 2, OPEN, seed=3)
    closed = make_schedule(sessions(10), 0, 2, 2, Load(), seed=3)
    assert {start for block in closed.blocks for start in block.starts} == {0.0}


def test_a_trace_has_times_of_its_own() -> None:
    made = make_schedule(sessions(8, due=True), 2, 2, 2, OPEN, seed=0)
    assert [block.starts for block in made.blocks] == [(0.0, 0.25, 0.5), (0.0, 0.25, 0.5)]


@pytest.mark.parametrize(
    ("blocks", "rounds", "expected"),
    [(6, 2, [(0, 1, 2), (3, 4, 5)]), (5, 2, [(0, 1), (2, 3, 4)]), (2, 9, [(0,), (1,)])],
)
def test_rounds_share_the_blocks(blocks: int, rounds: int, expected: list[tuple[int, ...]]) -> None:
    assert [tuple(part) for part in split(blocks, rounds)] == expected
