# SPDX-License-Identifier: Apache-2.0
"""The digest of a LoRA adapter as it lies in a worker's memory.

Not of the files it came from: those may have changed since they were read, and nobody tells
us when that was. What is digested here is what the engine computes with.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_tiered_kv.identity.hashing import Cancelled

Registered = Callable[[], Mapping[int, object]]
"""The adapters in a worker's memory now, by number; looking does not count as use."""
DIGEST_BYTES = 32
_MAX_DEPTH = 8
_LEFT_OUT = frozenset({"id"})
"""The number an adapter happens to have in this process."""


class Opaque(Exception):
    """Something in the adapter whose content cannot be read; the message says what."""


def adapter_digest(adapter: object, cancelled: threading.Event) -> bytes:
    """SHA-256 over every tensor and number of an adapter, in the order of their names.

    Args:
        adapter: vLLM's object; read by its attributes, whatever they are.
        cancelled: set it to stop before the next tensor.

    Returns:
        32 bytes, equal in every process that has loaded the same adapter.

    Raises:
        Cancelled: on request.
        Opaque: an attribute that is neither tensor, number, text nor a container of these.
    """
    hasher = hashlib.sha256()
    _feed(hasher, adapter, cancelled, _MAX_DEPTH)
    return hasher.digest()


def _feed(hasher: Any, value: object, cancelled: threading.Event, depth: int) -> None:
    """Feed one value, its kind and length first: no two values give the same bytes."""
    if depth == 0:
        raise Opaque("an adapter nested too deeply")
    if isinstance(value, torch.Tensor):
        if cancelled.is_set():
            raise Cancelled
        _label(hasher, f"tensor {value.dtype} {tuple(value.shape)}")
        if value.numel():
            flat = value.detach().cpu().contiguous().flatten()
            hasher.update(memoryview(flat.view(torch.uint8).numpy()))
    elif value is None or isinstance(value, (bool, int, float, str)):
        _label(hasher, f"{type(value).__name__} {value!r}")
    elif isinstance(value, (list, tuple)):
        _label(hasher, f"list {len(value)}")
        for item in value:
            _feed(hasher, item, cancelled, depth - 1)
    elif isinstance(value, Mapping):
        _label(hasher, f"map {len(value)}")
        for name in sorted(value, key=str):
            _label(hasher, str(name))
            _feed(hasher, value[name], cancelled, depth - 1)
    elif hasattr(value, "__dict__") and not callable(value):
        _label(hasher, type(value).__name__)
        fields = {name: part for name, part in vars(value).items() if name not in _LEFT_OUT}
        _feed(hasher, fields, cancelled, depth - 1)
    else:
        raise Opaque(f"a {type(value).__name__} in an adapter has no digest")


def _label(hasher: Any, text: str) -> None:
    data = text.encode()
    hasher.update(len(data).to_bytes(8, "little"))
    hasher.update(data)
