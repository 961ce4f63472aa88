# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has the CPU tier's memory: anonymous memory, of which none is touched here.

It is no shared memory, so the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.check.findings import Finding, error, ok, refused, warning
from vllm_tiered_kv.config import (
    ConfigError,
    CpuOptions,
    available_memory,
    check_capacity,
    format_size,
    memory_limit,
)
from vllm_tiered_kv.worker.mapping import PoolError, map_memory

WHAT = "cpu.capacity"
MOST = 0.9
"""Share of the machine's memory from which a tier is said to leave little for all else."""


class Memory(msgspec.Struct, frozen=True):
    """Bytes, of the machine or of the container that this process is in."""

    limit: int
    available: int
    """Now."""
    refusal: str | None
    """Why a rank's share cannot be mapped; None if it can."""


def look(cpu: CpuOptions, ranks: int) -> Memory:
    """What there is. Maps a rank's share and gives it back."""
    refusal = None
    try:
        map_memory(max(1, cpu.capacity // ranks)).close()
    except PoolError as failed:
        refusal = str(failed)
    return Memory(memory_limit(), available_memory(), refusal)


def judge(cpu: CpuOptions, memory: Memory) -> Finding:
    """Pure."""
    size, limit = format_size(cpu.capacity), format_size(memory.limit)
    try:
        check_capacity(WHAT, cpu.capacity, floor=1, limit=memory.limit)
    except ConfigError as wrong:
        return refused(str(wrong))
    if memory.refusal is not None:
        return error(
            WHAT,
            f"{memory.refusal} (limits of this process: ulimit -v, ulimit -d; of the machine: "
            "vm.overcommit_memory)",
        )
    if cpu.capacity > memory.available:
        return warning(
            WHAT,
            f"{size}, but only {format_size(memory.available)} of {limit} is available now; the "
            "tier fills it in the background, and the kernel may end processes",
        )
    if cpu.capacity > MOST * memory.limit:
        return warning(WHAT, f"{size} of {limit} leaves little for the engine and all else")
    available = format_size(memory.available)
    return ok(WHAT, f"{size} of {limit}, of which {available} is available now")
