# SPDX-License-Identifier: Apache-2.0
"""Chunks of peers are compared with checksums before they are used: `verify`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.handover import Fleet, wait
from tests.scheduler.pairs import HIT, LONG, Pair, complete, rests
from tests.scheduler.sim import BLOCK, prompt

VERIFY = {"remote": {"verify": True}}


def verified(fleet: Fleet, **options: Any) -> Pair:
    return Pair(fleet, {**VERIFY, **options}, {**VERIFY, **options}).meet()


def teach_to_lend(pair: Pair, tokens: list[int], name: str) -> None:
    """A computes a prompt, and lends it."""
    pair.teach(tokens, name)
    shelving = pair.a.remote.shelving
    wait(lambda: rests(pair.a) and not shelving.summing, "A makes no checksums")


def damage(pair: Pair, chunk: int) -> None:
    """Another bit in the slot of A's chunk of this number."""
    node = list(pair.a.remote.agent.shelf._chunks.values())[-chunk].owner
    pool = pair.a.sim.ranks[0].tiered._worker._pool
    view = pool.tensor.numpy().reshape(pool.num_slots, -1)
    view[node.slots[0], 77] ^= 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_arrives_is_compared(fleet: Fleet, ranks: int) -> None:
    pair = verified(fleet, ranks=ranks)
    tokens = prompt(20 * BLOCK + 5)
    teach_to_lend(pair, tokens, "a")
    complete(pair.b, tokens, "b")
    assert pair.b.count(HIT) == 20 * BLOCK
    assert not pair.a.failures
    assert not pair.b.failures
    pair.settle()


@pytest.mark.parametrize("where", ["in the slot", "on the way"])
def test_one_wrong_bit_is_seen(fleet: Fleet, where: str) -> None:
    pair = verified(fleet)
    teach_to_lend(pair, prompt(LONG), "a")
    if where == "in the slot":
        damage(pair, 3)
    else:
        pair.b.transport.damages = True
    complete(pair.b, prompt(LONG), "b")
    pair.b.sim.check_pool()
    assert pair.b.transport.reads == 1
    assert pair.b.count(HIT) == 0
    assert pair.b.count("chunks|failed|peer_cpu") == 8
    assert pair.b.failures == {"remote_verify": 1}
    if where == "in the slot":
        damage(pair, 3)  # back
    pair.b.transport.damages = False
    pair.b.sim.settle()
    pair.b.sim.flush_device()
    complete(pair.b, prompt(LONG), "again")
    assert pair.b.count("hit_tokens|cpu") == LONG  # what it has computed
    teach_to_lend(pair, prompt(LONG, seed=2), "a2")
    complete(pair.b, prompt(LONG, seed=2), "b2")
    assert pair.b.count(HIT) == LONG
    pair.settle()


def test_what_comes_before_a_wrong_bit_is_used(fleet: Fleet) -> None:
    pair = verified(fleet)
    teach_to_lend(pair, prompt(40 * BLOCK), "a")
    damage(pair, 1)
    complete(pair.b, prompt(40 * BLOCK), "b")
    assert pair.b.count(HIT) == 32 * BLOCK  # two reads of 16
    assert pair.b.failures == {"remote_verify": 1}
    damage(pair, 1)
    pair.settle()


def test_who_compares_borrows_nothing_without_checksums(fleet: Fleet) -> None:
    pair = Pair(fleet, {}, dict(VERIFY)).meet()
    for seed in range(2):
        pair.teach(prompt(LONG, seed=seed), f"a{seed}")
        complete(pair.b, prompt(LONG, seed=seed), f"b{seed}")
    assert pair.b.transport.reads == 0
    assert pair.b.failures == {"remote_verify": 1}  # it is not asked a second time
    pair.settle()


def test_who_does_not_compare_borrows_what_has_checksums(fleet: Fleet) -> None:
    pair = Pair(fleet, dict(VERIFY), {}).meet()
    teach_to_lend(pair, prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    assert pair.b.count(HIT) == LONG
    pair.settle()


def test_what_was_borrowed_is_lent_on(fleet: Fleet) -> None:
    pair = verified(fleet)
    teach_to_lend(pair, prompt(LONG), "a")
    complete(pair.b, prompt(LONG), "b")
    wait(lambda: rests(pair.b) and not pair.b.remote.shelving.summing, "B makes no checksums")
    assert {*pair.a.remote.agent.shelf._chunks} <= {*pair.b.remote.agent.shelf._chunks}
    for key, chunk in pair.a.remote.agent.shelf._chunks.items():
        assert pair.b.remote.agent.shelf._chunks[key].sums == chunk.sums
    pair.settle()
