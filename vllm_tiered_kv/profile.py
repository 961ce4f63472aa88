# SPDX-License-Identifier: Apache-2.0
"""How long our hooks hold the engine's threads, measured where it is asked for."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from vllm_tiered_kv import metrics

VARIABLE = "TIERED_KV_PROFILE"
"""Environment variable; ``1`` feeds ``vllm:tiered_kv_hook_seconds_total``."""

T = TypeVar("T")


class _Timed:
    """Stands before a half and times every call of its methods."""

    def __init__(self, target: object, half: str, count: Callable[[str, float], None]) -> None:
        self._target = target
        self._half = half
        self._count = count

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value
        wall = metrics.HOOK_SECONDS.key(self._half, name, "wall")
        cpu = metrics.HOOK_SECONDS.key(self._half, name, "cpu")

        @functools.wraps(value)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start, cpu_start = time.perf_counter(), time.thread_time()
            try:
                return value(*args, **kwargs)
            finally:
                self._count(cpu, time.thread_time() - cpu_start)
                self._count(wall, time.perf_counter() - start)

        setattr(self, name, timed)  # found directly from now on
        return timed


def timed(target: T, half: str, count: Callable[[str, float], None]) -> T:
    """``target`` itself, or a stand-in that times it if :data:`VARIABLE` is set."""
    if os.environ.get(VARIABLE) != "1":
        return target
    return cast(T, _Timed(target, half, count))
