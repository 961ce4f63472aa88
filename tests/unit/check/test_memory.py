# SPDX-License-Identifier: Apache-2.0
"""What is said of the CPU tier's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_tiered_kv.check.findings import Level
from vllm_tiered_kv.check.memory import Memory, judge, look
from vllm_tiered_kv.config import ConfigError, CpuOptions, Size, check_capacity, memory_limit

ROOT = Path(__file__).parents[3]
GIB = 1 << 30


def cpu(nbytes: int) -> CpuOptions:
    return CpuOptions(Size(nbytes))


def test_what_this_machine_has() -> None:
    found = look(cpu(1 << 20), 1)
    assert found.limit == memory_limit()
    assert 0 < found.available <= found.limit
    assert found.refusal is None
    assert judge(cpu(1 << 20), found).level is Level.OK


@pytest.mark.parametrize(
    ("capacity", "level", "says"),
    [
        (20 * GIB, Level.OK, "20 GiB of 64 GiB, of which 50 GiB is available now"),
        (50 * GIB, Level.OK, "50 GiB"),
        (51 * GIB, Level.WARNING, "only 50 GiB of 64 GiB is available now"),
        (65 * GIB, Level.ERROR, "65 GiB is more than this machine or container has (64 GiB)"),
    ],
)
def test_a_capacity(capacity: int, level: Level, says: str) -> None:
    finding = judge(cpu(capacity), Memory(64 * GIB, 50 * GIB, None))
    assert finding.level is level
    assert says in finding.says


def test_little_is_left_for_the_engine() -> None:
    finding = judge(cpu(60 * GIB), Memory(64 * GIB, 63 * GIB, None))
    assert finding.level is Level.WARNING
    assert "leaves little for the engine" in finding.says


def test_what_is_refused_is_said_as_the_engine_says_it() -> None:
    with pytest.raises(ConfigError) as error:
        check_capacity("cpu.capacity", 65 * GIB, floor=1, limit=64 * GIB)
    finding = judge(cpu(65 * GIB), Memory(64 * GIB, 50 * GIB, None))
    assert f"{finding.what}: {finding.says}" == str(error.value)


def test_a_limit_of_the_process_counts() -> None:
    program = (
        "import resource\n"
        "from vllm_tiered_kv.check.memory import judge, look\n"
        "from vllm_tiered_kv.config import CpuOptions, Size\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))\n"
        "for nbytes, ranks in ((1 << 32, 1), (1 << 32, 8)):\n"
        "    cpu = CpuOptions(Size(nbytes))\n"
        "    print(look(cpu, ranks).refusal)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    whole, share = done.stdout.splitlines()
    assert whole.startswith("Could not map 4294967296 bytes for the CPU tier")
    assert share == "None"
    finding = judge(cpu(GIB), Memory(64 * GIB, 64 * GIB, whole))
    assert finding.level is Level.ERROR
    assert "ulimit -v" in finding.says
