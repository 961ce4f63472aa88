# SPDX-License-Identifier: Apache-2.0
"""The connector with tiers as slow as a file says, from one job to the next.

Given to ``vllm serve`` by its module path. The file named by ``TIERED_KV_SLOW`` holds seconds that
are added to each chunk copied to the device, and to each file that is read.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector
from vllm_tiered_kv.protocol import Direction
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.worker.copy import open_copier

VARIABLE = "TIERED_KV_SLOW"


def set_delays(file: Path, *, copy: float = 0.0, read: float = 0.0) -> None:
    """Say how slow the tiers are from now on, in seconds a chunk."""
    scratch = file.with_suffix(".new")
    scratch.write_text(f"{copy} {read}")
    scratch.rename(file)


def _delays() -> tuple[float, float]:
    copy, read = Path(os.environ[VARIABLE]).read_text().split()
    return float(copy), float(read)


class SlowTieredKVConnector(TieredKVConnector):
    """Waits at the seams between the lanes and the copier, and before files are opened."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is compat.KVConnectorRole.WORKER:
            self._worker._open_copier = _open_slow_copier
            self._worker._open_files = SlowFiles


def _open_slow_copier(groups: Any, pool: Any) -> Any:
    inner = open_copier(groups, pool)

    class Slow:
        mark, close = inner.mark, inner.close

        def submit(self, direction: Any, copies: Any, after: Any) -> Any:
            if direction is Direction.LOAD:
                time.sleep(_delays()[0] * len(copies))
            return inner.submit(direction, copies, after)

    return Slow()


class SlowFiles(Files):
    """Files that take their time to be read."""

    def preadv(self, *args: Any) -> int:
        time.sleep(_delays()[1])
        return super().preadv(*args)
