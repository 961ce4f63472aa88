# SPDX-License-Identifier: Apache-2.0
"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from vllm_tiered_kv.bench.report import Machine
from vllm_tiered_kv.config import memory_limit


def this_machine() -> Machine:
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_limit(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        load_average=os.getloadavg()[0],
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()
