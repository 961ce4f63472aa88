# SPDX-License-Identifier: Apache-2.0
"""Calls that may never return: of a mount that hangs, of a name server that does not answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

_K = TypeVar("_K", bound=Hashable)
_T = TypeVar("_T")


def answers(calls: Mapping[_K, Callable[[], _T]], seconds: float) -> dict[_K, _T]:
    """What has been answered within so many seconds; all are asked at once.

    Each has a thread of its own, which is left behind where it hangs: keep their number small.

    Raises:
        Exception: what the first call that failed has raised.
    """
    found: dict[_K, _T] = {}
    ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run(key: _K, call: Callable[[], _T]) -> None:
        try:
            found[key] = call()
        except Exception as failed:  # noqa: BLE001 - raised below
            ended.put(failed)
        else:
            ended.put(None)

    deadline = time.monotonic() + seconds
    for key, call in calls.items():
        threading.Thread(target=run, args=(key, call), daemon=True).start()
    for _ in calls:
        try:
            failed = ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            break
        if failed is not None:
            raise failed
    return found.copy()
