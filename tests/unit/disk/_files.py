# SPDX-License-Identifier: Apache-2.0
"""Chunks to keep, a `Files` whose calls can be seen and fail, and what is left on disk."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_tiered_kv.tiers.disk.direct import IoMode, aligned_buffer, probe
from vllm_tiered_kv.tiers.disk.files import Files
from vllm_tiered_kv.tiers.disk.format import ChunkFacts, padded
from vllm_tiered_kv.tiers.disk.store import RankFolder, Read, Written

NAMESPACE = f"{'0123456789abcdef' * 2}-{'fedcba9876543210' * 2}"
KEY = bytes(range(32))
NBYTES = 3 * 4096 + 100
FACTS = ChunkFacts((KEY, b"\xff" * 32), 2, 7, 32)
USED_NS = 1_700_000_000_123_456_789

CALLS = (
    *("open", "close", "fstat", "stat", "preadv", "pwritev", "rename", "unlink", "rmdir"),
    *("mkdir", "scandir", "utime", "statvfs", "fadvise"),
)


class WatchedFiles(Files):
    """Keeps the name and the thread of each call. `fault(number, name)` may give an errno."""

    def __init__(self, fault: Callable[[int, str], int | None] = lambda number, name: None) -> None:
        self.calls: list[tuple[str, int]] = []
        self.fault = fault

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def _watched(name: str) -> Callable[..., Any]:
    def call(self: WatchedFiles, *args: Any, **kwargs: Any) -> Any:
        code = self.fault(len(self.calls), name)
        self.calls.append((name, threading.get_ident()))
        if code is None:
            return getattr(super(WatchedFiles, self), name)(*args, **kwargs)
        if name == "close":  # a descriptor is closed whatever close() says
            super(WatchedFiles, self).close(*args)
        raise OSError(code, os.strerror(code))

    return call


for _name in CALLS:
    setattr(WatchedFiles, _name, _watched(_name))


opened: list[RankFolder] = []


def payload_of(key: bytes, nbytes: int = NBYTES) -> bytes:
    """Bytes that only this key has."""
    return random.Random(key).randbytes(nbytes)


def rank_folder(
    root: Path,
    *,
    files: Files | None = None,
    mode: IoMode = IoMode.BUFFERED,
    namespace: str = NAMESPACE,
    rank: int = 0,
) -> RankFolder:
    """Closed at the test's end."""
    folder = RankFolder(root, namespace, rank, files=files or Files(), mode=mode)
    opened.append(folder)
    return folder


def mode_of(root: Path) -> IoMode:
    return probe(Files(), root, NAMESPACE, 0)


def write(
    folder: RankFolder, key: bytes = KEY, group: int = 0, nbytes: int = NBYTES, **changes: Any
) -> Written:
    view = aligned_buffer(padded(nbytes))
    view[:] = b"\xee" * view.nbytes
    view[:nbytes] = changes.pop("payload", payload_of(key, nbytes))
    wanted = {"facts": FACTS, "used_ns": USED_NS, **changes}
    return folder.write(key, group, view, nbytes, **wanted)


def read(
    folder: RankFolder, key: bytes = KEY, group: int = 0, nbytes: int = NBYTES
) -> tuple[Read, bytes]:
    """Also the payload that came with it."""
    view = aligned_buffer(padded(nbytes))
    result = folder.read(key, group, view, nbytes)
    return result, bytes(view[:nbytes])


def path_of(
    root: Path, key: bytes = KEY, group: int = 0, *, rank: int = 0, namespace: str = NAMESPACE
) -> Path:
    return root / namespace / f"r{rank}" / key.hex()[:2] / f"{key.hex()}.{group}.kv"


def temp_files(root: Path) -> list[Path]:
    return list(root.glob("*/*/tmp/*"))


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
