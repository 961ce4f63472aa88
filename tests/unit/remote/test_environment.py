# SPDX-License-Identifier: Apache-2.0
"""What is set for NIXL, and what is left to the user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_tiered_kv.remote.transport.environment import (
    interface_addresses,
    net_devices,
    rdma_ports,
    variables,
)

ADDRESSES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1"],
    "eth1": ["10.1.0.5", "fd00::5"],
}
PORTS = ["mlx5_0:1", "mlx5_1:1"]


@pytest.mark.parametrize(
    ("host", "devices"),
    [
        ("127.0.0.1", "lo"),
        ("127.1.2.3", "lo"),
        ("::1", "lo"),
        ("localhost", "lo"),
        ("10.0.0.5", "eth0,mlx5_0:1,mlx5_1:1"),
        ("fd00::5", "eth1,mlx5_0:1,mlx5_1:1"),
        ("0.0.0.0", None),
        ("::", None),
        ("10.9.9.9", None),
        ("not an address", None),
    ],
)
def test_data_goes_over_the_interface_of_the_control_channel(
    host: str, devices: str | None
) -> None:
    assert net_devices(host, ADDRESSES, PORTS) == devices


def test_what_the_user_has_set_stays() -> None:
    mine = {
        "UCX_NET_DEVICES": "eth9",
        "UCX_RCACHE_MAX_UNRELEASED": "7",
        "UCX_MODULES": "all",
    }
    assert variables("127.0.0.1", mine, addresses=ADDRESSES, rdma=()) == {}


def test_nothing_else_is_chosen() -> None:
    found = variables("127.0.0.1", {}, addresses=ADDRESSES, rdma=PORTS)
    assert found == {"UCX_NET_DEVICES": "lo", "UCX_RCACHE_MAX_UNRELEASED": "1024"}


def test_rdma_is_left_out_where_there_is_none() -> None:
    found = variables("127.0.0.1", {}, addresses=ADDRESSES, rdma=())
    assert found["UCX_MODULES"] == "^ib"


def test_a_home_without_access_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    reachable = {home}
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) in reachable)
    environment = {"HOME": str(home)}
    assert "NIXL_CONFIG_FILE" not in variables(
        "127.0.0.1", environment, addresses=ADDRESSES, rdma=()
    )
    reachable.clear()
    found = variables("127.0.0.1", environment, addresses=ADDRESSES, rdma=())
    assert found["NIXL_CONFIG_FILE"] == os.devnull


def test_only_active_ports_are_named(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN"), ("mlx5_2", "4: ACTIVE")):
        port = tmp_path / "class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert rdma_ports(tmp_path) == ["mlx5_0:1", "mlx5_2:1"]


def test_this_machine_has_a_loopback() -> None:
    assert "127.0.0.1" in interface_addresses()["lo"]
