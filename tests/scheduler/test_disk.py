# SPDX-License-Identifier: Apache-2.0
"""The disk tier under vLLM's scheduler: what outlives an engine, and what never comes back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scheduler.disks import disk, files, opened
from tests.scheduler.sim import STATE, Sim, prompt

Make = Callable[..., Sim]


def restarted(sim: Make, engine: Sim, **options: object) -> Sim:
    engine.close()
    return opened(sim(**options))


def test_a_prompt_is_a_hit_after_a_restart(sim: Make, tmp_path: Path) -> None:
    options = {"extra": disk(tmp_path)}
    engine = opened(sim(**options))
    cold = engine.complete("cold", prompt(100), 4)
    engine.settle()
    assert len(files(tmp_path)) == 6
    engine = restarted(sim, engine, **options)
    warm = engine.complete("warm", prompt(100), 4)
    assert (cold.cpu, warm.cpu, engine.counter("hit_tokens", "disk")) == (0, 0, 96)
    assert warm.output == cold.output
    engine.check_quiet()


def test_what_was_read_stays_in_the_cpu_tier(sim: Make, tmp_path: Path) -> None:
    options = {"extra": disk(tmp_path)}
    engine = opened(sim(**options))
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine = restarted(sim, engine, **options)
    engine.complete("warm", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    again = engine.complete("again", prompt(100), 1)
    assert again.cpu == 96
    engine.check_quiet()


def test_without_a_cpu_tier(sim: Make, tmp_path: Path) -> None:
    options = {"extra": {"cpu": None, **disk(tmp_path)}}
    engine = opened(sim(**options))
    engine.complete("cold", prompt(200), 1)
    engine.settle()
    engine = restarted(sim, engine, **options)
    engine.complete("warm", prompt(200), 1)
    assert engine.counter("hit_tokens", "disk") == 192
    engine.check_quiet()


@pytest.mark.parametrize("windows", [(0,), (0, 40), (40,), (0, STATE)], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_and_ranks(sim: Make, tmp_path: Path, windows: tuple[int, ...], ranks: int) -> None:
    options = {"extra": disk(tmp_path), "windows": windows, "ranks": ranks}
    engine = opened(sim(**options))
    cold = engine.complete("cold", prompt(200), 4)
    engine.complete("again", prompt(200), 4)
    engine.settle()
    engine = restarted(sim, engine, **options)
    warm = engine.complete("warm", prompt(200), 4)
    assert engine.counter("hit_tokens", "disk") > 0
    assert warm.output == cold.output
    engine.check_quiet()


def test_a_cpu_tier_smaller_than_the_prompt(sim: Make, tmp_path: Path) -> None:
    big = opened(sim(extra=disk(tmp_path)))
    cold = big.complete("cold", prompt(320), 4)
    big.settle()
    engine = restarted(sim, big, extra=disk(tmp_path), capacity_chunks=8)
    warm = engine.complete("warm", prompt(320), 4)
    assert 0 < engine.counter("hit_tokens", "disk") <= 8 * 16
    assert warm.output == cold.output
    engine.check_quiet()


def test_a_chunk_evicted_from_the_cpu_tier_is_read_again(sim: Make, tmp_path: Path) -> None:
    engine = opened(sim(extra=disk(tmp_path), capacity_chunks=8))
    engine.complete("a", prompt(100, 1), 1)
    engine.settle()
    for i in range(2, 5):
        engine.complete(f"other {i}", prompt(100, i), 1)
        engine.settle()
    engine.flush_device()
    engine.complete("again", prompt(100, 1), 1)
    assert engine.counter("hit_tokens", "disk") > 0
    engine.check_quiet()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "zero", "swap", "gone"])
def test_a_damaged_file_is_a_miss_and_is_written_anew(
    sim: Make, tmp_path: Path, damage: str
) -> None:
    options = {"extra": disk(tmp_path)}
    engine = opened(sim(**options))
    cold = engine.complete("cold", prompt(100), 4)
    engine.settle()
    engine.close()
    victim, other = files(tmp_path)[:2]
    good = victim.read_bytes()
    if damage == "flip":
        victim.write_bytes(good[:5000] + bytes([good[5000] ^ 1]) + good[5001:])
    elif damage == "cut":
        victim.write_bytes(good[:-1])
    elif damage == "empty":
        victim.write_bytes(b"")
    elif damage == "zero":
        victim.write_bytes(bytes(len(good)))
    elif damage == "swap":
        victim.write_bytes(other.read_bytes())
    engine = opened(sim(**options))
    if damage == "gone":
        victim.unlink()
    warm = engine.complete("warm", prompt(100), 4)
    assert warm.output == cold.output
    assert engine.counter("hit_tokens", "disk") < 96
    kind = "disk_missing" if damage == "gone" else "disk_damaged"
    assert engine.counter("failures", kind) == 1
    engine.settle()
    engine.complete("opens again", prompt(100), 4)
    engine.settle()
    assert victim.read_bytes() == good
    engine.check_quiet()


def test_a_reset_closes_the_disk(sim: Make, tmp_path: Path) -> None:
    """Files say nothing of weights in memory: after a reset nothing is written or offered."""
    options = {"extra": disk(tmp_path)}
    engine = opened(sim(**options))
    engine.complete("before", prompt(100), 1)
    engine.settle()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    before = files(tmp_path)
    engine.complete("after", prompt(100), 1)
    engine.complete("new", prompt(100, 2), 1)
    engine.settle()
    assert engine.counter("hit_tokens", "disk") == 0
    assert files(tmp_path) == before
    engine.check_quiet()
