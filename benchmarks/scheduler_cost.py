# SPDX-License-Identifier: Apache-2.0
"""What the connector costs vLLM's scheduler thread.

    python -m benchmarks.scheduler_cost [--quick]

A look-up of a 2,000-chunk prompt in an index of 1,000,000 chunks (found whole, half and not
at all), the planning of its load, and a step with nothing to do while 256 requests decode.
The physical limit beside it is as many look-ups of the same keys in a bare ``dict`` of the
same size: the least that any index in Python can cost.

The same with a disk tier that knows 1,000,000 chunks. A prompt that lies on disk is looked up again
and again until it is read, and ordered piece by piece: there the dearest of these calls counts, in
processor time, since the longest of many spans of the wall clock measures who else is running.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from benchmarks._report import Report
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.policies import Eviction, make_policy
from vllm_tiered_kv.scheduler.core import SchedulerSettings
from vllm_tiered_kv.scheduler.half import SchedulerHalf
from vllm_tiered_kv.tiers.disk.active import Ended
from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.entries import FileName, FoundFile
from vllm_tiered_kv.tiers.disk.orders import Outcome, ReadOrder
from vllm_tiered_kv.tiers.disk.settings import TierSettings

BLOCK = 16
PROMPT_CHUNKS = 2_000
LOOKUP_GOAL_MS = 2.0
IDLE_GOAL_US = 50.0


class NoFolder:
    """Stands for the disk agent's thread, which is not what is measured: a real catalogue."""

    is_readable = is_writable = True
    is_degraded = is_connecting = False
    used = evicted = 0
    addresses = ("", "", b"")

    def __init__(self, keys: Iterable[bytes]) -> None:
        self.settings = TierSettings("", 1 << 60, 0.95, 0.9, 0, False, 30.0, 1, (1 << 20,), 4096)
        catalogue = Catalogue(1, make_policy(Eviction.LRU), BLOCK)
        catalogue.open("ours")
        catalogue.scan_begins()
        catalogue.found(FoundFile(FileName("ours", 0, 0, key), 1 << 20, 0) for key in keys)
        catalogue.scan_ends()
        self.groups, self.masks = catalogue.groups, catalogue.masks
        self.ended: list[Ended] = []

    def read(self, orders: Sequence[ReadOrder]) -> bool:
        self.ended += [Ended(order.job, Outcome.DONE) for order in orders]
        return True

    def take(self) -> list[Ended]:
        ended, self.ended = self.ended, []
        return ended

    def take_failures(self) -> list[str]:
        return []

    def cancel(self, jobs: Sequence[int]) -> None:
        pass


def make_half(index_chunks: int, agent: Any = None) -> SchedulerHalf:
    geometry = Geometry(BLOCK, BLOCK, (GroupGeometry(GroupKind.FULL, BLOCK, 1 << 20),))
    settings = SchedulerSettings(
        geometry,
        num_slots=index_chunks + PROMPT_CHUNKS,
        world_size=1,
        load_deadline=10.0,
        trust_after_reset=False,
        store_generated=True,
        shares_device_prefixes=True,
    )
    return SchedulerHalf(settings, None, agent=agent)


def fill(half: SchedulerHalf, keys: list[bytes]) -> None:
    """Store ``keys`` as prefixes of :data:`PROMPT_CHUNKS` chunks each."""
    index = half.core.index
    parent = None
    for i, key in enumerate(keys):
        if i % PROMPT_CHUNKS == 0:
            parent = None
        node = index.reserve(key, parent, [0])
        if node is None:
            raise RuntimeError("the index is too small")
        index.commit(node)
        index.unpin(node)
        parent = node


def make_request(name: str, hashes: list[bytes], computed: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=len(hashes) * BLOCK + 1,
        num_prompt_tokens=len(hashes) * BLOCK + 1,
        num_computed_tokens=computed,
        lora_request=None,
        skip_reading_prefix_cache=False,
        kv_transfer_params=None,
        is_finished=lambda: False,
    )


def look_up_all(index: dict[bytes, None], keys: list[bytes]) -> None:
    for key in keys:
        index.get(key)


