# SPDX-License-Identifier: Apache-2.0
"""What is compared: a connector, and the environment it is installed in."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any

import msgspec

from tools.serving import lmcache


class Arm(str, enum.Enum):
    """One way to serve."""

    NONE = "none"
    """No connector."""
    CONTROL = "control"
    """The same once more: what differs between the two is the machine's noise."""
    EXAMPLE = "example"
    """vLLM's own demonstration: synchronous, a file a layer, saved during the first pass."""
    LMCACHE = "lmcache"
    """LMCache in server mode, its KV in shared memory."""
    OURS = "ours"
    LMCACHE_FS = "lmcache-fs"
    """The same, with files behind it."""
    LMCACHE_FS_NATIVE = "lmcache-fs_native"
    """The same, the files read and written by its compiled part."""
    OURS_DISK = "ours-disk"
    """With a disk tier behind the CPU tier."""

    @property
    def label(self) -> str:
        return _LABELS[self]


_LABELS = {
    Arm.NONE: "no connector",
    Arm.CONTROL: "no connector, again",
    Arm.EXAMPLE: "ExampleConnector",
    Arm.LMCACHE: "LMCache",
    Arm.OURS: "TieredKVConnector",
    Arm.LMCACHE_FS: "LMCache fs",
    Arm.LMCACHE_FS_NATIVE: "LMCache fs_native",
    Arm.OURS_DISK: "TieredKVConnector",
}
IN_MEMORY = (Arm.NONE, Arm.EXAMPLE, Arm.LMCACHE, Arm.OURS)
"""What is compared while all servers stay up."""
ON_DISK = (Arm.NONE, Arm.EXAMPLE, Arm.LMCACHE_FS, Arm.LMCACHE_FS_NATIVE, Arm.OURS_DISK)
"""What is compared after a restart."""
PEERS = (Arm.EXAMPLE, Arm.LMCACHE)
DISK_PEERS = (Arm.EXAMPLE, Arm.LMCACHE_FS, Arm.LMCACHE_FS_NATIVE)
WITH_LMCACHE = frozenset({Arm.LMCACHE, Arm.LMCACHE_FS, Arm.LMCACHE_FS_NATIVE})
_L2 = {Arm.LMCACHE_FS: "fs", Arm.LMCACHE_FS_NATIVE: "fs_native"}
PEERS_ENVIRONMENT = lmcache.PEERS_PYTHON.parent.parent


class Setup(msgspec.Struct, frozen=True):
    """What every arm is given."""

    model: Path
    """Model folder."""
    work: Path
    """Folder for logs and for what arms keep on disk."""
    capacity_gib: int
    """Host memory of the CPU tier, ours and LMCache's alike."""
    serve_args: tuple[str, ...]
    """Further arguments of every ``vllm serve``."""
    disk_gib: int = 16
    """Our disk tier's capacity; the peers' files have no limit."""


def interpreter(arm: Arm) -> Path:
    """The Python that has the arm's packages."""
    if arm in WITH_LMCACHE:
        return lmcache.PEERS_PYTHON.absolute()
    return Path(sys.executable)


def missing(arm: Arm) -> str | None:
    """Why the arm cannot run here; None when it can."""
    if interpreter(arm).exists():
        return None
    return f"{PEERS_ENVIRONMENT}/ does not exist (`make peers-env` makes it)"


def files_folder(arm: Arm, setup: Setup) -> Path | None:
    """Where the arm keeps its files; None for an arm that keeps none."""
    if arm in (Arm.NONE, Arm.CONTROL, Arm.LMCACHE, Arm.OURS):
        return None
    folder: Path = setup.work / "files" / arm.value
    return folder.absolute()


def connector(arm: Arm, setup: Setup, lmcache_port: int) -> dict[str, Any] | None:
    """The arm's ``--kv-transfer-config``; None for no connector."""
    if arm in (Arm.NONE, Arm.CONTROL):
        return None
    folder = files_folder(arm, setup)
    if arm is Arm.EXAMPLE:
        return _transfer_config("ExampleConnector", {"shared_storage_path": str(folder)})
    if arm in WITH_LMCACHE:
        return lmcache.connector(lmcache_port)
    extra: dict[str, Any] = {"cpu": {"capacity": f"{setup.capacity_gib}GiB"}, "gate": "always"}
    if folder is not None:
        extra["disk"] = {"path": str(folder), "capacity": f"{setup.disk_gib}GiB"}
    return _transfer_config("TieredKVConnector", extra) | {"kv_load_failure_policy": "recompute"}


def l2_adapters(arm: Arm, setup: Setup) -> tuple[dict[str, Any], ...]:
    """LMCache's ``--l2-adapter``, one each; none for an arm without files."""
    kind = _L2.get(arm)
    if kind is None:
        return ()
    return ({"type": kind, "base_path": str(files_folder(arm, setup))},)


def _transfer_config(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
