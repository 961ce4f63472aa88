# SPDX-License-Identifier: Apache-2.0
"""What is compared: a connector, and the environment it is installed in."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any

import msgspec


class Arm(str, enum.Enum):
    """One way to serve."""

    NONE = "none"
    """No connector."""
    EXAMPLE = "example"
    """vLLM's own demonstration: synchronous, a file a layer, saved during the first pass."""
    LMCACHE = "lmcache"
    """LMCache in server mode, its KV in shared memory."""
    OURS = "ours"

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Arm.NONE: "no connector",
    Arm.EXAMPLE: "ExampleConnector",
    Arm.LMCACHE: "LMCache",
    Arm.OURS: "TieredKVConnector",
}
PEERS = (Arm.EXAMPLE, Arm.LMCACHE)
PEERS_ENVIRONMENT = Path(".venv-peers")


class Setup(msgspec.Struct, frozen=True):
    """What every arm is given."""

    model: Path
    """Model folder."""
    work: Path
    """Folder for logs and for what ExampleConnector writes."""
    capacity_gib: int
    """Host memory of the CPU tier, ours and LMCache's alike."""
    longest: int
    """Tokens of the longest prompt."""
    round_tokens: int
    """Tokens of all prompts of a round, which the device cache holds together."""


def interpreter(arm: Arm) -> Path:
    """The Python that has the arm's packages."""
    if arm is Arm.LMCACHE:
        return PEERS_ENVIRONMENT.absolute() / "bin" / "python"
    return Path(sys.executable)


def missing(arm: Arm) -> str | None:
    """Why the arm cannot run here; None when it can."""
    if interpreter(arm).exists():
        return None
    return f"{PEERS_ENVIRONMENT}/ does not exist (`make peers-env` makes it)"


def example_folder(setup: Setup) -> Path:
    """Where ExampleConnector keeps its files."""
    return setup.work / "example"


def connector(arm: Arm, setup: Setup, lmcache_port: int) -> dict[str, Any] | None:
    """The arm's ``--kv-transfer-config``; None for no connector."""
    if arm is Arm.NONE:
        return None
    if arm is Arm.EXAMPLE:
        extra: dict[str, Any] = {"shared_storage_path": str(example_folder(setup).absolute())}
        return _transfer_config("ExampleConnector", extra)
    if arm is Arm.LMCACHE:
        extra = {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": lmcache_port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        }
        return _transfer_config("LMCacheMPConnector", extra)
    extra = {"cpu": {"capacity": f"{setup.capacity_gib}GiB"}, "gate": "always"}
    return _transfer_config("TieredKVConnector", extra) | {"kv_load_failure_policy": "recompute"}


def _transfer_config(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
