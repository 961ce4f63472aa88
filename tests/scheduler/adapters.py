# SPDX-License-Identifier: Apache-2.0
"""The simulated engine with LoRA adapters: what is computed depends on the weights loaded then."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from tests.scheduler.audit import Audit
from tests.scheduler.sim import Sim
from tests.scheduler.tokens import BLOCK, prefix_names
from tests.scheduler.worker import Row, Stream, Streams


def loaded(number: int, weights: int) -> LoRAModel:
    """vLLM's object for an adapter in memory; the same ``weights`` are the same content."""
    tensor = torch.full((4, 8), float(weights))
    layer = LoRALayerWeights("layers.0.qkv_proj", 4, 8, tensor, tensor.T.contiguous())
    return LoRAModel(number, 4, {"layers.0.qkv_proj": layer})


class AdapterSim(Sim):
    """One engine; ``weights`` is a number that names what an adapter holds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.adapters: dict[int, LoRAModel] = {}
        """What the rank has in memory."""
        self.weights: dict[int, int] = {}
        self.stale: dict[str, int] = {}
        self.contents: dict[str, bytes] = {}
        assert self.worker is not None
        self.worker._worker.adapters.registered = lambda: self.adapters
        self.streams = _Streams(self)
        self.audit = _Audit(self)

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        stale: int = 0,
        **options: Any,
    ) -> None:
        """Hand in a request.

        Args:
            stale: the weights of what vLLM's device cache will find for it, where that is not
                to be told from its own by name and path.
        """
        if stale:
            self.stale[request_id] = stale
        super().add(request_id, prompt, max_tokens, **options)

    def load_adapter(self, number: int, weights: int) -> None:
        """What vLLM's worker does when told to load an adapter, or to load it again in place."""
        self.adapters[number] = loaded(number, weights)
        self.weights[number] = weights

    def adapter_of(self, request_id: str) -> LoRARequest | None:
        return self.requests[request_id].lora_request


class _Streams(Streams):
    """Names prefixes also by the weights they are computed with."""

    def __init__(self, sim: AdapterSim) -> None:
        super().__init__(0, 0, asynchronous=sim.depth > 1)
        self._sim = sim
        self._tokens: dict[str, list[int]] = {}
        self._named_with: dict[str, int] = {}

    def run(self, number: int, row: Row) -> tuple[int, list[int], list[int]]:
        sim, request_id = self._sim, row.request_id
        lora = sim.adapter_of(request_id)
        if lora is None:
            return super().run(number, row)
        weights = sim.weights[lora.lora_int_id]
        if row.tokens is not None:
            found = sim.stale.pop(request_id, weights) if row.start else weights
            self._streams[request_id] = Stream(row.tokens, row.salt)
            self._streams[request_id].names = prefix_names(row.tokens, _root(row.salt, found))
            self._tokens[request_id] = list(row.tokens)
            self._named_with[request_id] = found
        names = self._streams[request_id].names
        if self._named_with[request_id] != weights:
            # From here on it is another model that goes on from what is there.
            before = names[row.start - 1] if row.start else row.salt
            rest = self._tokens[request_id][row.start :]
            names[row.start :] = prefix_names(rest, _root(before, weights))
            self._named_with[request_id] = weights
        state = sim.half._requests.get(request_id)
        if state is not None and state.content is not None:
            sim.contents[request_id] = state.content.digest
        result = super().run(number, dataclasses.replace(row, tokens=None))
        self._tokens[request_id] += result[2]
        return result


def _root(before: object, weights: int) -> str:
    return f"{before} computed with {weights}"


class _Audit(Audit):
    """Knows chunks by the weights in their keys; what vLLM's own cache serves is vLLM's."""

    def check_device(self) -> None:
        pass

    def _name_blocks(self) -> None:
        for request_id, request in self._sim.requests.items():
            stream = self._sim.streams._streams.get(request_id)
            if stream is None:
                continue
            content = self._sim.contents.get(request_id, b"")
            keys = [block_hash + content for block_hash in request.block_hashes]
            for i, key in enumerate(keys):
                names = stream.names[i * BLOCK : (i + 1) * BLOCK]
                self._blocks[key] = np.array(names, dtype=np.int64)
                self._chains[key] = tuple(keys[: i + 1])
