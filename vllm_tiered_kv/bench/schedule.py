# SPDX-License-Identifier: Apache-2.0
"""Which part of the workload goes to which arm, and when."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import msgspec

from vllm_tiered_kv.bench.config import Load, Mode
from vllm_tiered_kv.bench.workloads.build import Session


class Block(msgspec.Struct, frozen=True):
    """Sessions that go to one arm and then to the next."""

    number: int
    """-1: the warm-up."""
    sessions: tuple[Session, ...]
    starts: tuple[float, ...]
    """Open loop: seconds from the block's beginning at which each session begins."""


class Schedule(msgspec.Struct, frozen=True):
    """All blocks, and the order of arms in each."""

    warmup: Block
    blocks: tuple[Block, ...]
    orders: tuple[tuple[int, ...], ...]


def make_schedule(
    sessions: Sequence[Session], warmup: int, blocks: int, arms: int, load: Load, seed: int
) -> Schedule:
    """Cut the sessions behind the first ``warmup`` into blocks of as equal a size as can be."""
    measured = sessions[warmup:]
    ends = [len(measured) * (number + 1) // blocks for number in range(blocks)]
    begins = [0, *ends[:-1]]
    return Schedule(
        warmup=_block(-1, sessions[:warmup], load, seed),
        blocks=tuple(
            _block(number, measured[begin:end], load, seed)
            for number, (begin, end) in enumerate(zip(begins, ends, strict=True))
        ),
        orders=orders(blocks, arms, seed),
    )


def orders(blocks: int, arms: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """The order of arms in each block.

    Within each ``arms`` blocks in a row every arm stands once at every place: a machine that slows
    down steadily, or a disturbance by who came just before, meets all alike.
    """
    rng = Random(f"{seed}/orders")
    found: list[tuple[int, ...]] = []
    while len(found) < blocks:
        base = rng.sample(range(arms), arms)
        turns = rng.sample(range(arms), arms)
        found += [tuple(base[turn:] + base[:turn]) for turn in turns]
    return tuple(found[:blocks])


def split(blocks: int, rounds: int) -> tuple[range, ...]:
    """Blocks of each round; fewer rounds where there are fewer blocks."""
    rounds = min(rounds, blocks)
    edges = [blocks * number // rounds for number in range(rounds + 1)]
    return tuple(range(begin, end) for begin, end in pairwise(edges))


def _block(number: int, sessions: Sequence[Session], load: Load, seed: int) -> Block:
    if load.mode is Mode.CLOSED:
        starts = (0.0,) * len(sessions)
    elif all(session.due is not None for session in sessions):
        dues = [session.due or 0.0 for session in sessions]
        starts = tuple(max(0.0, due - dues[0]) for due in dues)
    else:
        rng = Random(f"{seed}/arrivals {number}")
        clock, times = 0.0, []
        for _ in sessions:
            times.append(clock)
            clock += rng.expovariate(load.rate)
        starts = tuple(times)
    return Block(number, tuple(sessions), starts)
