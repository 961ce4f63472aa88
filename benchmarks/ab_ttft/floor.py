# SPDX-License-Identifier: Apache-2.0
"""The least a load from host memory can cost: one copy of the bytes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

_COPIES = 4


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


def kv_bytes_per_token(model: Path) -> int:
    """KV cache bytes of one token, all layers, for a model stored in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    width = config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * 2 * width * 2)
