# SPDX-License-Identifier: Apache-2.0
"""Small models on disk and their digests."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from vllm_tiered_kv.identity.hashing import FileHasher
from vllm_tiered_kv.identity.memory import DigestMemory
from vllm_tiered_kv.identity.namespace import Established, WeightsResult
from vllm_tiered_kv.identity.sources import Plan, Source
from vllm_tiered_kv.identity.weights import WeightsDigester

WEIGHTS = os.urandom(100_000)
DEADLINE = 30.0


def make_model(folder: Path, **files: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"model.safetensors": WEIGHTS, "modeling.py": b"x = 1\n", "config.json": b"{}"}
    for name, data in {**contents, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def result(*models: Path | str, load_format: str = "auto", **options: Any) -> WeightsResult:
    plan = Plan(tuple(Source(str(model), load_format, **options) for model in models))
    return WeightsDigester(plan).result()


def digest_of(*models: Path | str, **options: Any) -> str:
    found = result(*models, **options)
    assert isinstance(found, Established), found
    return found.digest


def rewrite(path: Path, data: bytes) -> None:
    """Change a file in place, keeping its modification time, once its clock has moved on."""
    before = path.stat()
    give_up = time.monotonic() + DEADLINE
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with path.open("r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert time.monotonic() < give_up
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


class Hasher(FileHasher):
    """Touches a file after each of the first ``changes`` reads."""

    def __init__(self, changes: int) -> None:
        super().__init__(DigestMemory.default(), threading.Event())
        self.changes, self.reads = changes, 0

    def _read(self, path: Path) -> str:
        found = super()._read(path)
        self.reads += 1
        if self.reads <= self.changes:
            rewrite(path, os.urandom(8))
        return found


# What counts
