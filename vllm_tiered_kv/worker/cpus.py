# SPDX-License-Identifier: Apache-2.0
"""Which processors the copying threads may use."""

from __future__ import annotations

import os

NO_CPUS: frozenset[int] = frozenset()
"""Leave a thread where it is."""


def copy_cpus() -> frozenset[int]:
    """The processors of the whole engine; empty where nothing is to be changed.

    vLLM's CPU platform binds a worker to its compute processors, and threads started later
    inherit that: copies would run beside the forward pass while other processors idle.
    Where workers are not bound, nothing changes.
    """
    try:
        own = os.sched_getaffinity(0)
        engine = os.sched_getaffinity(os.getppid())
    except OSError:
        return NO_CPUS
    return NO_CPUS if engine <= own else frozenset(engine | own)
