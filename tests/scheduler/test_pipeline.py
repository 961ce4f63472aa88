# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: one scheduler half, ranks that hold different layers, results out of step.

The stages' KV cache configurations are made by vLLM from the specs of their layers, and their
reports are joined by vLLM's own aggregator. The model computes all layers in one go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput

from tests.scheduler.sim import BLOCK, LAYERS, MASK, Gate, Sim, layer_value, prompt
from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector


class Pipeline(Sim):
    """A simulated engine of several ranks.

    Args:
        stages: for each rank its layers, as ``(KV cache group, layer of that group)``.
    """

    def __init__(
        self, stages: Sequence[Sequence[tuple[int, int]]], windows: Sequence[int] = (0,), **kw: Any
    ) -> None:
        self.stages = stages
        super().__init__(
            windows=windows,
            max_model_len=512,
            pipeline_parallel_size=len(stages),
            distributed_executor_backend="mp",
            **kw,
        )
        self.aggregator = KVOutputAggregator.from_connector(self.connector, len(stages))
        assert self.worker is not None
        self.worker.shutdown()
        self.gates = [Gate() for _ in stages]
        self.ranks = [self._rank(i) for i in range(len(stages))]
        self.worker = self.ranks[0]

    def _cache(
        self, windows: Sequence[int], num_blocks: int
    ) -> tuple[KVCacheConfig, dict[str, torch.Tensor]]:
        self.vllm_config.cache_config.kv_cache_layout = "LBHNC"
        specs = []
        for stage in self.stages:
            specs.append({_name(*place): _spec(windows[place[0]]) for place in stage})
        memory = [1 << 24] * len(specs)  # more than the blocks that are asked for take
        self.configs = get_kv_cache_configs(self.vllm_config, specs, memory)
        for config in self.configs:
            for g, group in enumerate(config.kv_cache_groups):
                assert all(name.startswith(f"group{g}.") for name in group.layer_names)
        pages = {
            name: torch.randint(1, MASK, (num_blocks, BLOCK), dtype=torch.int64)
            for stage in specs
            for name in stage
        }
        return generate_scheduler_kv_cache_config(self.configs), pages

    def _rank(self, rank: int) -> TieredKVConnector:
        config = copy.copy(self.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        worker = TieredKVConnector(config, compat.KVConnectorRole.WORKER, self.configs[rank])
        worker._worker._open_copier = self.gates[rank].wrap
        names = {name for g in self.configs[rank].kv_cache_groups for name in g.layer_names}
        pages = {name: self.pages[name] for name in names}
        worker.register_kv_caches(
            {name: t.view(t.shape[0], 1, BLOCK, 1) for name, t in pages.items()}
        )
        return worker

    def _execute(self, output: Any) -> ModelRunnerOutput:
        outputs: list[ModelRunnerOutput | None] = []
        for worker in self.ranks:
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
        ids = list(output.num_scheduled_tokens)
        sampled = [self._forward(r, output.num_scheduled_tokens[r]) for r in ids]
        for worker in self.ranks:
            result = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)
            self.worker = worker
            result.kv_connector_output = self._connector_output(output)
            outputs.append(result)
        merged = self.aggregator.aggregate(outputs)
        assert merged is not None
        return merged

    def check_pool(self) -> None:
        """Every offered chunk holds, on each rank, what was computed for that rank's layers."""
        names_of = {
            key: self.names[request_id][i * BLOCK : (i + 1) * BLOCK]
            for request_id, request in self.requests.items()
            for i, key in enumerate(request.block_hashes)
        }
        seen = 0
        for key, node in self.half.core.index._nodes.items():
            for rank, worker in enumerate(self.ranks):
                half = worker._worker
                for group, slot in enumerate(node.slots):
                    layers = [layer for g, layer in self.stages[rank] if g == group]
                    if slot < 0 or not layers:
                        continue
                    start = slot * half._slot_bytes
                    image = half._pool.tensor[start : start + len(layers) * BLOCK * 8]
                    want = [layer_value(n, i) for i in sorted(layers) for n in names_of[key]]
                    assert image.view(torch.int64).tolist() == want
                    seen += 1
        assert seen or not len(self.half.core.index)

    def close(self) -> None:
        for gate in self.gates:
            for direction in ("store", "load"):
                gate.release(direction)
        for worker in self.ranks:
            worker.shutdown()
        self.scheduler.shutdown()


def _name(group: int, layer: int) -> str:
    return f"group{group}.layer{layer}"


def _spec(window: int) -> FullAttentionSpec | SlidingWindowSpec:
    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if window:
        return SlidingWindowSpec(block_size=BLOCK, sliding_window=window, **common)
    return FullAttentionSpec(block_size=BLOCK, **common)


SPLITS = {"2,1": [[(0, 0), (0, 1)], [(0, 2)]], "1,2": [[(0, 0)], [(0, 1), (0, 2)]]}


@pytest.fixture(params=sorted(SPLITS))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", request.param)
    pipeline = Pipeline(SPLITS[request.param])
    yield pipeline
    pipeline.close()


def test_each_stage_keeps_its_layers(engine: Pipeline) -> None:
    cold = engine.complete("cold", prompt(100), 4)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(100), 4)
    assert (warm.cpu, warm.output) == (96, cold.output)
    loaded = 6 * LAYERS * BLOCK * 8  # bytes, over both stages
    assert engine.counter("bytes", "load", "cpu") == loaded
    engine.check_quiet()


def test_the_tier_fits_its_capacity_whichever_stage_is_larger(engine: Pipeline) -> None:
    slots = engine.half.core.settings.num_slots
    engine.complete("any", prompt(40))
    engine.settle()
    used = [worker._worker._slot_bytes * slots for worker in engine.ranks]
    assert sum(used) <= 256 * 4096


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_counts_once_every_stage_has_it(engine: Pipeline, rank: int) -> None:
    engine.gates[rank].hold("store")
    engine.complete("cold", prompt(100), 1)
    for _ in range(3):
        engine.step()
    assert len(engine.half.core.ledger.stores) == 6
    assert engine.half.core.index.ready_run(engine.requests["cold"].block_hashes, 0) == []
    engine.gates[rank].release("store")
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", prompt(100), 1).cpu == 96
    engine.check_quiet()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_whose_load_is_late(engine: Pipeline, rank: int) -> None:
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    engine.gates[rank].hold("load")
    engine.add("warm", prompt(100), 3)
    for _ in range(20):
        engine.step()
    assert engine.outputs["warm"] == []  # the other stage's bytes are not enough
    engine.gates[rank].release("load")
    engine.run()
    assert engine.hit_tokens == 96
    engine.check_quiet()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_stage_that_fails(engine: Pipeline, rank: int, direction: str) -> None:
    gate = engine.gates[rank]
    if direction == "store":
        gate.fail.add("store")
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    gate.fail.add(direction)
    assert engine.complete("warm", prompt(100), 3).cpu == 0
    gate.fail.clear()
    engine.settle()
    engine.flush_device()
    engine.complete("cold again", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    before = engine.hit_tokens
    engine.complete("warm again", prompt(100), 3)
    assert engine.hit_tokens - before == 96
    engine.check_quiet()


def test_a_stage_without_layers_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage has sliding layers only."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,1")
    stages = [[(0, 0), (0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]
    engine = Pipeline(stages, windows=(40, 0), num_blocks=128)
    try:
        engine.complete("cold", prompt(200), 1)
        engine.settle()
        engine.flush_device()
        assert engine.complete("warm", prompt(200), 30).cpu == 192
        engine.settle()
        assert engine.counter("failures", "internal") == 0
    finally:
        engine.close()
