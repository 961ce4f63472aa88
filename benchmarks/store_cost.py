# SPDX-License-Identifier: Apache-2.0
"""What do stores cost the requests that run meanwhile?

    python -m benchmarks.store_cost [--quick] [--arms none,ours,ours-disk,lmcache]

Real `vllm serve` processes: without a connector, with a CPU tier, and with a disk tier behind it.
All stay up and get the same bursts in turns, in rotating order. In a burst a few clients each send
their next request when the last is answered: prompts that nobody has seen before, and a few dozen
tokens to generate. So prefills, decodes and stores run at the same time, and nothing is loaded.
Throughput is prompt and generated tokens over the time from the first request of a burst to its
last answer. What an arm still has to do then, such as writing files, it does before the next one's
turn, and its processor time counts.

No connector has two servers. Ratios are to both of them in the same round, and that of the second
to the first says what a ratio is worth. Goal: at least 0.97 of their throughput.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
import numpy as np

from benchmarks._command import arms_of, present, say, update_docs
from benchmarks._report import FOLDER, Report, Row
from benchmarks._threads import in_threads
from benchmarks.ab_ttft import conditions
from benchmarks.ab_ttft.arms import Arm, Setup
from benchmarks.ab_ttft.cells import ratio, table, times
from benchmarks.ab_ttft.client import BenchmarkFailed, Connection, completion_body
from benchmarks.ab_ttft.floor import kv_bytes_per_token
from benchmarks.ab_ttft.measure import hook_seconds, random_tokens, rotated
from benchmarks.ab_ttft.servers import Engine, empty_folder, running, serve_args
from benchmarks.ab_ttft.stats import Summary, with_interval, with_range
from tools.serving import Metrics, ServerFailed
from tools.tinymodels import build_model

NAME = "store_cost"
ARMS = (Arm.NONE, Arm.CONTROL, Arm.OURS, Arm.OURS_DISK, Arm.LMCACHE)
LABELS = {
    Arm.NONE: "no connector",
    Arm.CONTROL: "no connector, again",
    Arm.OURS: "ours, CPU tier",
    Arm.OURS_DISK: "ours, CPU and disk tier",
    Arm.LMCACHE: "LMCache, CPU",
}
TABLE = FOLDER / f"{NAME}.md"
DOCUMENT = Path("docs/benchmarks.md")
GOAL = 0.97
CAPACITY_GIB, DISK_GIB = 1, 2
STEP_TOKENS = 1024
"""The most tokens of a step: longer prompts are computed in pieces, beside others' decodes."""
_SETTLE_S = 60.0


class Workload(msgspec.Struct, frozen=True):
    """How much is asked."""

    clients: int
    lengths: tuple[int, ...]
    """Prompt tokens of a client's requests; each client sends them in another order."""
    generated: int
    """Tokens of every answer."""
    warmup_rounds: int
    rounds: int

    @property
    def prompt_tokens(self) -> int:
        """Of a burst."""
        return self.clients * sum(self.lengths)

    @property
    def tokens(self) -> int:
        """Of a burst, generated ones included."""
        return self.prompt_tokens + self.clients * len(self.lengths) * self.generated


FULL = Workload(clients=4, lengths=(512, 1024, 2048), generated=32, warmup_rounds=2, rounds=20)
QUICK = Workload(clients=4, lengths=(512, 1024), generated=16, warmup_rounds=1, rounds=4)


class Burst(msgspec.Struct, frozen=True):
    """What one arm made of one burst."""

    seconds: float
    cpu_seconds: float
    """Of all its processes until they were at rest, but the worker's spinning after the end."""


class Measured(msgspec.Struct):
    """Everything that was seen, each list in the order of rounds."""

    bursts: dict[Arm, list[Burst]] = {}
    stored: dict[Arm, dict[str, float]] = {}
    """KV bytes that arrived in our tiers in all rounds, by tier."""
    hooks: dict[Arm, dict[str, float]] = {}
    """Processor seconds in our hooks in all rounds, by half."""


