# SPDX-License-Identifier: Apache-2.0
"""Which processors the copying threads may use."""

from __future__ import annotations

import os

NO_CPUS: frozenset[int] = frozenset()
"""Leave a thread where it is."""


def copy_cpus() -> tuple[frozenset[int], frozenset[int]]:
    """``(for loads, for stores)``: sets of processors; empty where nothing is to be changed.

    vLLM's CPU platform binds a worker to its compute processors, and threads started later
    inherit that. Loads run while their request waits and may use every processor that the
    engine has; stores run beside the next forward pass and keep off the compute processors
    if the engine has any other. Where workers are not bound, nothing changes.
    """
    try:
        own = os.sched_getaffinity(0)
        engine = os.sched_getaffinity(os.getppid())
    except OSError:
        return NO_CPUS, NO_CPUS
    if engine <= own:
        return NO_CPUS, NO_CPUS
    every = frozenset(engine | own)
    return every, every - own
