# SPDX-License-Identifier: Apache-2.0
"""What the tiers would serve of a trace, by eviction policy, capacity and admission.

    python -m benchmarks.replay [--quick] [--trace FILE]

Replays a published hour of conversations and three synthetic loads, or a trace of your own, through
the real index and policies, without an engine. Beside each stands what an endless cache serves, and
one that knows the future. Draws `docs/images/replay.png`, or with `--quick` or `--trace` a file
beside the rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from benchmarks import _report
from benchmarks._report import Report
from vllm_tiered_kv.policies import Eviction
from vllm_tiered_kv.replay import (
    Outcome,
    Request,
    Settings,
    TraceError,
    belady,
    endless,
    read_trace,
    replay,
)
from vllm_tiered_kv.replay.synthetic import LOADS

ROOT = Path(__file__).resolve().parent
TRACE = ROOT / "traces" / "conversation_trace.jsonl.xz"
IMAGE = ROOT.parent / "docs" / "images" / "replay.png"

REQUESTS = {"chat": 10_000, "rag": 5_000, "agents": 1_500}
QUICK = 10
"""The quick run takes one of so many requests of each load, its first ones."""

SHARES = (0.02, 0.05, 0.1, 0.2)
"""Capacities, as shares of the distinct blocks of a load."""

CPU_SHARE = 0.02
DISK_SHARES = (0.05, 0.2)
STORE_AFTER = (1, 2, 3)
BLOCK_BYTES = 64 << 20
"""512 tokens of Llama 3.1 8B in 16 bits: 2 x 32 layers x 8 heads x 128 x 2 bytes a token."""

FUTURE, ENDLESS = "knows the future", "endless"

Curves = dict[str, list[float]]
"""Hit rates in % by arm, one for each of :data:`SHARES`."""


class Load:
    """Requests, and what there is to know of them."""

    def __init__(self, name: str, requests: list[Request]) -> None:
        self.name = name
        self.requests = requests
        self.blocks = sum(len(request.hash_ids) for request in requests)
        self.distinct = len({block for request in requests for block in request.hash_ids})

    def blocks_of(self, share: float) -> int:
        return max(1, int(share * self.distinct))


class Task(msgspec.Struct, frozen=True):
    """One replay: of a load, with these tiers, or by who knows the future where there are none."""

    load: str
    settings: Settings | None
    capacity: int = 0


class Plan(msgspec.Struct, frozen=True):
    """What to report of a task."""

    where: str
    arm: str
    task: Task


def policies(load: Load) -> list[Plan]:
    """Each policy in the CPU tier alone, at each capacity."""
    plans = []
    for share in SHARES:
        capacity = load.blocks_of(share)
        where = f"{load.name}, {capacity} blocks ({share:.0%})"
        for eviction in Eviction:
            task = Task(load.name, Settings(capacity, eviction))
            plans.append(Plan(where, eviction.value, task))
        plans.append(Plan(where, FUTURE, Task(load.name, None, capacity)))
    return plans


def disks(load: Load) -> list[Plan]:
    """A disk below a small CPU tier: its policy, and when a chunk is written."""
    arms = [(Eviction.LRU, times) for times in STORE_AFTER]
    arms += [(eviction, 1) for eviction in Eviction if eviction is not Eviction.LRU]
    plans = []
    for share in DISK_SHARES:
        where = f"{load.name}, CPU {CPU_SHARE:.0%}, disk {share:.0%}"
        for eviction, times in arms:
            settings = Settings(
                load.blocks_of(CPU_SHARE),
                disk_bytes=load.blocks_of(share) * BLOCK_BYTES,
                disk_eviction=eviction,
                store_after=times,
                block_bytes=BLOCK_BYTES,
            )
            arm = f"{eviction.value}, store_after {times}"
            plans.append(Plan(where, arm, Task(load.name, settings)))
    return plans


def report_on(load: Load, results: list[tuple[Plan, Outcome]], report: Report) -> Curves:
    """Add the rows of a load; returns what is drawn of them."""
    curves: Curves = {}
    for plan, outcome in results:
        rate = 100 * outcome.hit_rate
        settings = plan.task.settings
        if settings is not None and settings.disk_bytes:
            for tier, hits in (("CPU", outcome.cpu_hits), ("disk", outcome.disk_hits)):
                share = 100 * hits / outcome.blocks
                report.add(f"blocks served from {tier}: {plan.where}", plan.arm, [share], "%")
            written = outcome.disk_written / 2**30
            report.add(f"written: {plan.where}", plan.arm, [written], "GiB")
            continue
        curves.setdefault(plan.arm, []).append(rate)
        report.add(f"blocks served: {plan.where}", plan.arm, [rate], "%")
        if settings is not None:
            report.add(f"computing saved: {plan.where}", plan.arm, [100 * outcome.saved], "%")
    most = 100 * endless(load.requests) / load.blocks
    report.add(f"blocks served: {load.name}", ENDLESS, [most], "%")
    curves[ENDLESS] = [most] * len(SHARES)
    return curves


_loads: dict[str, Load] = {}
"""Of a process that replays."""


def _begin(trace: Path | None, quick: bool) -> None:
    _loads.update({load.name: load for load in make_loads(trace, quick=quick)})


def _run(task: Task) -> Outcome:
    load = _loads[task.load]
    if task.settings is not None:
        return replay(load.requests, task.settings)
    hits = belady(load.requests, task.capacity)
    return Outcome(len(load.requests), load.blocks, hits, 0, 0, 0.0)


def speed(load: Load, report: Report) -> None:
    """How fast a replay is."""
    for eviction in Eviction:
        start = time.process_time()
        replay(load.requests, Settings(load.blocks_of(0.1), eviction))
        rate = len(load.requests) / (time.process_time() - start)
        report.add(f"replayed: {load.name}", eviction.value, [rate], "requests/s")


def draw(curves: dict[str, Curves], path: Path) -> None:
    """One panel a load.

    Raises:
        OSError: the file could not be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(curves), figsize=(4 * len(curves), 3.6), layout="constrained", squeeze=False
    )
    for panel, (name, arms) in zip(panels[0], curves.items(), strict=True):
        for arm, rates in arms.items():
            bound = arm in (ENDLESS, FUTURE)
            style = {"color": "0.6", "linestyle": ":" if arm == ENDLESS else "--"}
            panel.plot(
                [100 * share for share in SHARES],
                rates,
                label=arm,
                marker=None if bound else "o",
                **style if bound else {},
            )
        panel.set(title=name, xscale="log", xlabel="capacity, % of distinct blocks")
        panel.set_xticks([100 * share for share in SHARES], [f"{share:.0%}" for share in SHARES])
        panel.minorticks_off()
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("blocks served, %")
    panels[0][0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"plot in {path}")


