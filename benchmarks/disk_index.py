# SPDX-License-Identifier: Apache-2.0
"""What a start costs with many files on disk.

    python -m benchmarks.disk_index [--quick]

The files are sparse, with the names and sizes of 200,000 chunks of one namespace. An agent is
started on the folder as an engine does it: how long its scan takes, beside the least that a walk
over the same folder costs in Python (`os.walk` and one `stat` a file); by how much a thread that
computes, as a scheduler's does, is slowed down meanwhile; how soon something said to the agent is
done meanwhile; what the index takes of memory for each chunk.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import tempfile
import threading
import time
from pathlib import Path

from benchmarks._report import Report
from vllm_tiered_kv.policies import Eviction, make_policy
from vllm_tiered_kv.tiers.disk.agent import DiskAgent
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.channel import AgentSockets
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import file_bytes
from vllm_tiered_kv.tiers.disk.names import chunk_file, rank_folder, shard_folder
from vllm_tiered_kv.tiers.disk.settings import TierSettings

SPACE = "0123456789abcdef-fedcba9876543210"
FILE = file_bytes(1 << 20)
BYTES_GOAL = 600.0
TIMEOUT = 600.0


def fill(root: Path, count: int) -> None:
    rng = random.Random(0)
    folder = root / SPACE / rank_folder(0)
    for i in range(256):
        (folder / f"{i:02x}").mkdir(parents=True)
    for _ in range(count):
        key = rng.randbytes(32)
        path = folder / shard_folder(key) / str(chunk_file(key, 0))
        with path.open("wb") as file:
            file.truncate(FILE)


def walk(root: Path) -> float:
    start = time.perf_counter()
    for folder, _, names in os.walk(root):
        for name in names:
            Path(folder, name).stat()
    return time.perf_counter() - start


def resident() -> int:
    """Bytes of this process's memory that are in RAM."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGESIZE")


def spin() -> float:
    """Seconds that a millisecond or so of a scheduler's work takes now."""
    start = time.perf_counter()
    table = {}
    for i in range(10_000):
        table[i] = i
    return time.perf_counter() - start


def agent_on(root: Path) -> DiskAgent:
    settings = TierSettings(
        root=str(root),
        capacity=1 << 60,
        high_water=0.95,
        low_water=0.9,
        min_free=0,
        shared=False,
        io_deadline=30.0,
        ranks=1,
        file_bytes=(FILE,),
        max_queued=64,
    )
    catalogue = Catalogue(1, make_policy(Eviction.LRU), 128)
    return DiskAgent(settings, catalogue, AgentSockets(), Files())


def start_once(root: Path, report: Report, count: int) -> None:
    alone = [spin() for _ in range(200)]
    gc.collect()
    before = resident()
    agent = agent_on(root)
    start = time.perf_counter()
    agent.open(SPACE, {})
    slowed: list[float] = []
    answers: list[float] = []
    while not agent.is_connecting:
        slowed.append(spin())
        heard = threading.Event()
        asked = time.perf_counter()
        agent._errands.insist(heard.set)
        if not heard.wait(TIMEOUT):
            raise TimeoutError("the agent does not answer")
        answers.append(time.perf_counter() - asked)
        time.sleep(0.005)
    seconds = time.perf_counter() - start
    gc.collect()
    grown = resident() - before
    chunks = agent._tier.chunks
    if chunks != count:
        raise RuntimeError(f"{chunks} of {count} chunks were found")
    agent.shutdown()
    what = f"start with {count} files"
    report.add(f"{what}: scan", "ours", [seconds], "s")
    report.add(f"{what}: answer meanwhile", "ours", [1e3 * t for t in answers], "ms")
    report.add(f"{what}: 10,000 insertions meanwhile", "ours", [1e3 * t for t in slowed], "ms")
    report.add(f"{what}: 10,000 insertions meanwhile", "no scan", [1e3 * t for t in alone], "ms")
    report.add(
        f"{what}: memory a chunk",
        "ours",
        [grown / count],
        "bytes",
        goal=BYTES_GOAL,
        at_most=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="what a start with many files costs")
    parser.add_argument("--quick", action="store_true", help="20,000 files")
    count = 20_000 if parser.parse_args().quick else 200_000
    report = Report("disk_index", ["files are sparse; the folder's entries are cached"])
    root = Path(tempfile.mkdtemp(prefix="disk-index-"))
    try:
        fill(root, count)
        report.add(f"walk over {count} files", "os.walk", [walk(root)], "s")
        start_once(root, report, count)
    finally:
        shutil.rmtree(root)
    report.finish()


if __name__ == "__main__":
    main()
