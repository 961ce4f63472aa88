# SPDX-License-Identifier: Apache-2.0
"""Builds each half from vLLM's configuration, and says at start what it built."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import zmq

from vllm_tiered_kv import compat
from vllm_tiered_kv.channel import SchedulerEndpoint
from vllm_tiered_kv.config import (
    ConfigError,
    Options,
    check_capacity,
    memory_limit,
    parse_options,
)
from vllm_tiered_kv.contract import check
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, plan_geometry
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.remote.agent import RemoteAgent
from vllm_tiered_kv.remote.assembly import heads_by_group, introduce, open_agent
from vllm_tiered_kv.remote.options import RemoteOptions
from vllm_tiered_kv.remote.pages import contents_of
from vllm_tiered_kv.remote.start import handoff_of, listen_address
from vllm_tiered_kv.scheduler.core import SchedulerSettings
from vllm_tiered_kv.scheduler.half import SchedulerHalf
from vllm_tiered_kv.scheduler.handing import HandingOptions
from vllm_tiered_kv.scheduler.remote import RemoteParts
from vllm_tiered_kv.startup import (
    NamespaceTask,
    announce,
    warn_about_memory,
    warn_about_policy,
    warn_about_role,
)
from vllm_tiered_kv.tiers.disk.entries import MAX_GROUPS, MAX_RANKS
from vllm_tiered_kv.tiers.disk.open import admission_of, open_disk
from vllm_tiered_kv.worker.half import WorkerHalf

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import KVCacheConfig, VllmConfig
from vllm_tiered_kv.log import get_logger

logger = get_logger(__name__)

STAGING_BYTES = 2 << 30
"""Host memory that a disk tier passes through where there is no CPU tier, all ranks together ..."""
STAGING_SHARE = 0.1
"""... and at most this share of the machine's."""
MIN_STAGED_CHUNKS = 16


def build_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerHalf:
    """The scheduler half.

    Raises:
        ConfigError: options that cannot be used.
        UnsupportedModel: a model that cannot be served.
    """
    check.warn(compat.VERDICT, logger)
    options = _options(vllm_config)
    warn_about_policy(vllm_config)
    if options.cpu is not None:
        warn_about_memory(options.cpu.capacity)
    geometry = _geometry(vllm_config, kv_cache_config, options)
    ranks = compat.world_size(vllm_config)
    num_slots = _num_slots(vllm_config, options, geometry, ranks)
    settings = SchedulerSettings(
        geometry,
        num_slots,
        ranks,
        load_deadline=options.load_deadline,
        store_generated=options.store_generated,
        trust_after_reset=options.trust_after_reset,
        shares_device_prefixes=compat.has_prefix_caching(vllm_config),
        admission=admission_of(options.disk) if options.disk is not None else None,
        step_tokens=compat.tokens_in_flight(vllm_config),
        draft_tokens=compat.draft_tokens(vllm_config),
        withdraws=compat.schedules_by_priority(vllm_config),
        eviction=options.cpu.eviction if options.cpu is not None else Eviction.LRU,
        gate=options.gate,
        token_budget=compat.token_budget(vllm_config),
        shared_token_budget=compat.shared_token_budget(vllm_config),
        event_groups=compat.event_groups(vllm_config, kv_cache_config),
        recomputes=vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute",
    )
    agent = None
    if options.disk is not None:
        _check_disk(vllm_config, geometry, ranks)
        share = compat.largest_layer_share(vllm_config)
        agent = open_disk(options.disk, geometry, num_slots, ranks, share)
    remote = None
    if options.remote is not None:
        lendable = num_slots if options.cpu is not None else 0
        remote = open_agent(vllm_config, options.remote, geometry, ranks, lendable)
    else:
        warn_about_role(vllm_config)
    task = NamespaceTask(
        vllm_config,
        kv_cache_config,
        geometry.chunk_tokens,
        agent.open if agent else None,
        functools.partial(introduce, remote) if remote is not None else None,
    )
    announce(options, geometry, num_slots, ranks, task.first_words())
    parts = None
    if remote is not None and options.remote is not None:
        handoff = handoff_of(options, options.remote, sends=remote.settings.sends)
        handing = HandingOptions(handoff, options.remote.verify)
        parts = _remote_parts(vllm_config, options.remote, remote, task, handing)
    return SchedulerHalf(settings, _endpoint(), on_shutdown=task.close, agent=agent, remote=parts)


