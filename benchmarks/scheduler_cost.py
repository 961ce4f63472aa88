# SPDX-License-Identifier: Apache-2.0
"""What the connector costs vLLM's scheduler thread.

    python -m benchmarks.scheduler_cost [--quick]

A look-up of a 2,000-chunk prompt in an index of 1,000,000 chunks (found whole, half and not
at all), the planning of its load, and a step with nothing to do while 256 requests decode.
The physical limit beside it is as many look-ups of the same keys in a bare ``dict`` of the
same size: the least that any index in Python can cost.
"""

from __future__ import annotations

import argparse
import functools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks._report import Report
from vllm_tiered_kv.geometry import Geometry, GroupGeometry, GroupKind
from vllm_tiered_kv.scheduler.core import SchedulerSettings
from vllm_tiered_kv.scheduler.half import SchedulerHalf

BLOCK = 16
PROMPT_CHUNKS = 2_000
LOOKUP_GOAL_MS = 2.0
IDLE_GOAL_US = 50.0


def make_half(index_chunks: int) -> SchedulerHalf:
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
    return SchedulerHalf(settings, None)


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

    for running in (1, 256):
        half = make_half(1000)
        scheduled = {}
        for i in range(running):
            request = make_request(f"r{i}", [], computed=BLOCK)
            half.find(request, 0)
            request.num_computed_tokens = 1
            scheduled[request.request_id] = 1
        output = SimpleNamespace(num_scheduled_tokens=scheduled, kv_connector_block_state=None)
        idle = SimpleNamespace(finished_recving=None, failed_recving=set())
        half.take_stats()

        def step(h: SchedulerHalf = half, o: Any = output, e: Any = idle) -> None:
            h.build_plan(o)
            h.update(e, ())
            h.take_stats()

        sample(step, 100)
        times = sample(step, repeats * 10)
        report.add(
            f"step with nothing to do, {running} running",
            "ours",
            [t * 1e6 for t in times],
            "us",
            goal=IDLE_GOAL_US,
            at_most=True,
        )
    report.finish()


if __name__ == "__main__":
    main()
