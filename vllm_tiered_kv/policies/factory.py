# SPDX-License-Identifier: Apache-2.0
"""The policies by name."""

from __future__ import annotations

import enum

from vllm_tiered_kv.policies.arc import ARC
from vllm_tiered_kv.policies.cost import Cost
from vllm_tiered_kv.policies.lru import LRU
from vllm_tiered_kv.policies.policy import EvictionPolicy, Identity, K, itself
from vllm_tiered_kv.policies.s3fifo import S3FIFO


class Eviction(enum.Enum):
    """What goes first when room is short."""

    LRU = "lru"
    S3FIFO = "s3fifo"
    ARC = "arc"
    COST = "cost"


def make_policy(eviction: Eviction, identity: Identity[K] = itself) -> EvictionPolicy[K]:
    """A new policy.

    Args:
        eviction: which one.
        identity: what an entry is remembered by once it is gone, in policies that remember.
    """
    if eviction is Eviction.S3FIFO:
        return S3FIFO(identity)
    if eviction is Eviction.ARC:
        return ARC(identity)
    if eviction is Eviction.COST:
        return Cost()
    return LRU()
