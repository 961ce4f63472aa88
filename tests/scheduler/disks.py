# SPDX-License-Identifier: Apache-2.0
"""Engines with a disk tier, and waiting for what it does beside them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.scheduler.sim import Sim

CAPACITY = 1 << 30
PATIENCE = 60.0


def disk(root: Path, **options: Any) -> dict[str, Any]:
    """The option of an engine."""
    return {"disk": {"path": str(root), "capacity": CAPACITY, "min_free": 1, **options}}


def wait_until(what: Callable[[], Any], why: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.002)


def opened(engine: Sim) -> Sim:
    """An engine that knows what is in its folder; its ranks learn of it with the first step."""
    agent = engine.half.core.disk.agent
    wait_until(lambda: agent.is_readable or agent.is_connecting, "the folder was not scanned")
    return engine


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tiered-kv")]
