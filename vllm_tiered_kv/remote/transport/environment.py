# SPDX-License-Identifier: Apache-2.0
"""What has to be in the process's environment before NIXL is loaded.

UCX, which moves the bytes, is configured by variables alone. Left to itself it listens on every
interface of the machine and spreads traffic over them; whoever reaches such a port owns the
process. So it is held to the interface of the control channel, and to the RDMA ports there are: a
network of its own, which nothing else would use. What the user has set stays as it is.

The choice for RDMA was tested on the names of devices only, not on such a machine.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from vllm_tiered_kv.log import get_logger

logger = get_logger(__name__)

RCACHE_LIMIT = "1024"
"""vLLM's value (``nixl_utils.py``): without a limit UCX's cache of registrations grows."""


def prepare(host: str) -> None:
    """Set what is missing, for a control channel that listens on `host`. May be called again."""
    wanted = variables(
        host, os.environ, addresses=interface_addresses(), rdma=rdma_ports(Path("/sys"))
    )
    for name, value in wanted.items():
        logger.info("tiered-kv: %s=%s for NIXL", name, value)
    os.environ.update(wanted)


def variables(
    host: str,
    present: Mapping[str, str],
    *,
    addresses: Mapping[str, Iterable[str]],
    rdma: Iterable[str],
) -> dict[str, str]:
    """The variables to add to those `present`.

    Args:
        host: an address or a name.
        addresses: by interface.
        rdma: ports, as UCX writes them.
    """
    wanted = {"UCX_RCACHE_MAX_UNRELEASED": RCACHE_LIMIT}
    ports = tuple(rdma)
    if not ports:
        # The wheel's RDMA modules may load the system's libraries beside their own; with both the
        # process crashes when it exits (nixl-cu12 1.5.1 on Debian with libefa1).
        wanted["UCX_MODULES"] = "^ib"
    devices = net_devices(host, addresses, ports)
    if devices:
        wanted["UCX_NET_DEVICES"] = devices
    if not _may_look_home(present.get("HOME")):
        # NIXL looks for a file there and doesn't start where it may not.
        wanted["NIXL_CONFIG_FILE"] = os.devnull
    return {name: value for name, value in wanted.items() if name not in present}


def net_devices(
    host: str, addresses: Mapping[str, Iterable[str]], rdma: Iterable[str]
) -> str | None:
    """UCX's list of devices; None leaves it the choice: `host` means all, or isn't found."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        address = ipaddress.ip_address(str(found).partition("%")[0])
    except (OSError, ValueError):
        return None
    if address.is_unspecified:
        return None
    for interface, own in addresses.items():
        known = [ipaddress.ip_address(each) for each in own]
        if address in known:
            return interface if address.is_loopback else ",".join([interface, *rdma])
        if address.is_loopback and any(each.is_loopback for each in known):
            return interface  # all of 127.0.0.0/8 is there
    return None


def interface_addresses() -> dict[str, list[str]]:
    """IP addresses by interface."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [each.address.partition("%")[0] for each in entries if each.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def rdma_ports(sys: Path) -> list[str]:
    """Active ports, as in ``["mlx5_0:1"]``."""
    ports = []
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        try:
            state = (port / "state").read_text()
        except OSError:
            continue
        if "ACTIVE" in state:
            ports.append(f"{port.parent.parent.name}:{port.name}")
    return ports


def _may_look_home(home: str | None) -> bool:
    if not home:
        return True  # then it isn't looked for
    if not os.access(home, os.X_OK):
        return not Path(home).exists() and os.access(Path(home).parent, os.X_OK)
    file = Path(home) / ".nixl.cfg"
    return not file.exists() or os.access(file, os.R_OK)
