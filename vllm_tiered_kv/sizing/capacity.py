# SPDX-License-Identifier: Apache-2.0
"""How many tokens and requests fit into memory of a given size."""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.sizing.layers import Footprint, Shape
from vllm_tiered_kv.sizing.units import show_bytes


class Device(msgspec.Struct, frozen=True):
    """What each of the GPUs that share a model has for it."""

    memory: int
    """Bytes of one GPU."""
    utilisation: float
    """Share of it that vLLM takes (``--gpu-memory-utilization``)."""
    weights: int
    """Bytes of all weights, divided over the GPUs."""
    tp: int

    @property
    def free(self) -> int:
        """Bytes left on one GPU for KV, at most: activations and graphs come out of it too."""
        return max(0, int(self.memory * self.utilisation) - -(-self.weights // self.tp))


def note_of_weights(device: Device) -> str:
    """For a device on which nothing is free."""
    gpus = "one GPU" if device.tp == 1 else f"{device.tp} GPUs"
    return (
        f"the weights, {show_bytes(device.weights)}, do not fit {gpus} of "
        f"{show_bytes(device.memory)} x {device.utilisation:g}"
    )


def requests_that_fit(shape: Shape, device: Device, tokens: int) -> int:
    """Requests of ``tokens`` tokens whose KV is on the GPUs at the same time.

    Raises:
        SizingError: the layers cannot be divided over that many GPUs.
    """
    needed = shape.on_rank(device.tp).request_bytes(tokens)
    return device.free // needed if needed else 0


def tokens_that_fit(footprint: Footprint, capacity: int) -> int:
    """Tokens of one long prefix that a tier of ``capacity`` bytes holds; 0 where none has KV."""
    rate = footprint.tier_bytes_per_token
    return max(0, capacity - footprint.state_bytes) // rate if rate else 0


def conversations_that_fit(footprint: Footprint, capacity: int, tokens: int) -> int:
    """Conversations of ``tokens`` tokens, none of which are shared, that a tier holds."""
    needed = footprint.stored_bytes(tokens)
    return capacity // needed if needed else 0
