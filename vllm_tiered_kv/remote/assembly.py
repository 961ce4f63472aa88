# SPDX-License-Identifier: Apache-2.0
"""Builds what hands KV over, from the options and vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import zmq

from vllm_tiered_kv import compat
from vllm_tiered_kv.config import ConfigError
from vllm_tiered_kv.log import get_logger
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.agent import RemoteAgent, RemoteSettings
from vllm_tiered_kv.remote.channel import ControlSockets
from vllm_tiered_kv.remote.facts import IdentityFacts, facts_of
from vllm_tiered_kv.remote.memory import Heads, heads_of_rank
from vllm_tiered_kv.remote.messages import MAX_GROUPS, MAX_RANKS, Identity
from vllm_tiered_kv.remote.options import Address, RemoteOptions, parse_address
from vllm_tiered_kv.remote.pages import contents_of, page_contents
from vllm_tiered_kv.remote.start import (
    NO_NIXL,
    NO_STATES,
    NO_WINDOWS_LENT,
    is_nixl_there,
    listen_address,
    load_key,
)

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import KVCacheConfig, VllmConfig
    from vllm_tiered_kv.geometry import Geometry
    from vllm_tiered_kv.identity import Namespace

logger = get_logger(__name__)


LEND_SHARE = 0.25
"""Share of the CPU tier's slots that peers may hold leases on at once."""


def open_agent(
    vllm_config: VllmConfig,
    options: RemoteOptions,
    geometry: Geometry,
    ranks: int,
    lendable: int = 0,
) -> RemoteAgent:
    """The control channel of this engine, listening.

    Args:
        vllm_config: vLLM's.
        options: the user's.
        geometry: the cut.
        ranks: of this engine.
        lendable: slots of its CPU tier.

    Raises:
        ConfigError: hand-overs cannot be had; says why.
    """
    _check(vllm_config, options, geometry, ranks)
    key = load_key(options)
    sends, receives = compat.is_producer(vllm_config), compat.is_consumer(vllm_config)
    address = listen_address(options)
    if address.port:
        port = address.port + compat.engine_index(vllm_config)
        address = msgspec.structs.replace(address, port=port)
    peers, lends = options.peers or (), 0
    if options.peers is not None and lendable:
        lends = max(len(geometry.groups), int(LEND_SHARE * lendable))
    sockets = _listen(key, address, must=sends, may=lends > 0)
    settings = RemoteSettings(
        ranks,
        options.lease,
        options.max_leases,
        key.sealing,
        sends=sends,
        receives=receives,
        lends=lends,
        peers=tuple(parse_address(peer) for peer in peers),
        verify=options.verify,
    )
    what = "sends and receives" if sends and receives else "sends" if sends else "receives"
    logger.info(
        "tiered-kv: hand-overs between engines: %s; chunks: %s, asks %s; control channel: %s; "
        "key: %s",
        what,
        "lends" if lends and sockets.address is not None else "lends none",
        ", ".join(peers) or "nobody",
        sockets.address or "none (nobody fetches from here)",
        key.fingerprint,
    )
    return RemoteAgent(settings, sockets)


def _listen(key: keys.FleetKey, address: Address, *, must: bool, may: bool) -> ControlSockets:
    """The control channel, listening if peers have a reason to come.

    Raises:
        ConfigError: it must listen, and cannot.
    """
    try:
        return ControlSockets(key, address if must or may else None)
    except (zmq.ZMQError, OSError) as error:
        if must:
            raise ConfigError(f"remote.listen: cannot listen at {address}: {error}") from None
        logger.warning(
            "tiered-kv: remote.listen: cannot listen at %s: %s; no chunks are lent to peers",
            address,
            error,
        )
    return ControlSockets(key, None)


def introduce(agent: RemoteAgent, namespace: Namespace) -> None:
    """Tell the agent what this engine's KV means, now that it is known; any thread."""
    if namespace.persistent:
        identity = Identity(namespace.semantic_digest, contents_of(namespace.layout))
        contents = page_contents(namespace.layout)
        agent.identify(identity, IdentityFacts(facts_of(namespace.semantic), facts_of(contents)))
        return
    why = f"no other engine can tell what its KV means: {namespace.reason}"
    logger.warning("tiered-kv: this engine hands nothing over and takes nothing: %s", why)
    agent.close(why)


def heads_by_group(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[Heads, ...]:
    """The KV heads that this worker has, of each group."""
    parallel = compat.tensor_parallel_size(vllm_config)
    rank = compat.tensor_parallel_rank(vllm_config)
    found = []
    for group in kv_cache_config.kv_cache_groups:
        here, total = compat.kv_heads(vllm_config, group.kv_cache_spec)
        if not here:
            found.append(Heads(0, 1, 1))
            continue
        heads = heads_of_rank(total, parallel, rank)
        # Layers that are shared out in their own way: only the like can be read from.
        found.append(heads if heads.count == here else Heads(rank * here, here, here * parallel))
    return tuple(found)


def _check(vllm_config: VllmConfig, options: RemoteOptions, geometry: Geometry, ranks: int) -> None:
    """Refuse, by name, what cannot be had.

    Raises:
        ConfigError: the message says why.
    """
    if options.verify and not compat.is_cpu():
        raise ConfigError(
            "remote.verify: checksums are made of KV in host memory, and this engine has it on a "
            "device; leave it out"
        )
    if geometry.has_states:
        raise ConfigError(NO_STATES)
    if not geometry.keeps_all and options.peers is not None:
        raise ConfigError(NO_WINDOWS_LENT)
    if (reason := compat.ranks_elsewhere(vllm_config)) is not None:
        raise ConfigError(f"remote: this engine cannot hand KV over: {reason}; leave out remote")
    if compat.context_parallel_size(vllm_config) > 1:
        raise ConfigError("remote: context parallelism is not supported; leave out remote")
    if len(geometry.groups) > MAX_GROUPS or ranks > MAX_RANKS:
        raise ConfigError(
            f"remote: of {len(geometry.groups)} KV cache groups and {ranks} ranks at most "
            f"{MAX_GROUPS} and {MAX_RANKS} are supported"
        )
    if not is_nixl_there():
        raise ConfigError(NO_NIXL)