class Clients:
    """So many connections to one arm.

    Args:
        engine: the arm.
        count: so many.
        stack: closes them.
    """

    def __init__(self, engine: Engine, count: int, stack: contextlib.ExitStack) -> None:
        self.engine = engine
        self._connections = [engine.connect() for _ in range(count)]
        for connection in self._connections:
            stack.callback(connection.close)

    def run(self, requests: Sequence[Sequence[bytes]]) -> Burst:
        """Send a burst, and wait until the arm is at rest.

        Raises:
            BenchmarkFailed: a request failed, or its prompt had been seen before.
        """
        clock = self.engine.clock
        pairs = zip(self._connections, requests, strict=True)
        works = [functools.partial(_send, connection, bodies) for connection, bodies in pairs]
        before = clock.seconds()
        try:
            seconds = in_threads(works)
        except RuntimeError as error:
            raise BenchmarkFailed(f"{self.engine.arm.label}: {error}") from error
        answered, rest = clock.seconds(), clock.work_seconds()
        if not clock.wait_quiet(_SETTLE_S):
            raise BenchmarkFailed(f"{self.engine.arm.label} did not come to rest")
        return Burst(seconds, answered - before + clock.work_seconds() - rest)


def requests_of(workload: Workload, model: str) -> list[list[list[bytes]]]:
    """For each round, warm-up included, for each client its requests; the same in every run."""
    random = np.random.default_rng(22)
    return [
        [
            [
                completion_body(model, random_tokens(random, length), workload.generated)
                for length in rotated(workload.lengths, client)
            ]
            for client in range(workload.clients)
        ]
        for _ in range(workload.warmup_rounds + workload.rounds)
    ]


def measure(
    arms: Sequence[Arm], setup: Setup, workload: Workload, say: Callable[[str], None]
) -> Measured:
    """Start every arm, send every burst to each, end every arm."""
    measured = Measured()
    with contextlib.ExitStack() as stack:
        clients: dict[Arm, Clients] = {}
        for arm in arms:
            say(f"starting {LABELS[arm]}")
            stack.enter_context(empty_folder(arm, setup))
            engine = stack.enter_context(running(arm, setup))
            clients[arm] = Clients(engine, workload.clients, stack)
        for client in clients.values():
            client.engine.clock.wait_quiet(_SETTLE_S)
        before: dict[Arm, Metrics] = {}
        for number, requests in enumerate(requests_of(workload, str(setup.model))):
            kept = number >= workload.warmup_rounds
            if kept and not before:
                before = {arm: client.engine.metrics() for arm, client in clients.items()}
            say(f"round {number + 1 - workload.warmup_rounds} of {workload.rounds}")
            for arm in rotated(arms, number):
                burst = clients[arm].run(requests)
                if kept:
                    measured.bursts.setdefault(arm, []).append(burst)
        for arm, client in clients.items():
            after = client.engine.metrics()
            measured.stored[arm] = _grown(_stored(before[arm]), _stored(after))
            measured.hooks[arm] = _grown(hook_seconds(before[arm]), hook_seconds(after))
    return measured


def ratios(measured: Measured, arm: Arm) -> Summary | None:
    """Throughput of an arm over no connector's, paired by round; None if one is missing.

    No connector's seconds are the mean of its servers'; those of the second alone are compared with
    the first one's.
    """
    ours = measured.bursts.get(arm)
    plain = [Arm.NONE] if arm is Arm.CONTROL else [Arm.NONE, Arm.CONTROL]
    none = [measured.bursts[name] for name in plain if name in measured.bursts]
    if not ours or not none or arm is Arm.NONE:
        return None
    rounds = zip(ours, *none, strict=True)
    return with_interval(
        [fmean(burst.seconds for burst in other) / mine.seconds for mine, *other in rounds]
    )


def rows(measured: Measured, workload: Workload, token_bytes: int) -> list[Row]:
    """Throughput and processor time; a spread of ratios is the interval of the median."""
    found: list[Row] = []

    def add(metric: str, arm: Arm, value: Summary, unit: str, goal: float | None = None) -> None:
        met = None if goal is None else value.median >= goal
        spread = value.low, value.high
        found.append(Row(metric, LABELS[arm], value.median, unit, spread, goal, met))

    for arm, seen in measured.bursts.items():
        add("throughput", arm, _rates(seen, workload), "tokens/s")
    for arm in measured.bursts:
        if (value := ratios(measured, arm)) is not None:
            goal = GOAL if arm in (Arm.OURS, Arm.OURS_DISK) else None
            add("throughput / no connector", arm, value, "x", goal)
    for arm, seen in measured.bursts.items():
        add("processor time of a burst", arm, _cpu(seen), "s")
    whole = workload.prompt_tokens * workload.rounds * token_bytes
    for arm, stored in measured.stored.items():
        for tier, nbytes in stored.items():
            share = nbytes / whole
            add(f"stored of all prompts: {tier}", arm, Summary(share, share, share, 1), "x")
    for arm, hooks in measured.hooks.items():
        for half, seconds in sorted(hooks.items()):
            each = seconds / workload.rounds * 1e3
            add(f"{half} hooks in a burst", arm, Summary(each, each, each, 1), "ms")
    return found


