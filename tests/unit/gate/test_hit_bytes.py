# SPDX-License-Identifier: Apache-2.0
"""What a hit takes in bytes."""

from __future__ import annotations

from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.scheduler.hit_bytes import HitBytes

FULL = GroupGeometry(GroupKind.FULL, 16, 1000)
WINDOW = GroupGeometry(GroupKind.WINDOW, 16, 300, window=40)
STATE = GroupGeometry(GroupKind.STATE, 32, 7000)


def test_a_full_group_takes_every_chunk() -> None:
    assert HitBytes(Geometry(32, 16, (FULL,)), ranks=2).of(10) == 2 * 10 * 2 * 1000


def test_windows_and_states_take_the_end_only() -> None:
    geometry = Geometry(32, 16, (FULL, WINDOW, STATE))
    of = HitBytes(geometry, ranks=1).of
    assert of(0) == 0
    assert of(1) == 2000 + 600 + 7000
    assert of(10) == 10 * 2000 + 2 * 600 + 7000
