# SPDX-License-Identifier: Apache-2.0
"""What is said of hand-overs and peers, with real keys and sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from vllm_tiered_kv.check import remote as checks
from vllm_tiered_kv.check.findings import Level
from vllm_tiered_kv.check.given import Role
from vllm_tiered_kv.config import parse_options
from vllm_tiered_kv.remote import keys
from vllm_tiered_kv.remote.channel import ControlSockets
from vllm_tiered_kv.remote.options import Address

ROOT = Path(__file__).parents[3]
CPU = {"capacity": "1GiB"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir(mode=0o700)
    keys.write(folder / "fleet.key", keys.generate())
    return folder / "fleet.key"


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.fixture
def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(autouse=True)
def without_nixl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it takes a second, and some machines have none."""
    if "nixl" not in request.node.name:
        monkeypatch.setattr(checks, "is_nixl_there", lambda: False)


def told(
    key_file: Path, role: Role = Role.BOTH, *, cpu: dict[str, Any] | None = CPU, **remote: Any
) -> dict[str, list[tuple[Level, str]]]:
    given = {"listen": "127.0.0.1:0", "key_file": str(key_file), **remote}
    options = parse_options({"cpu": cpu, "remote": given})
    assert options.remote is not None
    found: dict[str, list[tuple[Level, str]]] = {}
    for one in checks.check_remote(options, options.remote, role):
        found.setdefault(one.what, []).append((one.level, one.says))
    return found


def test_the_key(key_file: Path) -> None:
    before = key_file.stat()
    ((level, says),) = told(key_file)["remote.key_file"]
    assert level is Level.OK
    assert keys.load(key_file).fingerprint in says
    after = key_file.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda path: path.unlink(), "there is no such file"),
        (lambda path: path.chmod(0o644), "chmod 600 it"),
        (lambda path: path.write_text("x"), "is not a key file"),
        (lambda path: path.parent.chmod(0o777), "everybody may write to its folder"),
        (lambda path: os.link(path, path.with_suffix(".2")), "hard links"),
    ],
)
def test_a_key_that_an_engine_would_refuse(key_file: Path, change: Any, why: str) -> None:
    change(key_file)
    ((level, says),) = told(key_file)["remote.key_file"]
    assert level is Level.ERROR
    assert why in says


def test_a_port_that_is_free_stays_free(key_file: Path, free: int) -> None:
    ((level, says),) = told(key_file, listen=f"127.0.0.1:{free}")["remote.listen"]
    assert level is Level.OK
    assert says == f"127.0.0.1:{free} is free; only this host can reach it"
    with socket.create_server(("127.0.0.1", free)):
        pass


@pytest.mark.parametrize(
    ("role", "peers", "level", "says"),
    [
        (Role.BOTH, None, Level.ERROR, "cannot listen at"),
        (Role.PRODUCER, None, Level.ERROR, "Address already in use"),
        (Role.CONSUMER, [], Level.WARNING, "no chunks are lent to peers"),
        (Role.CONSUMER, None, Level.OK, "it does not listen"),
    ],
)
def test_a_port_that_is_taken(
    key_file: Path, taken: int, role: Role, peers: list[str] | None, level: Level, says: str
) -> None:
    found = told(key_file, role, listen=f"127.0.0.1:{taken}", peers=peers)
    ((found_level, found_says),) = found["remote.listen"]
    assert found_level is level
    assert says in found_says


@pytest.mark.parametrize(
    ("listen", "says"),
    [
        ("192.0.2.1:0", "Cannot assign requested address"),
        (":7600", "VLLM_HOST_IP, which would, is not set"),
    ],
)
def test_an_address_that_is_not_this_hosts(
    key_file: Path, listen: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    ((level, found),) = told(key_file, listen=listen)["remote.listen"]
    assert level is Level.ERROR
    assert says in found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_what_is_free_an_engine_can_have_and_then_it_is_taken(
    key_file: Path, free: int, host: str
) -> None:
    listen = f"{host}:{free}"
    ((level, _),) = told(key_file, listen=listen)["remote.listen"]
    assert level is Level.OK
    sockets = ControlSockets(keys.load(key_file), Address(host, free))
    try:
        ((level, _),) = told(key_file, listen=listen)["remote.listen"]
        assert level is Level.ERROR
    finally:
        sockets.close()


def test_peers(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"near.example": [Address("192.0.2.7", 7600), Address("192.0.2.8", 7600)]}
    monkeypatch.setattr(checks, "resolve", lambda address: known.get(address.host, []))
    assert "remote.peers" not in told(key_file)
    ((level, says),) = told(key_file, peers=["near.example:7600", "192.0.2.7:7600"])["remote.peers"]
    assert level is Level.OK
    assert says.startswith("asks 192.0.2.7:7600, 192.0.2.8:7600 (")
    ((level, says),) = told(key_file, peers=["far.example:7600", "near.example:7600"])[
        "remote.peers"
    ]
    assert level is Level.WARNING
    assert says.startswith("far.example:7600 is no name that is known here now")
    known["near.example"] = [Address(f"192.0.2.{n}", 7600) for n in range(70)]
    ((level, says),) = told(key_file, peers=["near.example:7600"])["remote.peers"]
    assert level is Level.WARNING
    assert "70 addresses, of which 64 are asked" in says


def test_names_are_looked_up_in_bounded_time(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = Event()
    monkeypatch.setattr(checks, "LOOK_UP_SECONDS", 0.05)
    monkeypatch.setattr(checks, "resolve", lambda address: over.wait(60) and [])
    try:
        found = told(key_file, listen="localhost:0", peers=["slow.example:7600"])["remote.peers"]
    finally:
        over.set()
    assert [level for level, _ in found] == [Level.WARNING]


def test_a_hand_over_from_slots_that_there_are_not(key_file: Path) -> None:
    wanted = {"cpu": None, "handoff": "cpu"}
    (level, says), *_ = told(key_file, **wanted)["remote.handoff"]
    assert level is Level.ERROR
    assert "needs slots in host memory" in says
    assert "remote.handoff" not in told(key_file, Role.CONSUMER, **wanted)


def test_no_nixl(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "is_nixl_there", lambda: False)
    assert (Level.ERROR, checks.NO_NIXL.removeprefix("remote: ")) in told(key_file)["remote"]


def test_a_broken_nixl(key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl.py").write_text("raise ImportError('libcuda.so.1: cannot open')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setattr(checks, "is_nixl_there", lambda: True)
    (says,) = (says for level, says in told(key_file)["remote"] if level is Level.ERROR)
    assert "cannot be loaded: " in says
    assert says.endswith("libcuda.so.1: cannot open")


def test_nixl_as_it_is_here(key_file: Path) -> None:
    pytest.importorskip("nixl")
    assert (Level.OK, "NIXL, which moves the bytes, can be loaded") in told(key_file)["remote"]
