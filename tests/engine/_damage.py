# SPDX-License-Identifier: Apache-2.0
"""The connector with KV of which one byte is wrong, as long as a file is there.

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
from vllm_tiered_kv.worker.remote import summing
from vllm_tiered_kv.worker.remote.checksums import Units, make_sums
from vllm_tiered_kv.worker.remote.plan import Places

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
            if result.outcome is Outcome.DONE and _is_wanted():
                _damage(int(read.local[0]))
        return results


class DamagedSlotsTieredKVConnector(TieredKVConnector):
    """Changes each chunk that it lends when its checksum has been made."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is compat.KVConnectorRole.WORKER:
            summing.make_sums = _sums_and_damage


def _sums_and_damage(units: Units, places: Places) -> bytes:
    sums = make_sums(units, places)
    for slot in places.blocks.tolist() if _is_wanted() else ():
        _damage(int(units.base[0, 0] + units.strides[0] * slot))
    return sums


def _is_wanted() -> bool:
    return Path(os.environ[VARIABLE]).exists()


def _damage(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 0x40