def sample(run: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def measure_disk(report: Report, keys: list[bytes], starts: list[int], absent: list[bytes]) -> None:
    """Look-ups with an empty CPU tier and all on disk, or not there either."""
    half = make_half(20 * PROMPT_CHUNKS, NoFolder(keys))
    metric = f"look-up, {PROMPT_CHUNKS} of {len(keys)} chunks on disk"
    misses, firsts, dearest = [], [], []
    for i, start in enumerate(starts):
        half.drain()
        miss = make_request(f"miss{i}", [bytes(bytearray(key)) for key in absent])
        misses += sample(functools.partial(half.find, miss, 0), 1)
        half.finished(miss, [[]])
        hashes = [bytes(bytearray(key)) for key in keys[start : start + PROMPT_CHUNKS]]
        request = make_request(f"disk{i}", hashes)
        calls = []
        answer = None
        while answer is None:
            half.drain()  # a step's; what has been read is taken in there
            begun = time.thread_time()
            answer, _ = half.find(request, 0)
            calls.append(time.thread_time() - begun)
        if answer != PROMPT_CHUNKS * BLOCK:
            raise RuntimeError(f"{answer} tokens were found")
        firsts.append(calls[0])
        dearest.append(max(calls))
        half.finished(request, [[]])
        half.core.index.clear()
    for arm, times in (("none found", misses), ("first call", firsts), ("dearest call", dearest)):
        report.add(metric, arm, [t * 1e3 for t in times], "ms", goal=LOOKUP_GOAL_MS, at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="what the connector costs the scheduler thread")
    parser.add_argument("--quick", action="store_true", help="an index of 100,000 chunks")
    quick = parser.parse_args().quick
    chunks = 100_000 if quick else 1_000_000
    repeats = 50 if quick else 200
    report = Report("scheduler_cost")

    rng = random.Random(0)
    keys = [rng.randbytes(32) for _ in range(chunks)]
    half = make_half(chunks)
    fill(half, keys)
    bare = dict.fromkeys(keys)

    starts = [rng.randrange(chunks // PROMPT_CHUNKS) * PROMPT_CHUNKS for _ in range(repeats)]
    absent = [rng.randbytes(32) for _ in range(PROMPT_CHUNKS)]
    arms: dict[str, Callable[[int], list[bytes]]] = {
        "all found": lambda s: keys[s : s + PROMPT_CHUNKS],
        "half found": lambda s: keys[s : s + PROMPT_CHUNKS // 2] + absent[: PROMPT_CHUNKS // 2],
        "none found": lambda _: absent,
    }
    for arm, pick in arms.items():
        times = []
        for i, start in enumerate(starts):
            # fresh objects: a bytes object remembers its hash, a new request's have not
            hashes = [bytes(bytearray(key)) for key in pick(start)]
            request = make_request(f"{arm}{i}", hashes)
            times += sample(functools.partial(half.find, request, 0), 1)
            half.finished(request, [[]])
        report.add(
            f"look-up, {PROMPT_CHUNKS} of {chunks} chunks",
            arm,
            [t * 1e3 for t in times],
            "ms",
            goal=LOOKUP_GOAL_MS,
            at_most=True,
        )
    times = []
    for start in starts:
        hashes = [bytes(bytearray(key)) for key in keys[start : start + PROMPT_CHUNKS]]
        times += sample(functools.partial(look_up_all, bare, hashes), 1)
    report.add(
        f"look-up, {PROMPT_CHUNKS} of {chunks} chunks", "bare dict", [t * 1e3 for t in times], "ms"
    )

    table = [list(range(1, PROMPT_CHUNKS + 2))]
    blocks = SimpleNamespace(get_block_ids=lambda: table)
    times = []
    for i, start in enumerate(starts[: repeats // 4]):
        request = make_request(f"load{i}", keys[start : start + PROMPT_CHUNKS])
        tokens, _ = half.find(request, 0)
        times += sample(functools.partial(half.allocated, request, blocks, tokens or 0), 1)
        load = half._requests[request.request_id].load
        if load is None:
            raise RuntimeError("the load was not planned")
        half.core.ledger.loads.clear()
        half.loads._loading.clear()
        for node in load.nodes:
            half.core.index.unpin(node)
    report.add(f"planning a load of {PROMPT_CHUNKS} chunks", "ours", [t * 1e3 for t in times], "ms")
    half.loads.jobs.clear()

    measure_disk(report, keys, starts, absent)

    for running, agent in ((1, None), (256, None), (256, NoFolder(keys))):
        half = make_half(1000, agent)
        scheduled = {}
        for i in range(running):
            request = make_request(f"r{i}", [], computed=BLOCK)
            half.find(request, 0)
            request.num_computed_tokens = 1
            scheduled[request.request_id] = 1
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=None)
        idle = SimpleNamespace(finished_recving=None, failed_recving=set(), invalid_block_ids=set())
        half.take_stats()

        def step(h: SchedulerHalf = half, o: Any = output, e: Any = idle) -> None:
            h.build_plan(o)
            h.update(e, ())
            h.take_stats()

        sample(step, 100)
        times = sample(step, repeats * 10)
        report.add(
            f"step with nothing to do, {running} running",
            "ours" if agent is None else f"ours, {chunks} chunks on disk",
            [t * 1e6 for t in times],
            "us",
            goal=IDLE_GOAL_US,
            at_most=True,
        )
    report.finish()


if __name__ == "__main__":
    main()
