# SPDX-License-Identifier: Apache-2.0
"""The options below ``remote``, and what an address is."""

from __future__ import annotations

import enum
import ipaddress
import re

import msgspec

MAX_PEERS = 64
"""Addresses that may be named, and engines that are talked to at once."""
_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*\.?")
_MAX_HOST = 253
_AS_IPV6 = 'as "[2001:db8::5]:7600"'


class Handoff(enum.Enum):
    """What a producer serves a hand-over from."""

    AUTO = "auto"
    DEVICE = "device"  # the KV pages themselves, which stay taken meanwhile
    CPU = "cpu"  # slots of the CPU tier; the device's blocks are free at once


class Address(msgspec.Struct, frozen=True):
    """Where an engine's control channel listens."""

    host: str
    """A name or an address; IPv6 without brackets."""
    port: int

    @property
    def endpoint(self) -> str:
        """As ZeroMQ writes it."""
        return f"tcp://{self}"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class RemoteOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hand-over between engines."""

    listen: str
    """``host:port`` of this engine's control channel, as peers reach it; ``:port``: at vLLM's
    ``VLLM_HOST_IP``. With data parallelism each engine adds its index to the port. Port 0: any that
    is free."""
    key_file: str
    """The fleet's key; absolute. See ``vllm-tiered-kv keygen``."""
    handoff: Handoff = Handoff.AUTO
    """What hand-overs are served from."""
    peers: tuple[str, ...] | None = None
    """``host:port`` of engines that may be asked for chunks. None: nobody is asked and nothing is
    lent; an engine that names none lends to others."""
    verify: bool = False
    """Checksums are made of what is handed over and of chunks that may be lent; nothing is taken
    from another engine without them, and they are compared before it is used."""
    lease: float = 30.0
    """Seconds a hand-over is kept for a consumer that does not come, or says nothing any more."""
    deadline: float = 10.0
    """Seconds a read may take before it is given up and the prompt is computed."""
    max_leases: int = 1024
    """Hand-overs offered at once; beyond these a prompt is answered without one."""


def parse_address(text: str) -> Address:
    """Read ``host:port`` or ``[address]:port``.

    Raises:
        ValueError: it is none; says why.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError('expected "host:port", with a port of at most 65535')
    if host.startswith("[") and host.endswith("]"):
        if not _is_ipv6(host[1:-1]):
            raise ValueError(f"expected an IPv6 address in the brackets, {_AS_IPV6}")
        return Address(str(ipaddress.IPv6Address(host[1:-1])), int(port))
    if _is_ipv6(host) or _is_ipv6(text):
        raise ValueError(f"an IPv6 address is written in brackets before the port, {_AS_IPV6}")
    if len(host) > _MAX_HOST or not _NAME.fullmatch(host):
        raise ValueError('expected a host\'s name or address before the port, as "10.0.0.5:7600"')
    return Address(host, int(port))


def parse_listen(text: str, host_ip: str) -> Address:
    """Read ``host:port``, or ``:port`` for this host.

    Raises:
        ValueError: it is none, or not one that peers can be told; says why.
    """
    if text.startswith(":"):
        if not host_ip:
            raise ValueError("names no host, and VLLM_HOST_IP, which would, is not set")
        text = f"[{host_ip}]{text}" if ":" in host_ip else f"{host_ip}{text}"
    address = parse_address(text)
    if _is_wildcard(address.host):
        raise ValueError("must be the address that peers reach this engine at: they are told it")
    return address


def check_remote(options: RemoteOptions) -> tuple[str, object, str] | None:
    """Values that fit their types and nothing else.

    Returns:
        The key, its value, and what is wrong with it; None if all is well.
    """
    try:
        parse_listen(options.listen, "localhost")
    except ValueError as error:
        return "listen", options.listen, str(error)
    if not _is_absolute(options.key_file):
        return "key_file", options.key_file, "must be an absolute path"
    if len(options.peers or ()) > MAX_PEERS:
        return "peers", len(options.peers or ()), f"at most {MAX_PEERS} can be named"
    for peer in options.peers or ():
        try:
            reached = parse_address(peer)
        except ValueError as error:
            return "peers", peer, str(error)
        if not reached.port or _is_wildcard(reached.host):
            return "peers", peer, "must name a host, and a port above 0"
    if not 1 <= options.lease <= 3600:
        return "lease", options.lease, "must be from 1 to 3600 seconds"
    if not 0.1 <= options.deadline <= 600:
        return "deadline", options.deadline, "must be from 0.1 to 600 seconds"
    if not 1 <= options.max_leases <= 65536:
        return "max_leases", options.max_leases, "must be from 1 to 65536"
    return None


def _is_absolute(path: str) -> bool:
    """Whether it can be the path of a file: JSON can hold halves of characters."""
    halves = any("\ud800" <= character <= "\udfff" for character in path)
    return path.startswith("/") and "\0" not in path and not halves


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
