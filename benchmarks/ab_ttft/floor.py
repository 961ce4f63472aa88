# SPDX-License-Identifier: Apache-2.0
"""The least a load can cost: one copy of the bytes, or one read of them from the disk."""

from __future__ import annotations

import functools
import json
import mmap
import os
import time
from pathlib import Path

import numpy as np

from benchmarks._threads import in_threads

_COPIES = 4
_READERS = 4
_PIECE = 1 << 20


class Memcpy:
    """Times single-threaded copies between buffers that were not touched just before.

    Args:
        largest: bytes of the longest copy asked for.
    """

    def __init__(self, largest: int) -> None:
        self._source = np.frombuffer(
            np.random.default_rng(0).bytes(largest * _COPIES), dtype=np.uint8
        ).reshape(_COPIES, largest)
        self._target = np.ones_like(self._source)  # written, so that its pages are there
        self._next = 0

    def seconds(self, size: int) -> float:
        """Time of one copy of ``size`` bytes."""
        index, self._next = self._next, (self._next + 1) % _COPIES
        source, target = self._source[index, :size], self._target[index, :size]
        started = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - started


class DiskRead:
    """Times reads of one large file past the page cache, by a few threads. A context manager.

    Args:
        folder: on the disk to measure.
        largest: bytes of the longest read asked for.

    Raises:
        OSError: no file can be written there, or it cannot be read with ``O_DIRECT``.
    """

    def __init__(self, folder: Path, largest: int) -> None:
        pieces = -(-largest // (_READERS * _PIECE)) * _READERS
        self._path = folder / "disk-read"
        with self._path.open("wb") as file:
            for _ in range(pieces):
                file.write(os.urandom(_PIECE))
            os.fsync(file.fileno())
        self._fd = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
        mapping = mmap.mmap(-1, pieces * _PIECE)
        mapping.write(bytes(pieces * _PIECE))  # so that its pages are there
        self._target = memoryview(mapping)

    def __enter__(self) -> DiskRead:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._path.unlink()

    def seconds(self, size: int) -> float:
        """Time until ``size`` bytes, rounded up to whole pieces for every reader, are there."""
        share = -(-size // (_READERS * _PIECE)) * _PIECE
        return in_threads(
            [functools.partial(self._read, n * share, share) for n in range(_READERS)]
        )

    def _read(self, start: int, count: int) -> None:
        for offset in range(start, start + count, _PIECE):
            got = os.preadv(self._fd, [self._target[offset : offset + _PIECE]], offset)
            if got != _PIECE:
                raise OSError(f"{self._path}: a read of {_PIECE} bytes gave {got}")


def kv_bytes_per_token(model: Path) -> int:
    """KV cache bytes of one token, all layers, for a model stored in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * 2 * width * 2)
