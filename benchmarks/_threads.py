# SPDX-License-Identifier: Apache-2.0
"""Work that several threads begin at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


def in_threads(works: Sequence[Callable[[], None]]) -> float:
    """Seconds from the first begin to the last end.

    Raises:
        RuntimeError: a thread failed.
    """
    if len(works) == 1:
        start = time.perf_counter()
        works[0]()
        return time.perf_counter() - start
    barrier = threading.Barrier(len(works), timeout=60)
    times: list[tuple[float, float]] = []

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        start = time.perf_counter()
        work()
        times.append((start, time.perf_counter()))

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(times) != len(works):
        raise RuntimeError("a thread failed")
    return max(end for _, end in times) - min(start for start, _ in times)