def build_worker(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerHalf:
    """The worker half of this rank.

    Raises:
        ConfigError: options that cannot be used.
        UnsupportedModel: a model that cannot be served.
    """
    options = _options(vllm_config)
    geometry = _geometry(vllm_config, kv_cache_config, options)
    groups = kv_cache_config.kv_cache_groups
    return WorkerHalf(
        compat.worker_rank(vllm_config),
        [tuple(group.layer_names) for group in groups],
        kv_cache_config.num_blocks,
        geometry.groups,
        # vLLM computes again from the first bad block on: that needs every block before it.
        report_blocks=len(groups) == 1 and geometry.keeps_all,
        memory=_memory(vllm_config, options, geometry) // compat.world_size(vllm_config),
        find_adapters=compat.find_adapters(vllm_config),
        heads=None if options.remote is None else heads_by_group(vllm_config, kv_cache_config),
    )


def _remote_parts(
    vllm_config: VllmConfig,
    options: RemoteOptions,
    agent: RemoteAgent,
    task: NamespaceTask,
    handing: HandingOptions,
) -> RemoteParts:
    layout = task.layout
    if layout is None:
        agent.close("how its pages lie cannot be told")
    return RemoteParts(
        agent,
        listen_address(options).host,
        compat.engine_id(vllm_config),
        compat.tensor_parallel_size(vllm_config),
        options.deadline,
        contents_of(layout) if layout is not None else "",
        handing,
    )


def _check_disk(vllm_config: VllmConfig, geometry: Geometry, ranks: int) -> None:
    """Refuse, by name, an engine that the disk tier cannot serve.

    Raises:
        ConfigError: the message says why.
    """
    if (reason := compat.ranks_elsewhere(vllm_config)) is not None:
        raise ConfigError(
            f"disk: this engine cannot have a disk tier: {reason}, and orders to read and write "
            "reach only those on the scheduler's host. Leave out disk, or let each host have an "
            "engine of its own"
        )
    if len(geometry.groups) > MAX_GROUPS or ranks > MAX_RANKS:
        raise ConfigError(
            f"disk: this engine cannot have a disk tier: of {len(geometry.groups)} KV cache groups "
            f"and {ranks} ranks at most {MAX_GROUPS} and {MAX_RANKS} are supported"
        )


def _options(vllm_config: VllmConfig) -> Options:
    return parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config)


def _geometry(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: Options
) -> Geometry:
    compat.check_supported(vllm_config, kv_cache_config)
    scheduler_tokens, hash_tokens = compat.block_sizes(vllm_config, kv_cache_config)
    groups = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        kind, tokens, window = compat.describe_group(
            group.kv_cache_spec, compat.context_parallel_size(vllm_config)
        )
        nbytes = compat.bytes_per_block(kv_cache_config, i)
        groups.append(GroupGeometry(kind, tokens, nbytes, window))
    return plan_geometry(
        groups,
        scheduler_tokens=scheduler_tokens,
        hash_tokens=hash_tokens,
        chunk_tokens=options.chunk_tokens,
    )


def _num_slots(vllm_config: VllmConfig, options: Options, geometry: Geometry, ranks: int) -> int:
    """Slots on each rank; a chunk takes one a KV cache group."""
    slot = _slot_bytes(vllm_config, geometry) * ranks
    if options.cpu is not None:
        floor = slot * len(geometry.groups)
        check_capacity("cpu.capacity", options.cpu.capacity, floor=floor, limit=memory_limit())
    return _memory(vllm_config, options, geometry) // slot


def _memory(vllm_config: VllmConfig, options: Options, geometry: Geometry) -> int:
    """Bytes of host memory for slots, all ranks together."""
    if options.cpu is not None:
        return int(options.cpu.capacity)
    # All that comes from disk and goes there passes through slots; what is handed over does not.
    chunk = _slot_bytes(vllm_config, geometry) * len(geometry.groups)
    least = MIN_STAGED_CHUNKS * chunk * compat.world_size(vllm_config)
    if options.disk is None:
        return least
    return max(least, min(STAGING_BYTES, int(STAGING_SHARE * memory_limit())))


def _slot_bytes(vllm_config: VllmConfig, geometry: Geometry) -> int:
    """Of the largest rank."""
    # Of the other stages only the number of their layers is known here, not whose groups they
    # are: a rank that needs more has fewer slots, and says so.
    share = compat.largest_layer_share(vllm_config)
    return geometry.align_slot(math.ceil(geometry.slot_bytes * share))


def _endpoint() -> SchedulerEndpoint | None:
    try:
        return SchedulerEndpoint()
    except zmq.ZMQError as error:
        logger.warning(
            "tiered-kv: no side channel (%s): stores that end while the engine is idle are "
            "known one step later",
            error,
        )
        return None
