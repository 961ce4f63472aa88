# SPDX-License-Identifier: Apache-2.0
"""Keeping a thread next to a GPU, so that memory it touches first is on that GPU's NUMA node."""

from __future__ import annotations

import os
from pathlib import Path

from vllm_tiered_kv.log import get_logger

logger = get_logger(__name__)


def parse_cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a sysfs list such as `0-3,8,10-11`.

    Raises:
        ValueError: the text is not such a list.
    """
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_near_pci_device(bus_id: str, sysfs: Path = Path("/sys")) -> frozenset[int] | None:
    """CPUs of the NUMA node of a PCI device (`0000:1b:00.0`); None where it can't be told."""
    try:
        node = int((sysfs / "bus/pci/devices" / bus_id.lower() / "numa_node").read_text())
        if node < 0:
            return None
        return parse_cpu_list((sysfs / f"devices/system/node/node{node}/cpulist").read_text())
    except (OSError, ValueError):
        return None


def bind_calling_thread(cpus: frozenset[int]) -> None:
    """Keeps the calling thread on those of `cpus` it may use; leaves it alone if there are none."""
    try:
        allowed = cpus & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)
    except OSError as error:
        logger.debug("tiered-kv: could not bind a thread to its NUMA node: %s", error)
