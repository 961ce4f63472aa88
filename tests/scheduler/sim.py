# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler and block pool with our real halves, around a model that is arithmetic.

The device pages are real tensors. The "model" writes into each token's place in each layer a
number that names the whole prefix up to that token (and the layer), and before it reads a
context it checks every number in it. So a wrong byte, loaded or stored, is found in the step
in which it would have been used.
"""

from __future__ import annotations

import functools
import json
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector
from vllm_tiered_kv.scheduler.index import ABSENT, NodeState
from vllm_tiered_kv.worker.copy import open_copier

BLOCK = 16
LAYERS = 3
MASK = (1 << 62) - 1
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@functools.cache
def model_folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="tiered-kv-sim-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def prefix_names(tokens: Sequence[int], salt: str | None) -> list[int]:
    """For each token a number that names the prefix which ends with it."""
    name = hash(("salt", salt)) & MASK
    names = []
    for token in tokens:
        name = (name * 6364136223846793005 + token + 1442695040888963407) & MASK
        names.append(name)
    return names


def layer_value(name: int, layer: int) -> int:
    return name ^ (layer * 0x9E3779B97F4A7C1)


class WrongBytes(AssertionError):
    """A page does not hold what was computed for its place."""


class Gate:
    """Stands between the lanes and the copier: holds, fails and counts copies."""

    def __init__(self) -> None:
        self._open = {"store": threading.Event(), "load": threading.Event()}
        self.entered = {"store": threading.Event(), "load": threading.Event()}
        for event in self._open.values():
            event.set()
        self.fail: set[str] = set()

    def hold(self, direction: str) -> None:
        self.entered[direction].clear()
        self._open[direction].clear()

    def release(self, direction: str) -> None:
        self._open[direction].set()

    def wrap(self, groups: Any, pool: Any) -> Any:
        inner = open_copier(groups, pool)
        gate = self

        class Gated:
            def mark(self) -> Any:
                return inner.mark()

            def submit(self, direction: Any, copies: Any, after: Any) -> Any:
                gate.entered[direction.value].set()
                if not gate._open[direction.value].wait(30):
                    raise TimeoutError("the gate was never opened")
                if direction.value in gate.fail:
                    raise RuntimeError("injected copy failure")
                return inner.submit(direction, copies, after)

            def close(self) -> None:
                inner.close()

        return Gated()


class Sim:
    """One engine.

    Args:
        windows: for each KV cache group the sliding window, or 0 for full attention.
        num_blocks: device blocks.
        capacity_chunks: slots of the CPU tier.
        chunk_blocks: blocks a chunk.
        depth: steps in flight; 2 is vLLM's asynchronous scheduling.
    """

    def __init__(
        self,
        *,
        windows: Sequence[int] = (0,),
        num_blocks: int = 64,
        capacity_chunks: int = 256,
        chunk_blocks: int = 1,
        depth: int = 1,
        results_before_save: bool = False,
        extra: dict[str, Any] | None = None,
        policy: str = "recompute",
        connector: bool = True,
        **engine: Any,
    ) -> None:
        self.depth = depth
        self.results_before_save = results_before_save
        self.gate = Gate()
        self.vllm_config = EngineArgs(
            model=model_folder(),
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=engine.pop("max_model_len", 4096),
            max_num_batched_tokens=engine.pop("max_num_batched_tokens", 256),
            max_num_seqs=engine.pop("max_num_seqs", 8),
            async_scheduling=depth > 1,
            enable_prefix_caching=engine.pop("enable_prefix_caching", True),
            num_gpu_blocks_override=num_blocks,
            kv_transfer_config={
                "kv_connector": "TieredKVConnector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": {
                    "cpu": {"capacity": 4096 * capacity_chunks},
                    "chunk_tokens": BLOCK * chunk_blocks,
                    **(extra or {}),
                },
            }
            if connector
            else None,
            **engine,
        ).create_engine_config()
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.kv_cache_config, self.pages = self._cache(windows, num_blocks)
        self.windows = windows
        cls = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = cls(
            self.vllm_config,
            self.kv_cache_config,
            StructuredOutputManager(self.vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.worker: TieredKVConnector | None = None
        if connector:
            self.worker = TieredKVConnector(
                self.vllm_config, compat.KVConnectorRole.WORKER, self.kv_cache_config
            )
            self.worker._worker._open_copier = self.gate.wrap
            self.worker.register_kv_caches(
                {name: t.view(num_blocks, 1, BLOCK, 1) for name, t in self.pages.items()}
            )
        self.tokens: dict[str, list[int]] = {}
        self.names: dict[str, list[int]] = {}
        self.salts: dict[str, str | None] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.device_hits = 0
        self.external_hits = 0
        self.sources: dict[Any, int] = {}
        self.requests: dict[str, Request] = {}
        self.free_at_start = self.free_blocks

    def _cache(
        self, windows: Sequence[int], num_blocks: int
    ) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
        common: dict[str, Any] = {
            "block_size": BLOCK,
            "num_kv_heads": 1,
            "head_size": 1,
            "dtype": torch.float32,
        }
        groups, tensors, pages = [], [], {}
        shared = [
            torch.randint(1, MASK, (num_blocks, BLOCK), dtype=torch.int64) for _ in range(LAYERS)
        ]
        for g, window in enumerate(windows):
            spec = (
                SlidingWindowSpec(sliding_window=window, **common)
                if window
                else FullAttentionSpec(**common)
            )
            names = [f"group{g}.layer{i}" for i in range(LAYERS)]
            groups.append(KVCacheGroupSpec(names, spec))
            pages.update(zip(names, shared, strict=True))
        size = num_blocks * BLOCK * 8
        for i in range(LAYERS):
            layers = [f"group{g}.layer{i}" for g in range(len(windows))]
            for layer in layers:
                tensors.append(KVCacheTensor(size, [layer], size, BLOCK * 8))
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups
        )
        return config, pages

    # -- what a client does ------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        salt: str | None = None,
        params: Any = None,
        prompt_logprobs: int | None = None,
        priority: int = 0,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            cache_salt=salt,
            priority=priority,
            block_hasher=self.hasher,
        )
        self.tokens[request_id] = list(prompt)
        self.salts[request_id] = salt
        self.names[request_id] = prefix_names(prompt, salt)
        self.outputs[request_id] = []
        self.requests[request_id] = request
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished.add(request_id)

    # -- the engine's loop ---------------------------------------------------------

    def step(self) -> Any:
        """Schedule and execute one step; take in the output of the one ``depth`` before."""
        output = self.scheduler.schedule()
        self._in_flight.append((output, self._execute(output)))
        if len(self._in_flight) >= self.depth:
            self.process()
        return output

    def process(self) -> None:
        """Take in the oldest step's output."""
        output, model_output = self._in_flight.popleft()
        results = self.scheduler.update_from_output(output, model_output)
        for result in results.values():
            stats = result.scheduler_stats
            if stats is None:
                continue
            self.device_hits += stats.prefix_cache_stats.hits
            if stats.connector_prefix_cache_stats is not None:
                self.external_hits += stats.connector_prefix_cache_stats.hits
                for source, tokens in stats.connector_prefix_cache_stats.hits_by_source.items():
                    self.sources[source] = self.sources.get(source, 0) + tokens
            if stats.kv_connector_stats:
                self._count(stats.kv_connector_stats)

    def stalled_by_vllm(self) -> str | None:
        """The request at which vLLM's scan stops for good, if that is why nothing moves.

        vLLM 0.32 frees the blocks of a request whose load failed only when its scan comes to
        it, and the scan stops at the first request that does not fit. Two failed loads on a
        device too small for both can so block each other; a connector has no part in that.
        """
        scheduler = self.scheduler
        failed = scheduler.failed_recving_kv_req_ids & scheduler.finished_recving_kv_req_ids
        if scheduler.running or not failed or self.half.core.ledger.loads:
            return None
        head = next(iter(scheduler.kv_holding_waiting), None)
        return None if head is None or head.request_id in failed else head.request_id

    def run(self, limit: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self._in_flight:
                return
            if self.scheduler.has_requests():
                output = self.step()
                if not output.total_num_scheduled_tokens:
                    time.sleep(0.0005)  # as vLLM's loop does, for the transfer threads
            else:
                self.process()
        raise AssertionError(f"the engine made no end in {limit} steps")

    def complete(
        self, request_id: str, prompt: Sequence[int], max_tokens: int = 1, **kw: Any
    ) -> Any:
        """Run one request alone; returns its hit: (device tokens, CPU tokens)."""
        before = (self.device_hits, self.hit_tokens)
        self.add(request_id, prompt, max_tokens, **kw)
        self.run()
        return SimpleNamespace(
            device=self.device_hits - before[0],
            cpu=self.hit_tokens - before[1],
            output=self.outputs[request_id],
        )

    def settle(self) -> None:
        """Wait until the ranks have ended all jobs and the scheduler half knows it."""
        if self.connector is None:
            return
        deadline = time.monotonic() + 20
        while self.half.core.ledger.stores or self.half.core.ledger.loads:
            self.half.drain()
            if time.monotonic() > deadline:
                raise AssertionError("jobs did not end")
            time.sleep(0.001)
            if self.half.core.ledger.stores:
                self.step()
        self._collect()

    def flush_device(self) -> None:
        """Empty the device's prefix cache, not the connector's."""
        assert self.scheduler.reset_prefix_cache(), "blocks are still held"

    def close(self) -> None:
        for direction in ("store", "load"):
            self.gate.release(direction)
        if self.worker is not None:
            self.worker.shutdown()
        self.scheduler.shutdown()

    # -- what can be seen ------------------------------------------------------------

    @property
    def half(self) -> Any:
        return self.connector._scheduler

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def hit_tokens(self) -> float:
        return self.counter("hit_tokens", "cpu")

    def counter(self, *key: str) -> float:
        self._collect()
        return self.counters.get("|".join(key), 0)

    def check_quiet(self) -> None:
        """Nothing is leaked once all requests are done."""
        self.settle()
        assert self.free_blocks == self.free_at_start
        if self.connector is not None:
            assert self.counter("failures", "internal") == 0
            assert self.half.core.index.pinned == 0
            assert not self.half._requests
            assert not self.half.loads._loading
            assert not self.half.core.ledger._readers
            self.check_pool()

    def check_pool(self) -> None:
        """Every chunk that is offered holds what was computed for it."""
        worker = self.worker._worker
        if worker._pool is None:
            return
        per_chunk = self.half.core.geometry.chunk_tokens // BLOCK
        prefix_of = {
            key: self.names[request_id][: (i + 1) * BLOCK]
            for request_id, request in self.requests.items()
            for i, key in enumerate(request.block_hashes)
        }
        for key, node in self.half.core.index._nodes.items():
            if node.state is not NodeState.READY:
                continue
            names = prefix_of[key]
            for slot in node.slots:
                if slot == ABSENT:
                    continue
                start = slot * worker._slot_bytes
                size = per_chunk * LAYERS * BLOCK * 8
                image = worker._pool.tensor[start : start + size].view(torch.int64)
                image = image.view(per_chunk, LAYERS, BLOCK)
                for layer in range(LAYERS):
                    want = [layer_value(n, layer) for n in names[-per_chunk * BLOCK :]]
                    if image[:, layer].flatten().tolist() != want:
                        raise WrongBytes(f"slot {slot}, layer {layer}")

    # -- the stand-in for the model ------------------------------------------------------

    def _collect(self) -> None:
        if self.connector is None:
            return
        if (stats := self.half.take_stats()) is not None:
            self._count(stats.data)

    def _count(self, data: dict[str, Any]) -> None:
        for key, value in data["counters"].items():
            self.counters[key] = self.counters.get(key, 0) + value
        self.gauges.update(data["gauges"])

    def _execute(self, output: Any) -> ModelRunnerOutput:
        meta = output.kv_connector_metadata
        if self.worker is not None:
            self.worker.handle_preemptions(meta)
            self.worker.bind_connector_metadata(meta)
        req_ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in req_ids:
            sampled.append(self._forward(request_id, output.num_scheduled_tokens[request_id]))
        result = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={r: i for i, r in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )
        if self.worker is not None:
            result.kv_connector_output = self._connector_output(output)
        return result

    def _connector_output(self, output: Any) -> KVConnectorOutput:
        worker = self.worker
        kv = KVConnectorOutput()
        worker.start_load_kv(None)
        if not self.results_before_save:
            worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        kv.finished_sending = results.finished_sending
        kv.finished_recving = results.finished_recving
        kv.failed_recving = results.failed_recving
        kv.invalid_block_ids = worker.get_block_ids_with_load_errors()
        kv.kv_connector_stats = worker.get_kv_connector_stats()
        if self.results_before_save:
            worker.wait_for_save()
        kv.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return kv

    def _forward(self, request_id: str, scheduled: int) -> list[int]:
        request = self.scheduler.requests[request_id]
        # schedule() has already advanced the count by what it scheduled
        start = request.num_computed_tokens - scheduled
        tokens, names = self.tokens[request_id], self.names[request_id]
        end = start + scheduled
        assert end <= len(tokens), (request_id, start, scheduled, len(tokens))
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        for g, window in enumerate(self.windows):
            first = max(0, start - window + 1) if window else 0
            for layer in range(LAYERS):
                page = self.pages[f"group{g}.layer{layer}"]
                self._check(page, tables[g], names, first, start, layer, request_id)
                for block in range(start // BLOCK, -(-end // BLOCK)):
                    a, b = max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
                    values = [layer_value(n, layer) for n in names[a:b]]
                    page[tables[g][block], a % BLOCK : a % BLOCK + b - a] = torch.tensor(values)
        if end < len(tokens):
            return []
        token = names[end - 1] % 1000 + 3
        tokens.append(token)
        names.append((names[-1] * 6364136223846793005 + token + 1442695040888963407) & MASK)
        self.outputs[request_id].append(token)
        return [token]

    def _check(
        self,
        page: torch.Tensor,
        table: Sequence[int],
        names: Sequence[int],
        first: int,
        stop: int,
        layer: int,
        request_id: str,
    ) -> None:
        for block in range(first // BLOCK, -(-stop // BLOCK)):
            a, b = max(first, block * BLOCK), min(stop, (block + 1) * BLOCK)
            got = page[table[block], a % BLOCK : a % BLOCK + b - a].tolist()
            want = [layer_value(n, layer) for n in names[a:b]]
            if got != want:
                raise WrongBytes(f"{request_id}: tokens {a}..{b} of layer {layer}")


def prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt that shares no prefix with those of other seeds."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 1000, (length,), generator=generator).tolist()
