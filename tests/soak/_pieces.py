# SPDX-License-Identifier: Apache-2.0
"""A soak in pieces: each has a seed and a server of its own, and what was done is remembered."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.conftest import ROOT
from tests.engine._server import Pool, Running, leftovers, tiered
from tests.soak._faults import VARIABLE
from tests.soak._footprint import Footprint, footprint
from tests.soak._load import Load, wait_idle

MODELS = ("llama-tiny", "llama-tiny", "gemma3-tiny")
FAULT_RATE = 0.02
MEMORY_GROWTH_MIB = 48.0
"""What the second half of a piece may add: allocators and the server's own books."""
DISK_BYTES = 40 << 20
"""Of the folder that all pieces share, so that chunks are evicted."""
NON_FAULTS = (
    "copy_load",
    "copy_store",
    "disk_missing",
    "disk_read",
    "disk_write",
    "load_failed",
    "load_dropped",
    "load_late",
    "load_stale",
    "store",
)
"""Failure kinds that injected faults, deadlines and resets explain."""


_REPORTED = ("hit_tokens_total", "chunks_total", "failures_total")
_LABELS = re.compile(r'(engine|model_name)="[^"]*",?')


class Piece(msgspec.Struct, frozen=True):
    """What one piece did and found."""

    seed: int
    seconds: float
    model: str
    blocks: int
    capacity: str
    counts: dict[str, int]
    metrics: dict[str, float]
    middle: Footprint
    end: Footprint
    wrong: tuple[str, ...]


class Record(msgspec.Struct):
    """All pieces so far."""

    pieces: list[Piece] = []

    @classmethod
    def read(cls, path: Path) -> Record:
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else cls()

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(".new")
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))
        scratch.rename(path)

    @property
    def seconds(self) -> float:
        return sum(piece.seconds for piece in self.pieces)

    def summary(self) -> str:
        """One line for people."""
        total: dict[str, float] = {}
        for piece in self.pieces:
            for name, value in (*piece.counts.items(), *piece.metrics.items()):
                total[name] = total.get(name, 0) + value
        figures = ", ".join(f"{name} {value:.0f}" for name, value in sorted(total.items()))
        growth = [piece.end.memory_mib - piece.middle.memory_mib for piece in self.pieces]
        worst = max(growth, default=0.0)
        return (
            f"{len(self.pieces)} pieces, {self.seconds / 60:.0f} minutes: {figures}; "
            f"memory over the second half of a piece: at most {worst:+.1f} MiB"
        )


def soak(servers: Pool, path: Path, *, minutes: float, piece_minutes: float) -> Record:
    """Run pieces until so many minutes of load have been done in all, resuming ``path``.

    Stops early after a piece in which something was wrong.
    """
    record = Record.read(path)
    while record.seconds < minutes * 60 and not any(piece.wrong for piece in record.pieces):
        left = minutes * 60 - record.seconds
        seed = len(record.pieces) + 1
        folder = path.with_suffix(".kv")
        record.pieces.append(run_piece(servers, seed, min(left, piece_minutes * 60), folder))
        record.write(path)
        print(record.summary(), flush=True)
    return record


