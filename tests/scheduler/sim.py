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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
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
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.scheduler.audit import Audit
from tests.scheduler.rank import Rank, Runner, WrongBytes, tiered
from tests.scheduler.tokens import BLOCK, EOS, LAYERS, STATE, continuation, prompt
from tests.scheduler.worker import Row, Streams
from vllm_tiered_kv.worker.copy import open_copier

__all__ = ["BLOCK", "STATE", "Runner", "Sim", "WrongBytes", "prompt"]

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
    folder = Path(tempfile.mkdtemp(prefix="simulated-model-"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


class Gate:
    """Stands between the lanes and the copier: holds, fails and counts copies."""

    def __init__(self) -> None:
        self._open = {"store": threading.Event(), "load": threading.Event()}
        self.entered = {"store": threading.Event(), "load": threading.Event()}
        for event in self._open.values():
            event.set()
        self.fail: set[str] = set()
        """Directions whose copies fail before they have moved anything."""
        self.fail_late: set[str] = set()
        """Directions whose copies fail after they have moved everything."""

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
                transfer = inner.submit(direction, copies, after)
                if direction.value in gate.fail_late:
                    transfer.wait(30)
                    raise RuntimeError("injected copy failure, after the copy")
                return transfer

            def close(self) -> None:
                inner.close()

        return Gated()


class Sim:
    """One engine.

    Args:
        windows: for each KV cache group the sliding window, 0 for full attention, or STATE.
        num_blocks: device blocks.
        capacity_chunks: slots of the CPU tier on each rank.
        chunk_blocks: blocks a chunk.
        depth: steps in flight; 2 is vLLM's asynchronous scheduling.
        runner: the order of the hooks that end a step.
        v2: what the scheduler tells the runner is as vLLM's second model runner wants it.
        drafts: draft tokens a step.
        eos_every: about how many tokens the model says before it ends a sequence; 0: it does not.
        ranks: workers, each with a part of the layers.
        role: vLLM's ``kv_role``.
        beside: other connectors, by position: "first" or "second" to ours, within
            vLLM's ``MultiConnector``; "" for ours alone.
    """

    def __init__(
        self,
        *,
        windows: Sequence[int] = (0,),
        num_blocks: int = 64,
        capacity_chunks: int = 256,
        chunk_blocks: int = 1,
        depth: int = 1,
        runner: Runner = Runner.SAVE_FIRST,
        v2: bool = False,
        drafts: int = 0,
        eos_every: int = 0,
        ranks: int = 1,
        role: str = "kv_both",
        beside: dict[str, Any] | None = None,
        extra: dict[str, Any] | None = None,
        policy: str = "recompute",
        connector: bool = True,
        **engine: Any,
    ) -> None:
        self.depth = depth
        self.drafts = drafts
        self.eos_every = eos_every
        self.gate = Gate()
        ours = {
            "kv_connector": "TieredKVConnector",
            "kv_role": role,
            "kv_connector_extra_config": {
                "cpu": {"capacity": 4096 * capacity_chunks * ranks},
                "chunk_tokens": BLOCK * chunk_blocks,
                "gate": "always",  # who tests hits must not depend on what was measured
                **(extra or {}),
            },
        }
        if drafts:
            engine["speculative_config"] = {
                "method": "ngram_gpu" if depth > 1 else "ngram",
                "num_speculative_tokens": drafts,
                "prompt_lookup_max": 3,
            }
        self.max_model_len = engine.pop("max_model_len", 4096)
        self.vllm_config = EngineArgs(
            model=model_folder(),
            skip_tokenizer_init=True,
            block_size=BLOCK,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=engine.pop("max_num_batched_tokens", 256),
            max_num_seqs=engine.pop("max_num_seqs", 8),
            async_scheduling=depth > 1,
            enable_prefix_caching=engine.pop("enable_prefix_caching", True),
            num_gpu_blocks_override=num_blocks,
            kv_transfer_config={
                **_together(ours, beside or {}, role),
                "engine_id": "sim",
                "kv_load_failure_policy": policy,
            }
            if connector
            else None,
            **engine,
        ).create_engine_config()
        # The CPU platform turns it off; vLLM holds freed blocks back only where it is on.
        self.vllm_config.scheduler_config.async_scheduling = depth > 1
        self.vllm_config.parallel_config.world_size = ranks
        self.vllm_config.cache_config.num_gpu_blocks = num_blocks
        if STATE in windows:
            self.vllm_config.cache_config.mamba_cache_mode = "align"
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.kv_cache_config = self.make_cache(windows, num_blocks)
        cls = AsyncScheduler if depth > 1 else Scheduler
        self.scheduler = cls(
            self.vllm_config,
            self.kv_cache_config,
            StructuredOutputManager(self.vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = v2
        self.connector = self.scheduler.connector
        self.half: Any = tiered(self.connector)._scheduler if connector else None
        self.ranks = [self.make_rank(i, windows, num_blocks, runner) for i in range(ranks)]
        for rank in self.ranks if connector else ():
            rank.connect(self.vllm_config, self.kv_cache_config)
            rank.tiered._worker._open_copier = self.gate.wrap
            rank.register()
        self._aggregator = KVOutputAggregator(ranks)
        self.worker = self.ranks[0].tiered
        self.streams = Streams(drafts, eos_every, asynchronous=depth > 1)
        self.on_result: Callable[[KVConnectorOutput], None] = lambda _: None
        """Sees what the ranks say together before the scheduler does, and may change it."""
        self.salts: dict[str, str | None] = {}
        self.outputs: dict[str, list[int]] = {}
        """What clients have been sent."""
        self.reasons: dict[str, Any] = {}
        self.handed: dict[str, dict[str, Any]] = {}
        """What another engine can go on from, as a client is told."""
        self._expected: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        """Aborted requests."""
        self._scheduled: deque[tuple[int, Any, list[Row]]] = deque()
        self._in_flight: deque[tuple[int, Any, ModelRunnerOutput]] = deque()
        self._unsettled: dict[int, dict[str, int]] = {}
        self.steps = 0
        self.counters: dict[str, float] = {}
        self.gauges: dict[str, float] = {}
        self.observed: dict[str, list[float]] = {}
        self.device_hits = 0
        self.external_hits = 0
        self.sources: dict[Any, int] = {}
        self.requests: dict[str, Request] = {}
        self.free_at_start = self.free_blocks
        self.audit = Audit(self)

    def make_cache(self, windows: Sequence[int], num_blocks: int) -> KVCacheConfig:
        """What the scheduler is told of the cache."""
        return _cache(windows, num_blocks)

    def make_rank(
        self, number: int, windows: Sequence[int], num_blocks: int, runner: Runner
    ) -> Rank:
        return Rank(number, windows, num_blocks, runner)

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
        ignore_eos: bool = True,
        lora: LoRARequest | None = None,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            prompt_logprobs=prompt_logprobs,
            extra_args={"kv_transfer_params": params} if params is not None else None,
        )
        sampling.update_from_generation_config({}, None if ignore_eos else EOS)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=float(len(self.requests)),
            cache_salt=salt,
            priority=priority,
            lora_request=lora,
            block_hasher=self.hasher,
        )
        self.salts[request_id] = salt
        self.outputs[request_id] = []
        self.requests[request_id] = request
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.finished.add(request_id)

    def expected(self, request_id: str) -> list[int]:
        """What the request must be answered if nobody aborts it."""
        if (known := self._expected.get(request_id)) is not None:
            return known
        request = self.requests[request_id]
        prompt_ids = request.prompt_token_ids or []
        limit = min(request.max_tokens, self.max_model_len - len(prompt_ids))
        stops = request.sampling_params.eos_token_id is not None
        want = continuation(prompt_ids, self.salts[request_id], limit, self.eos_every, stops)
        self._expected[request_id] = want
        return want

    # -- the engine's loop ---------------------------------------------------------

    def step(self) -> Any:
        """Schedule and execute one step; take in the output of the one ``depth`` before."""
        output = self.schedule()
        while self._scheduled:
            self.execute()
        if len(self._in_flight) >= self.depth:
            self.process()
        return output

    def schedule(self) -> Any:
        """Plan a step; the ranks are told, and have not begun."""
        output = self.scheduler.schedule()
        self.steps += 1
        self._scheduled.append((self.steps, output, self._rows(output)))
        self._unsettled[self.steps] = {
            request_id: self.requests[request_id].num_preemptions
            for request_id in output.num_scheduled_tokens
        }
        return output

    def execute(self) -> None:
        """Let the ranks run the oldest step that is planned."""
        number, output, rows = self._scheduled.popleft()
        self._in_flight.append((number, output, self._execute(number, output, rows)))

    def process(self) -> None:
        """Take in the oldest step's output."""
        number, output, model_output = self._in_flight.popleft()
        del self._unsettled[number]
        results = self.scheduler.update_from_output(output, model_output)
        if self.drafts and self.depth == 1 and output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(*self.streams.take_drafts(output.num_scheduled_tokens))
            )
        for result in results.values():
            for said in result.outputs:
                self.outputs[said.request_id].extend(said.new_token_ids)
                if said.finish_reason is not None:
                    self.reasons[said.request_id] = said.finish_reason
                if said.kv_transfer_params is not None:
                    self.handed[said.request_id] = said.kv_transfer_params
            stats = result.scheduler_stats
            if stats is None:
                continue
            self.device_hits += stats.prefix_cache_stats.hits
            if stats.connector_prefix_cache_stats is not None:
                self.external_hits += stats.connector_prefix_cache_stats.hits
                for source, tokens in stats.connector_prefix_cache_stats.hits_by_source.items():
                    self.sources[source] = self.sources.get(source, 0) + tokens
            if stats.kv_connector_stats:
                data = stats.kv_connector_stats
                self._count(data.get("TieredKVConnector", data))

    @property
    def executed(self) -> bool:
        """Whether the ranks have done all that was planned."""
        return not self._scheduled

    def run(self, limit: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.busy:
                return
            self.advance()
        raise AssertionError(f"the engine made no end in {limit} steps")

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self._in_flight or self._scheduled)

    def advance(self) -> None:
        """What vLLM's loop does next."""
        while self._scheduled:
            self.execute()
        while len(self._in_flight) >= self.depth:
            self.process()
        if not self.busy:
            return
        if not self.scheduler.has_requests():
            self.process()
        elif not self.step().total_num_scheduled_tokens:
            self.pause()

    def pause(self) -> None:
        time.sleep(0.0005)  # as vLLM's loop does, for the transfer threads

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
        """Wait until all jobs have ended, of the disk too, and the scheduler half knows it."""
        if self.connector is None:
            return
        deadline = time.monotonic() + 20
        while self.half.core.ledger.stores or self.half.core.ledger.loads:
            self.half.drain()
            if time.monotonic() > deadline:
                raise AssertionError("jobs did not end")
            self.pause()
            if self.half.core.ledger.stores:
                self.step()
        while (disk := self.half.core.disk) is not None and (disk.writes or disk.reads):
            self.half.drain()  # without a step: it goes on beside the engine
            if time.monotonic() > deadline + 40:
                raise AssertionError("reads or writes of files did not end")
            self.pause()
        self._collect()

    def flush_device(self) -> None:
        """Empty the device's prefix cache, not the connector's."""
        assert self.scheduler.reset_prefix_cache(), "blocks are still held"

    def close(self) -> None:
        for direction in ("store", "load"):
            self.gate.release(direction)
        for rank in self.ranks:
            if rank.connector is not None:
                rank.connector.shutdown()
        self.scheduler.shutdown()

    # -- what can be seen ------------------------------------------------------------

    @property
    def tokens(self) -> dict[str, list[int]]:
        """What each client knows of its sequence."""
        return {r: [*q.prompt_token_ids, *self.outputs[r]] for r, q in self.requests.items()}

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
            assert not self.half.loads.lost
            assert not self.half.core.ledger._readers
            assert not self.half.first_tokens._due
            answered = sum(bool(tokens) for tokens in self.outputs.values())
            assert sum(map(len, self.observed.values())) == answered
            if (disk := self.half.core.disk) is not None:
                assert not disk.writes
                assert not disk._writing
                assert not disk.reads
                assert disk.lookups.held == 0
            self.audit.check()

    def check_pool(self) -> None:
        """Every chunk that is offered holds what was computed for it."""
        self.audit.check()

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
        for key, values in data["observed"].items():
            self.observed.setdefault(key, []).extend(values)

    def _rows(self, output: Any) -> list[Row]:
        """What the ranks are told of each request in a step."""
        anew = {request.req_id for request in output.scheduled_new_reqs}
        anew |= output.scheduled_cached_reqs.resumed_req_ids
        rows = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            # schedule() has already advanced the count by what it scheduled
            start = request.num_computed_tokens - count
            ahead = [n for n, ran in self._unsettled.items() if _same(ran, request)]
            rows.append(
                Row(
                    request_id,
                    start,
                    count,
                    list(output.scheduled_spec_decode_tokens.get(request_id, ())),
                    self.scheduler.kv_cache_manager.get_block_ids(request_id),
                    list(request.all_token_ids) if request_id in anew else None,
                    self.salts[request_id],
                    ahead,
                )
            )
        return rows

    def _execute(self, number: int, output: Any, rows: list[Row]) -> ModelRunnerOutput:
        for rank in self.ranks:
            rank.begin(output.kv_connector_metadata)
            rank.zero(output.new_block_ids_to_zero or ())
        sampled = []
        for row in rows:
            start, names, tokens = self.streams.run(number, row)
            for rank in self.ranks:
                rank.forward(row.tables, names, start, row.request_id)
            sampled.append(tokens)
        results = []
        for rank in self.ranks:
            result = ModelRunnerOutput(
                req_ids=[row.request_id for row in rows],
                req_id_to_index={row.request_id: i for i, row in enumerate(rows)},
                sampled_token_ids=sampled,
            )
            result.kv_connector_output = rank.end(output.finished_req_ids)
            results.append(result)
        result = self._aggregator.aggregate(results) if len(results) > 1 else results[0]
        if result.kv_connector_output is not None:
            self.on_result(result.kv_connector_output)
        return result


def _same(ran: dict[str, int], request: Request) -> bool:
    """Whether a step ran this request since it was last preempted."""
    return ran.get(request.request_id) == request.num_preemptions


def _together(ours: dict[str, Any], beside: dict[str, Any], role: str) -> dict[str, Any]:
    """Our connector alone, or within vLLM's with others."""
    if not beside:
        return ours
    children = [*filter(None, (beside.get("first"), ours, beside.get("second")))]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"connectors": children},
    }


def _cache(windows: Sequence[int], num_blocks: int) -> KVCacheConfig:
    common: dict[str, Any] = {
        "block_size": BLOCK,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    groups, tensors = [], []
    for g, window in enumerate(windows):
        spec: Any
        if window == STATE:
            spec = MambaSpec(
                block_size=BLOCK,
                shapes=((BLOCK,),),
                dtypes=(torch.int64,),
                mamba_cache_mode="align",
            )
        elif window:
            spec = SlidingWindowSpec(sliding_window=window, **common)
        else:
            spec = FullAttentionSpec(**common)
        groups.append(KVCacheGroupSpec([f"group{g}.layer{i}" for i in range(LAYERS)], spec))
    size = num_blocks * BLOCK * 8
    for i in range(LAYERS):
        for g in range(len(windows)):
            tensors.append(KVCacheTensor(size, [f"group{g}.layer{i}"], size, BLOCK * 8))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)
