# SPDX-License-Identifier: Apache-2.0
"""Whether this engine can be reached, knows its peers, and has what moves the bytes.

Nobody is asked anything: an address is bound and let go again without listening, names are looked
up, and NIXL is loaded in a process of its own.
"""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

from vllm_tiered_kv.check.bounded import answers
from vllm_tiered_kv.check.findings import Finding, error, ok, refused, warning
from vllm_tiered_kv.check.given import Role
from vllm_tiered_kv.config import ConfigError, Options
from vllm_tiered_kv.remote.names import is_name, resolve
from vllm_tiered_kv.remote.options import MAX_PEERS, Address, RemoteOptions, parse_address
from vllm_tiered_kv.remote.start import (
    NO_NIXL,
    handoff_of,
    is_nixl_there,
    listen_address,
    load_key,
)

LOOK_UP_SECONDS = 5.0
NIXL_SECONDS = 60.0
_GPUS = ("/dev/nvidiactl", "/dev/kfd")
_LOAD = (
    "import sys\n"
    "from vllm_tiered_kv.remote.transport.agent import load_bindings\n"
    "from vllm_tiered_kv.remote.transport.environment import prepare\n"
    "prepare(sys.argv[1])\n"
    "load_bindings()\n"
)


def check_remote(options: Options, remote: RemoteOptions, role: Role) -> list[Finding]:
    """All that can be told of ``remote`` on this machine."""
    findings = [_handoff(options, remote, role), _key(remote)]
    lends = options.cpu is not None and remote.peers is not None
    host = "localhost"
    try:
        address = listen_address(remote)
    except ConfigError as wrong:
        findings.append(refused(str(wrong)))
    else:
        host = address.host
        findings.append(_listen(address, must=role.sends, may=lends))
    findings += _peers(remote)
    if remote.verify and any(Path(device).exists() for device in _GPUS):
        says = "is for KV in host memory, and there is a GPU here: an engine on it refuses to start"
        findings.append(warning("remote.verify", says))
    return [*findings, _nixl(host)]


def _handoff(options: Options, remote: RemoteOptions, role: Role) -> Finding:
    try:
        handoff = handoff_of(options, remote, sends=role.sends)
    except ConfigError as wrong:
        return refused(str(wrong))
    what = " and ".join(
        word for word, is_so in (("sends", role.sends), ("receives", role.receives)) if is_so
    )
    served = f" (remote.handoff {handoff.value})" if role.sends else ""
    return ok("remote", f"{what} hand-overs, as {role.value}{served}")


def _key(remote: RemoteOptions) -> Finding:
    try:
        key = load_key(remote)
    except ConfigError as wrong:
        return refused(str(wrong))
    return ok("remote.key_file", f"{remote.key_file}: key {key.fingerprint}")


def _listen(address: Address, *, must: bool, may: bool) -> Finding:
    what = "remote.listen"
    if not must and not may:
        return ok(what, f"{address}: nobody fetches from this engine, so it does not listen")
    found = answers({address: partial(_bind, address)}, LOOK_UP_SECONDS)
    refusal = found.get(address, f"{address.host} is not known within {LOOK_UP_SECONDS:g} s")
    if refusal is None:
        near = _is_loopback(address.host)
        return ok(what, f"{address} is free{'; only this host can reach it' if near else ''}")
    if must:
        return error(what, f"cannot listen at {address}: {refusal}")
    return warning(what, f"cannot listen at {address}: {refusal}; no chunks are lent to peers")


def _bind(address: Address) -> str | None:
    """Why an address cannot be had; None if it can. Never listens."""
    why = ""
    # As ZeroMQ does it: an IPv4 address by its IPv6 name, if there is IPv6.
    for family, flags in ((socket.AF_INET6, socket.AI_V4MAPPED), (socket.AF_INET, 0)):
        try:
            found = socket.getaddrinfo(
                *(address.host, address.port, family, socket.SOCK_STREAM),
                flags=flags | socket.AI_PASSIVE,
            )
            bound = socket.socket(family, socket.SOCK_STREAM)
        except (OSError, UnicodeError) as failed:
            why = _words(failed)
            continue
        with bound:
            try:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                bound.bind(found[0][4])
            except OSError as failed:
                return _words(failed)
        return None
    return why


def _words(failed: Exception) -> str:
    return str(getattr(failed, "strerror", None) or failed)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _peers(remote: RemoteOptions) -> list[Finding]:
    what = "remote.peers"
    if remote.peers is None:
        return []
    if not remote.peers:
        return [ok(what, "asks nobody, and lends to whom asks")]
    peers = [parse_address(peer) for peer in remote.peers]
    names = {peer: partial(resolve, peer) for peer in peers if is_name(peer)}
    found = answers(names, LOOK_UP_SECONDS)
    findings = [
        warning(what, f"{peer} is no name that is known here now; it is asked again every 30 s")
        for peer in names
        if not found.get(peer)
    ]
    addresses = {peer for peer in peers if peer not in names}
    addresses.update(address for each in found.values() for address in each)
    if len(addresses) > MAX_PEERS:
        says = f"stand for {len(addresses)} addresses, of which {MAX_PEERS} are asked"
        findings.append(warning(what, says))
    if not findings:
        shown = ", ".join(sorted(map(str, addresses))[:8])
        more = f" and {len(addresses) - 8} more" if len(addresses) > 8 else ""
        findings.append(ok(what, f"asks {shown}{more} (whether they answer was not tried)"))
    return findings


def _nixl(host: str) -> Finding:
    if not is_nixl_there():
        return refused(NO_NIXL)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD, host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NIXL_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failed:
        return error("remote", f"NIXL, which moves the bytes, cannot be loaded: {failed}")
    if done.returncode == 0:
        return ok("remote", "NIXL, which moves the bytes, can be loaded")
    lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
    return error("remote", f"NIXL, which moves the bytes, cannot be loaded: {lines[-1][:500]}")