def run_piece(servers: Pool, seed: int, seconds: float, folder: Path) -> Piece:
    """One server under load for so many seconds, then looked at closely, then stopped."""
    rng = random.Random(seed)
    model = rng.choice(MODELS)
    blocks = rng.choice((20, 30, 48)) * (6 if model.startswith("gemma") else 1)
    capacity = rng.choice(("8MiB", "32MiB", "256MiB"))
    extra: dict[str, Any] = {
        "cpu": {"capacity": capacity},
        "load_deadline": rng.choice((0.05, 10.0)),
    }
    if with_disk := rng.random() < 0.75:
        extra["disk"] = {"path": str(folder), "capacity": DISK_BYTES, "min_free": 1}
    config: dict[str, Any] = {
        **tiered(extra),
        "kv_connector": "FaultyTieredKVConnector",
        "kv_connector_module_path": "tests.soak._faults",
    }
    before = leftovers()
    with servers.private(
        model,
        blocks=blocks,
        kv_transfer_config=config,
        env={
            VARIABLE: f"{seed}:{FAULT_RATE}",
            "PYTHONPATH": str(ROOT),
            # oneDNN keeps a compiled kernel for each of the last 1,024 shapes, half a gigabyte
            # after minutes of mixed lengths: it would hide what we leak.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        },
        args=["--max-num-seqs=4", "--max-model-len=2048"],
    ) as running:
        piece = _measure(
            running, seed, seconds, model, blocks, capacity, folder, external=not with_disk
        )
    on_disk = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    if with_disk and on_disk > DISK_BYTES:
        why = f"{on_disk} bytes in the folder"
        piece = msgspec.structs.replace(piece, wrong=(*piece.wrong, why))
    if left := leftovers() - before:
        piece = msgspec.structs.replace(piece, wrong=(*piece.wrong, f"left behind: {left}"))
    return piece


def _measure(
    running: Running,
    seed: int,
    seconds: float,
    model: str,
    blocks: int,
    capacity: str,
    folder: Path,
    *,
    external: bool,
) -> Piece:
    client, pid = running.client, running.server.pid
    started = time.monotonic()
    halves = [Load(client, 2 * seed + half, external=external) for half in (0, 1)]
    prints = []
    wrong: list[str] = []
    for load in halves:
        load.run(seconds / 2)
        wrong += load.wrong
        if not running.server.alive():
            wrong.append(f"the server died: {running.server.errors()}")
            break
        if (busy := wait_idle(client)) is not None:
            wrong.append(busy)
        prints.append(footprint(pid, folder))
    elapsed = time.monotonic() - started
    nothing = Footprint(0, 0.0, 0, 0)
    middle, end = [*prints, nothing, nothing][:2]
    metrics: dict[str, float] = {}
    if running.server.alive():
        wrong += _growth(middle, end)
        wrong += _pins(running)
        metrics = client.metrics().as_dict("vllm:tiered_kv")
        wrong += [
            f"failures: {name} {value:.0f}"
            for name, value in metrics.items()
            if "failures_total" in name and value and not any(k in name for k in NON_FAULTS)
        ]
    counts = {name: sum(load.counts[name] for load in halves) for name in halves[0].counts}
    figures = {
        _LABELS.sub("", name.removeprefix("vllm:tiered_kv_")): value
        for name, value in metrics.items()
        if value and name.removeprefix("vllm:tiered_kv_").startswith(_REPORTED)
    }
    return Piece(seed, elapsed, model, blocks, capacity, counts, figures, middle, end, tuple(wrong))


def _growth(middle: Footprint, end: Footprint) -> list[str]:
    found = []
    if end.memory_mib - middle.memory_mib > MEMORY_GROWTH_MIB:
        found.append(f"memory grew from {middle.memory_mib:.0f} to {end.memory_mib:.0f} MiB")
    # A few come and go with connections and thread pools.
    if end.threads - middle.threads > 8:
        found.append(f"threads grew from {middle.threads} to {end.threads}")
    if end.descriptors - middle.descriptors > 8:
        found.append(f"descriptors grew from {middle.descriptors} to {end.descriptors}")
    if end.processes != middle.processes:
        found.append(f"{middle.processes} processes, then {end.processes}")
    return found


def _pins(running: Running) -> list[str]:
    """A block or a slot that is still held shows when everything is emptied."""
    client = running.client
    if not client.reset_prefix_cache(external=True):
        return ["device blocks are held by nobody"]
    client.complete([9, 8, 9], max_tokens=1)
    usage = client.metrics().value("vllm:tiered_kv_usage_bytes", tier="cpu")
    return [f"{usage:.0f} bytes of the tier are still in use after a reset"] if usage else []