def make_loads(trace: Path | None, *, quick: bool) -> list[Load]:
    """The loads of a run.

    Raises:
        TraceError: ``trace`` cannot be replayed.
        OSError: it cannot be read.
    """
    part = QUICK if quick else 1
    if trace is not None:
        own = Load(trace.name, list(read_trace(trace)))
        if not own.blocks:
            raise TraceError(f"{trace} holds no requests with blocks")
        return [own]
    conversations = list(read_trace(TRACE))
    loads = [Load("conversations", conversations[: len(conversations) // part])]
    for name, count in REQUESTS.items():
        loads.append(Load(name, list(itertools.islice(LOADS[name](0), count // part))))
    return loads


def main() -> None:
    parser = argparse.ArgumentParser(description="what the tiers would serve of a trace")
    parser.add_argument("--quick", action="store_true", help="a tenth of each load")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="a trace of your own")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="replays at a time")
    options = parser.parse_args()
    try:
        loads = make_loads(options.trace, quick=options.quick)
    except (TraceError, OSError) as error:
        sys.exit(str(error))
    notes = [f"{x.name}: {len(x.requests)} requests, {x.blocks} blocks" for x in loads]
    report = Report("replay", notes)
    plans = {load.name: policies(load) + disks(load) for load in loads}
    curves = {}
    start = (options.trace, options.quick)
    with ProcessPoolExecutor(options.jobs, initializer=_begin, initargs=start) as pool:
        runs = {
            name: pool.map(_run, [plan.task for plan in planned]) for name, planned in plans.items()
        }
        for load in loads:
            print(f"{load.name}: {len(load.requests)} requests, {load.blocks} blocks", flush=True)
            results = list(zip(plans[load.name], runs[load.name], strict=True))
            curves[load.name] = report_on(load, results, report)
    speed(loads[0], report)
    report.finish()
    own = options.quick or options.trace is not None
    draw(curves, _report.FOLDER / "replay.png" if own else IMAGE)


if __name__ == "__main__":
    main()
