# SPDX-License-Identifier: Apache-2.0
"""What is compared: the connector between the engine that prefills and the one that decodes."""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.serving import Metrics
from tools.serving.process import free_port
from vllm_tiered_kv.remote import keys


class Role(str, enum.Enum):
    """An engine's part in hand-overs."""

    PRODUCER = "kv_producer"
    CONSUMER = "kv_consumer"


class Arm(str, enum.Enum):
    """A producer and a consumer with one connector."""

    OURS = "ours"
    NIXL = "nixl"
    """vLLM's own."""

    @property
    def label(self) -> str:
        return {Arm.OURS: "TieredKVConnector", Arm.NIXL: "NixlConnector"}[self]


def missing() -> str | None:
    """Why nothing can be measured here; None when it can."""
    return None if importlib.util.find_spec("nixl") else "NIXL is not installed"


def make_key(folder: Path) -> Path:
    """A fleet's key for one run."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "fleet.key"
    path.unlink(missing_ok=True)
    keys.write(path, keys.generate())
    return path


def connector(arm: Arm, role: Role, key: Path, capacity_gib: int) -> dict[str, Any]:
    """The engine's ``--kv-transfer-config``: what each one's documents show.

    Args:
        capacity_gib: of our CPU tier; the other has none.
    """
    if arm is Arm.NIXL:
        return {"kv_connector": "NixlConnector", "kv_role": role.value}
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": role.value,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "cpu": {"capacity": f"{capacity_gib}GiB"},
            "remote": {"listen": "127.0.0.1:0", "key_file": str(key)},
        },
    }


def environment(arm: Arm) -> dict[str, str]:
    """What the engine needs beside it."""
    if arm is Arm.OURS:
        return {}
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }


def consumer_params(arm: Arm, answered: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A consumer's ``kv_transfer_params``.

    Nothing is stored in our tier, so that the same prompt can be handed over again.

    Args:
        answered: the producer's, which a router passes on as they are.
    """
    params = dict(answered or {})
    if arm is Arm.OURS:
        params["tiered_kv"] = {**params.get("tiered_kv", {}), "store": False}
    return params


def moved(arm: Arm, metrics: Metrics) -> tuple[float, float]:
    """KV bytes a consumer has read so far and the seconds that took it, by its own counters."""
    if arm is Arm.OURS:
        labels = {"direction": "load", "tier": "peer"}
        return (
            metrics.value("vllm:tiered_kv_bytes_total", **labels),
            metrics.value("vllm:tiered_kv_seconds_total", **labels),
        )
    return (
        metrics.value("vllm:nixl_bytes_transferred_sum"),
        metrics.value("vllm:nixl_xfer_time_seconds_sum"),
    )
