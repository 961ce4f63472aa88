# SPDX-License-Identifier: Apache-2.0
"""What the start of hand-overs is refused for before anything is asked of vLLM."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from vllm_tiered_kv.config import ConfigError, Options
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.keys import FleetKey
from vllm_tiered_kv.remote.options import Address, Handoff, RemoteOptions, parse_listen

NO_NIXL = (
    "remote: NIXL, which moves the bytes, is not installed here: pip install 'vllm-tiered-kv[nixl]'"
)
NO_STATES = (
    "remote: a model with recurrent states (Mamba, linear attention) cannot be handed over yet; "
    "leave out remote"
)
NO_WINDOWS_LENT = (
    "remote.peers: chunks of a model with sliding windows cannot be lent to peers yet; "
    "leave out peers"
)


def listen_address(options: RemoteOptions) -> Address:
    """Where peers reach this engine, before its index is added.

    Raises:
        ConfigError: nowhere.
    """
    host_ip = os.environ.get("VLLM_HOST_IP", "")
    try:
        return parse_listen(options.listen, host_ip)
    except ValueError as error:
        raise ConfigError(f"remote.listen: {options.listen!r}: {error}") from None


def load_key(options: RemoteOptions) -> FleetKey:
    """The fleet's key.

    Raises:
        ConfigError: it cannot be used.
    """
    try:
        return keys.load(Path(options.key_file))
    except keys.KeyFileError as error:
        raise ConfigError(f"remote.key_file: {error}") from None


def handoff_of(options: Options, remote: RemoteOptions, *, sends: bool) -> Handoff:
    """What hand-overs are served from.

    Raises:
        ConfigError: from slots, and there are none to speak of.
    """
    if options.cpu is None and remote.handoff is Handoff.AUTO:
        return Handoff.DEVICE
    no_slots = options.cpu is None and options.disk is None
    if sends and remote.handoff is Handoff.CPU and no_slots:
        raise ConfigError(
            "remote.handoff: 'cpu' needs slots in host memory: give cpu.capacity, or leave it out"
        )
    return remote.handoff


def is_nixl_there() -> bool:
    return importlib.util.find_spec("nixl") is not None
