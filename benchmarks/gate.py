# SPDX-License-Identifier: Apache-2.0
"""Whether the gate is ever slower than the better of always loading and never loading.

    python -m benchmarks.gate [--tier cpu|disk] [--quick] [--model FOLDER]

One real ``vllm serve`` process. Its CPU tier (or its disk tier, below a CPU tier that another
prompt fills before each request) is made slow by a delay a chunk, from none to ten times what
computing the chunk takes; for prompts of several lengths that lie in it, the time to first token is
measured with the gate set to ``measured``, ``always`` and ``never``, request by request, in turn.
What is reported is the ratio of ``measured`` to the better of the two others, by medians, and the
interval that holds it 95 times in 100 (bootstrap over the rounds). Requests with ``measured`` meet
each speed alone before it is measured; later it learns from the other arms too.

Where the machine is noisy a second figure says more: what the choices that were made would have
taken by the medians of the two other arms, over the better of these.

Two threads share the delay of a long load (of the disk tier more, whose files are as much slower),
so that a tier is about half as slow as its column says; what it was in truth the ``always`` column
shows.
"""

from __future__ import annotations

import argparse
import enum
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _slow_tier
from benchmarks._report import Report
from tools.serving import Client, Server, ServeSpec, compute_cpus
from tools.tinymodels import build_model
from vllm_tiered_kv.tiers.disk.executor import READERS

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 128
ARMS = ("measured", "always", "never")
GOAL = 1.05
SLOWNESS = (0.0, 0.3, 0.7, 1.0, 1.5, 3.0, 10.0)
LENGTHS = (256, 512, 1024, 2048, 3968)
RESAMPLES = 2000
CHUNK_KIB = 384  # of the model, in float32
CHUNKS_ABOVE = LENGTHS[-1] // CHUNK
"""Slots of the CPU tier above the disk: the longest prompt takes all."""


class Tier(str, enum.Enum):
    """Which of the engine's tiers is there, and slowed down."""

    CPU = "cpu"
    DISK = "disk"

    def options(self, folder: Path) -> dict[str, Any]:
        """In our configuration."""
        if self is Tier.CPU:
            return {"cpu": {"capacity": "1GiB"}}
        return {
            "cpu": {"capacity": f"{CHUNKS_ABOVE * CHUNK_KIB}KiB"},
            "disk": {"path": str(folder / "kv"), "capacity": "4GiB", "min_tokens": 0},
        }

    def forget(self, client: Client) -> None:
        """Nothing of what was asked for is in a tier above this one."""
        if self is Tier.DISK:
            ask(client, FILLER, "always")

    def slow_down(self, delays: Path, seconds: float) -> None:
        """By so much a chunk, shared by two threads whichever tier it is."""
        if self is Tier.CPU:
            _slow_tier.set_delays(delays, copy=seconds)
        else:
            _slow_tier.set_delays(delays, read=seconds * READERS / 2)


def server(model: Path, delays: Path, log: Path, tier: Tier = Tier.CPU) -> Server:
    """The engine whose tier can be slowed down."""
    return Server(
        ServeSpec.make(
            model,
            ["--dtype=float32", "--enforce-eager", "--max-model-len=4096"],
            env={
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": compute_cpus(),
                "PYTHONPATH": str(ROOT),
                _slow_tier.VARIABLE: str(delays),
            },
            kv_transfer_config={
                "kv_connector": "SlowTieredKVConnector",
                "kv_connector_module_path": "benchmarks._slow_tier",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {**tier.options(delays.parent), "gate": "measured"},
            },
        ),
        log,
    )


def prompt(name: str, tokens: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(8, 4096) for _ in range(tokens)]


FILLER = prompt("pushes out", LENGTHS[-1])


def ask(client: Client, tokens: Sequence[int], gate: str) -> float:
    """Seconds to the first token of a prompt that the device has forgotten."""
    while not client.reset_prefix_cache():
        client.complete([9, 8, 9], max_tokens=1)
    params = {"tiered_kv": {"gate": gate}}
    return client.complete(tokens, max_tokens=1, kv_transfer_params=params).ttft_s


def store(client: Client, tokens: Sequence[int]) -> None:
    """Have a prompt in the tier."""
    client.complete(tokens, max_tokens=1)
    name = "vllm:tiered_kv_jobs_in_flight"
    while any(client.metrics().value(name, direction=way) for way in ("store", "write")):
        client.complete([9, 8, 9], max_tokens=1)


def ratio(samples: dict[str, list[float]], picked: Sequence[int]) -> float:
    middle = {arm: statistics.median(samples[arm][i] for i in picked) for arm in ARMS}
    return middle["measured"] / min(middle["always"], middle["never"])


