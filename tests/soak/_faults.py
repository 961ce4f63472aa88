# SPDX-License-Identifier: Apache-2.0
"""The connector with copies that fail, hang back and are refused memory now and then.

Given to ``vllm serve`` by its module path. ``TIERED_KV_FAULTS`` is ``seed:rate``: the share of
copies that fail; as many again are held back for up to a tenth of a second.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from typing import Any

from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.worker.copy import open_copier

VARIABLE = "TIERED_KV_FAULTS"
FULL_SECONDS = 10


class FaultyTieredKVConnector(TieredKVConnector):
    """Fails at the seam between the lanes and the copier."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is compat.KVConnectorRole.WORKER:
            seed, rate = os.environ[VARIABLE].split(":")
            self._worker._open_copier = Faults(int(seed), float(rate)).open
            self._worker._open_files = lambda: FaultyFiles(int(seed), float(rate))


class FaultyFiles(Files):
    """A disk whose calls fail now and then, and that is full for some seconds of each minute."""

    def __init__(self, seed: int, rate: float) -> None:
        self._rng = random.Random(seed)
        self._rate = rate
        self._lock = threading.Lock()

    def _maybe_fail(self) -> None:
        with self._lock:
            draw = self._rng.random()
        if draw < self._rate / 4:  # a chunk takes about four calls
            raise OSError(errno.EIO, "injected")
        if draw < self._rate / 2:
            time.sleep(0.05)

    def open(self, *args: Any, **kwargs: Any) -> int:
        self._maybe_fail()
        return super().open(*args, **kwargs)

    def preadv(self, *args: Any) -> int:
        self._maybe_fail()
        return super().preadv(*args)

    def pwritev(self, *args: Any) -> int:
        self._maybe_fail()
        if time.monotonic() % 60 < FULL_SECONDS:
            raise OSError(errno.ENOSPC, "injected")
        return super().pwritev(*args)

    def rename(self, *args: Any, **kwargs: Any) -> None:
        self._maybe_fail()
        super().rename(*args, **kwargs)


class Faults:
    """Draws, for each copy, what becomes of it."""

    def __init__(self, seed: int, rate: float) -> None:
        self._rng = random.Random(seed)
        self._rate = rate
        self._lock = threading.Lock()

    def open(self, groups: Any, pool: Any) -> Any:
        inner = open_copier(groups, pool)
        faults = self

        class Faulty:
            mark, close = inner.mark, inner.close

            def submit(self, direction: Any, copies: Any, after: Any) -> Any:
                draw = faults.draw()
                if draw < faults._rate / 2:
                    raise OSError("injected: before the copy")
                if draw < faults._rate:
                    inner.submit(direction, copies, after).wait(10)
                    raise OSError("injected: after the copy")
                if draw < 2 * faults._rate:
                    time.sleep(faults.draw() / 10)
                return inner.submit(direction, copies, after)

        return Faulty()

    def draw(self) -> float:
        with self._lock:
            return self._rng.random()
