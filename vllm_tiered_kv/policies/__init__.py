# SPDX-License-Identifier: Apache-2.0
"""Which chunks a tier lets in and which it lets go: pure, without I/O, threads or clocks."""

from vllm_tiered_kv.policies.factory import Eviction, make_policy
from vllm_tiered_kv.policies.policy import EvictionPolicy, Item, Place

__all__ = ["Eviction", "EvictionPolicy", "Item", "Place", "make_policy"]