def interval(samples: dict[str, list[float]], rng: random.Random) -> tuple[float, float]:
    """In which the ratio lies 95 times in 100."""
    rounds = len(samples["never"])
    found = sorted(ratio(samples, rng.choices(range(rounds), k=rounds)) for _ in range(RESAMPLES))
    return found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]


def teach(client: Client, delays: Path, lengths: Sequence[int]) -> dict[int, list[int]]:
    """Have prompts in a fast tier, a length each, and the engine know what computing takes."""
    _slow_tier.set_delays(delays)
    known = {length: prompt(f"known {length}", length) for length in lengths}
    for tokens in (FILLER, *known.values()):
        store(client, tokens)
    for turn in range(8):
        for length in lengths:
            store(client, prompt(f"new {length} {turn}", length + 8 * turn))
    return known


def loads(client: Client) -> float:
    """How often the gate has chosen to load because that is faster."""
    name, metrics = "vllm:tiered_kv_gate_decisions_total", client.metrics()
    return sum(metrics.value(name, choice=c, reason="predicted") for c in ("all", "part"))


def sweep(
    client: Client,
    delays: Path,
    slowness: Sequence[float],
    lengths: Sequence[int],
    rounds: int,
    report: Report,
    tier: Tier = Tier.CPU,
) -> list[dict[str, Any]]:
    """Measure each speed; returns what was found, a row for each speed and length."""
    rng = random.Random(1)
    known = teach(client, delays, lengths)
    middle = lengths[len(lengths) // 2]
    computed = statistics.median(ask(client, known[middle], "never") for _ in range(5))
    chunk = computed / (middle / CHUNK)
    rows = []
    for factor in slowness:
        tier.slow_down(delays, factor * chunk)
        for _ in range(4):
            for tokens in known.values():
                tier.forget(client)
                ask(client, tokens, "measured")
        for length, tokens in known.items():
            samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
            before = loads(client)
            for turn in range(rounds):
                for i in range(len(ARMS)):
                    arm = ARMS[(turn + i) % len(ARMS)]
                    tier.forget(client)
                    samples[arm].append(ask(client, tokens, arm))
            loaded = loads(client) - before
            low, high = interval(samples, rng)
            row = {
                "slowness": factor,
                "length": length,
                "ratio": ratio(samples, range(rounds)),
                "low": low,
                "high": high,
                "loaded": loaded,
                **{arm: statistics.median(samples[arm]) for arm in ARMS},
            }
            rows.append(row)
            print(
                f"{factor:5.1f} x, {length:5d} tokens: measured {row['measured'] * 1e3:7.1f} ms, "
                f"always {row['always'] * 1e3:8.1f}, never {row['never'] * 1e3:7.1f}; "
                f"ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f}); loaded {loaded:.0f}/{rounds}",
                flush=True,
            )
            by_choice = loaded * row["always"] + (rounds - loaded) * row["never"]
            row["by_choice"] = by_choice / rounds / min(row["always"], row["never"])
            report.add(
                f"the same by choices, {factor:g} x, {length} tokens",
                "measured / better of both",
                [row["by_choice"]],
                "",
                goal=GOAL,
                at_most=True,
            )
            report.add(
                f"TTFT, tier {factor:g} x recompute, {length} tokens",
                "measured / better of both",
                [low, row["ratio"], high],
                "",
                goal=GOAL,
                at_most=True,
            )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few speeds, lengths and rounds")
    parser.add_argument("--tier", type=Tier, default=Tier.CPU, help="cpu or disk")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "models" / "llama-bench")
    args = parser.parse_args(argv)
    slowness, lengths = ((0.0, 1.0, 3.0), LENGTHS[1:4]) if args.quick else (SLOWNESS, LENGTHS)
    rounds = min(args.rounds, 5) if args.quick else args.rounds
    tier: Tier = args.tier
    report = Report("gate" if tier is Tier.CPU else "gate_disk")
    with tempfile.TemporaryDirectory() as folder:
        delays = Path(folder) / "delays"
        _slow_tier.set_delays(delays)
        model = build_model("llama-tiny", args.model, dtype="float32", seed=0)
        log = Path(folder) / "server.log"
        with server(model, delays, log, tier) as running, Client(running.url) as client:
            rows = sweep(client, delays, slowness, lengths, rounds, report, tier)
            for name, value in client.metrics().as_dict("vllm:tiered_kv_gate").items():
                if "_created" not in name and value:
                    print(f"{name.partition('engine=')[0]} ... {value:.3f}")
    report.finish()
    missed = [row for row in rows if row["low"] > GOAL]
    print(f"{len(rows) - len(missed)} of {len(rows)} within {GOAL} of the better, beyond noise")
    right = [row for row in rows if row["by_choice"] <= GOAL]
    print(f"{len(right)} of {len(rows)} within {GOAL} by the choices made")


if __name__ == "__main__":
    main()