def render(measured: Measured, workload: Workload, text: str) -> str:
    """The table for the documents, and what it was measured on."""
    header = ["arm", "tokens/s", "ratio to no connector", "processor time of a burst, s"]
    lines = [
        [
            LABELS[arm],
            times(_rates(seen, workload)),
            ratio(ratios(measured, arm)),
            ratio(_cpu(seen)),
        ]
        for arm, seen in measured.bursts.items()
    ]
    return f"{table(header, lines)}\n\n{text}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer and shorter bursts")
    parser.add_argument("--arms", default=",".join(ARMS), help="such as none,ours")
    parser.add_argument("--rounds", type=int, help="bursts of every arm")
    parser.add_argument("--update-docs", action="store_true", help="from the last full run")
    args = parser.parse_args()
    if args.update_docs:
        return update_docs(TABLE, DOCUMENT, NAME)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended then, too
    workload = QUICK if args.quick else FULL
    workload = msgspec.structs.replace(workload, rounds=args.rounds or workload.rounds)
    arms = present(arms_of(args.arms))
    model = build_model("llama", FOLDER.parent / "models" / "llama-bfloat16", dtype="bfloat16")
    setup = Setup(
        model=model,
        work=FOLDER.parent / NAME,
        capacity_gib=CAPACITY_GIB,
        disk_gib=DISK_GIB,
        serve_args=serve_args(
            max(workload.lengths) + workload.generated, workload.tokens, STEP_TOKENS
        ),
    )
    if warning := conditions.busy_warning():
        say(warning)
    started = time.monotonic()
    try:
        measured = measure(
            arms, setup, workload, lambda text: say(f"{time.monotonic() - started:5.0f} s  {text}")
        )
    except KeyboardInterrupt:
        say("interrupted; the servers are stopped")
        return 130
    except (BenchmarkFailed, ServerFailed) as error:
        say(f"failed: {error}")
        return 1
    token_bytes = kv_bytes_per_token(model)
    text = (
        f"{conditions.on_what(arms, CAPACITY_GIB, token_bytes)}; disk tier {DISK_GIB} GiB; "
        f"{workload.rounds} rounds, in each of which every arm, in rotating order, is sent "
        f"{workload.clients * len(workload.lengths)} new prompts of "
        f"{', '.join(map(str, workload.lengths))} random tokens by {workload.clients} clients at "
        f"once, for {workload.generated} tokens each."
    )
    if workload != FULL or arms != list(ARMS):
        text = f"{conditions.PARTIAL_MARK}: {text}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{NAME}_samples.json").write_bytes(msgspec.json.encode(measured))
    TABLE.write_text(render(measured, workload, text), encoding="utf-8")
    report = Report(NAME, notes=[text])
    report.rows += rows(measured, workload, token_bytes)
    report.finish()
    say(f"table in {TABLE}, servers' logs in {setup.work}/")
    return 0


def _send(connection: Connection, bodies: Sequence[bytes]) -> None:
    for body in bodies:
        if connection.complete(body).cached_tokens:
            raise BenchmarkFailed("a new prompt was cached")


def _rates(seen: Sequence[Burst], workload: Workload) -> Summary:
    return with_range([workload.tokens / burst.seconds for burst in seen])


def _cpu(seen: Sequence[Burst]) -> Summary:
    return with_range([burst.cpu_seconds for burst in seen])


def _stored(metrics: Metrics) -> dict[str, float]:
    name = "vllm:tiered_kv_bytes_total"
    if name not in metrics:
        return {}
    return {
        tier: metrics.value(name, direction="store", tier=tier)
        for tier in ("cpu", "disk")
        if metrics.value(name, direction="store", tier=tier)
    }


def _grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}


if __name__ == "__main__":
    sys.exit(main())
