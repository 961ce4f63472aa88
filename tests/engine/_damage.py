# SPDX-License-Identifier: Apache-2.0
"""The connector with pulls of which one byte arrives wrong, as long as a file is there.

Given to ``vllm serve`` by its module path; ``TIERED_KV_DAMAGE`` names the file.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector
from vllm_tiered_kv.remote.transport import Outcome, Read, ReadResult, open_transport

VARIABLE = "TIERED_KV_DAMAGE"


class DamagedTieredKVConnector(TieredKVConnector):
    """Changes what has arrived before anybody looks at it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is compat.KVConnectorRole.WORKER:
            self._worker.remote.open_transport = Damaging


class Damaging:
    """NIXL, and then a wrong byte."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inner = open_transport(*args, **kwargs)
        self._reads: dict[int, Read] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start_read(self, read: Read) -> None:
        self._reads[read.job] = read
        self._inner.start_read(read)

    def poll(self) -> list[ReadResult]:
        results = self._inner.poll()
        for result in results:
            read = self._reads.pop(result.job)
            if result.outcome is Outcome.DONE and Path(os.environ[VARIABLE]).exists():
                ctypes.c_ubyte.from_address(int(read.local[0])).value ^= 0x40
        return results
