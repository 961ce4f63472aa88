# SPDX-License-Identifier: Apache-2.0
"""One rank: real device pages, the real worker half, and the forward pass of the arithmetic."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.outputs import KVConnectorOutput

from tests.scheduler.tokens import BLOCK, LAYERS, MASK, STATE, layer_keys
from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector


class Runner(enum.Enum):
    """In which order the runner calls the hooks that end a step."""

    SAVE_FIRST = "save first"  # V2, and V1 without draft tokens
    RESULTS_FIRST = "results first"  # V1 with draft tokens
    NO_SAVE = "no save"  # V1 with draft tokens, on all but a pipeline's last stage


class WrongBytes(AssertionError):
    """A page does not hold what was computed for its place."""


def tiered(connector: Any) -> Any:
    """Our connector, alone or among the children of vLLM's."""
    if isinstance(connector, MultiConnector):
        return next(c for c in connector.sub_connectors if isinstance(c, TieredKVConnector))
    return connector


class Rank:
    """Device pages and a worker connector.

    Args:
        windows: for each KV cache group the sliding window, 0, or STATE.
        runner: the order of the hooks.
    """

    def __init__(
        self, number: int, windows: Sequence[int], num_blocks: int, runner: Runner
    ) -> None:
        self.number = number
        self.windows = windows
        self.runner = runner
        self.memory = torch.randint(1, MASK, (LAYERS, num_blocks, BLOCK), dtype=torch.int64)
        self.values = self.memory.numpy().reshape(LAYERS, num_blocks * BLOCK)
        self.connector: Any = None
        self.tiered: TieredKVConnector | None = None
        self.set_version(0)

    def set_version(self, version: int) -> None:
        """Other weights: the same prefix leaves other numbers."""
        self.keys = layer_keys(len(self.windows), self.number, version)

    def connect(self, vllm_config: Any, kv_cache_config: Any) -> None:
        kind = MultiConnector if _is_multi(vllm_config) else TieredKVConnector
        vllm_config.parallel_config.rank = self.number
        self.connector = kind(vllm_config, compat.KVConnectorRole.WORKER, kv_cache_config)
        vllm_config.parallel_config.rank = 0
        self.tiered = tiered(self.connector)

    def register(self) -> None:
        num_blocks = self.memory.shape[1]
        self.connector.register_kv_caches(
            {
                f"group{g}.layer{i}": self.memory[i].view(num_blocks, 1, BLOCK, 1)
                for g in range(len(self.windows))
                for i in range(LAYERS)
            }
        )

    # -- a step ------------------------------------------------------------------------

    def begin(self, meta: Any) -> None:
        if self.connector is not None:
            self.connector.handle_preemptions(meta)
            self.connector.bind_connector_metadata(meta)

    def forward(
        self, tables: Sequence[Sequence[int]], names: Sequence[int], start: int, who: str
    ) -> None:
        """Check every number that is read, then leave those of ``names[start:]``."""
        end = len(names)
        numbers = np.array(names, dtype=np.int64)
        for group, window in enumerate(self.windows):
            if window == STATE:
                self._advance_state(group, tables[group], numbers, start, who)
                continue
            first = max(0, start - window + 1) if window else 0
            at = places(tables[group], first, end)
            read = at[: start - first]
            if not self.holds(group, read, numbers[first:start]):
                raise WrongBytes(f"{who}: tokens {first}..{start} of group {group}, {self.number}")
            self.fill(group, at[start - first :], numbers[start:])

    def _advance_state(
        self, group: int, table: Sequence[int], numbers: np.ndarray, start: int, who: str
    ) -> None:
        """Go on from the state after ``start`` tokens in the block where the last token lies.

        A state names the prefix it has seen in all of its page.
        """
        if start:
            before = places([*table], *_page((start - 1) // BLOCK))
            if not self.holds(group, before, np.repeat(numbers[start - 1], BLOCK)):
                raise WrongBytes(f"{who}: the state after {start} tokens, {group}, {self.number}")
        after = places([*table], *_page((len(numbers) - 1) // BLOCK))
        self.fill(group, after, np.repeat(numbers[-1], BLOCK))

    def zero(self, blocks: Sequence[int]) -> None:
        """What runners do with blocks that are handed out to layers that keep states."""
        self.memory[:, list(blocks)] = 0

    def holds(self, group: int, at: np.ndarray, numbers: np.ndarray) -> bool:
        want = numbers[None, :] ^ self.keys[group][:, None]
        return bool(np.array_equal(self.values[:, at], want))

    def fill(self, group: int, at: np.ndarray, numbers: np.ndarray) -> None:
        self.values[:, at] = numbers[None, :] ^ self.keys[group][:, None]

    def end(self, finished: set[str]) -> KVConnectorOutput | None:
        if self.connector is None:
            return None
        worker = self.connector
        kv = KVConnectorOutput()
        worker.start_load_kv(None)
        if self.runner is Runner.SAVE_FIRST:
            worker.wait_for_save()
        results = worker.get_transfer_results(finished)
        kv.finished_sending = results.finished_sending
        kv.finished_recving = results.finished_recving
        kv.failed_recving = results.failed_recving
        kv.invalid_block_ids = worker.get_block_ids_with_load_errors()
        kv.kv_connector_stats = worker.get_kv_connector_stats()
        kv.kv_connector_worker_meta = worker.build_connector_worker_meta()
        if self.runner is Runner.RESULTS_FIRST:
            worker.wait_for_save()
        if self.runner is not Runner.NO_SAVE:
            worker.clear_connector_metadata()
        return kv


def _page(index: int) -> tuple[int, int]:
    return index * BLOCK, (index + 1) * BLOCK


def places(table: Sequence[int], first: int, end: int) -> np.ndarray:
    """Where tokens ``first..end`` lie in a layer's pages."""
    position = np.arange(first, end)
    return np.asarray(table, dtype=np.int64)[position // BLOCK] * BLOCK + position % BLOCK


def _is_multi(vllm_config: Any) -> bool:
    return bool(vllm_config.kv_transfer_config.kv_connector == "MultiConnector")
