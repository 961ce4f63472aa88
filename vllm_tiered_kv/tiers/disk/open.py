# SPDX-License-Identifier: Apache-2.0
"""Builds the disk tier's agent from the options."""

from __future__ import annotations

import math
from collections.abc import Callable

import zmq

from vllm_tiered_kv.config import DiskOptions
from vllm_tiered_kv.geometry import Geometry
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.policies import make_policy
from vllm_tiered_kv.policies.admission import Admission
from vllm_tiered_kv.tiers.disk.agent import DiskAgent
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.channel import AgentSockets
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.settings import TierSettings, check_room

logger = get_logger(__name__)

open_files: Callable[[], Files] = Files
"""Makes what the agent's file calls go through."""
WRITE_SHARE = 0.25
"""Share of the slots that may wait to be written."""


def admission_of(options: DiskOptions) -> Admission:
    """Which chunks are written."""
    return Admission(options.min_tokens, options.store_after)


def open_disk(
    options: DiskOptions,
    geometry: Geometry,
    num_slots: int,
    ranks: int,
    share: float,
) -> DiskAgent | None:
    """The agent, running; None where it cannot be had.

    Args:
        options: of the disk tier.
        geometry: the cut.
        num_slots: slots on each rank.
        ranks: ranks of the engine.
        share: how much larger than described the largest rank's parts are.

    Raises:
        ConfigError: the capacity does not hold one chunk.
    """
    parts = [math.ceil(geometry.part_bytes(group) * share) for group in geometry.group_ids]
    check_room(options, parts, ranks)
    sizes = tuple(map(file_bytes, parts))
    settings = TierSettings(
        options.path,
        int(options.capacity),
        options.high_water,
        options.low_water,
        int(options.min_free),
        options.shared,
        options.io_deadline,
        ranks,
        sizes,
        max(1, int(WRITE_SHARE * num_slots) // len(geometry.groups)),
    )
    try:
        sockets = AgentSockets()
    except (OSError, zmq.ZMQError) as error:
        logger.warning("tiered-kv: no disk tier: its sockets cannot be had: %s", error)
        return None
    catalogue = Catalogue(ranks, make_policy(options.eviction), geometry.chunk_tokens)
    return DiskAgent(settings, catalogue, sockets, open_files())
