# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages: one scheduler half, ranks that hold different layers, results out of step.

The stages' KV cache configurations are made by vLLM from the specs of their layers, and their
reports are joined by vLLM's own aggregator. The model computes all layers in one go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec

from tests.scheduler.audit import Audit
from tests.scheduler.disks import disk, opened
from tests.scheduler.rank import Rank
from tests.scheduler.sim import Gate, Sim
from tests.scheduler.tokens import BLOCK, LAYERS, prompt
from vllm_tiered_kv.scheduler.index import NodeState

Stage = dict[int, list[int]]
"""KV cache group -> the layers of it that one stage has."""


class StageRank(Rank):
    """A rank with some of the layers; all groups of a layer share its memory."""

    stage: Stage
    config: KVCacheConfig

    def hold(self, stage: Stage, config: KVCacheConfig) -> None:
        self.stage, self.config = stage, config

    def connect(self, vllm_config: Any, kv_cache_config: Any) -> None:
        super().connect(vllm_config, self.config)

    def register(self) -> None:
        num_blocks = self.memory.shape[1]
        self.connector.register_kv_caches(
            {
                f"group{g}.layer{i}": self.memory[i].view(num_blocks, 1, BLOCK, 1)
                for g, layers in self.stage.items()
                for i in layers
            }
        )

    def holds(self, group: int, at: np.ndarray, numbers: np.ndarray) -> bool:
        layers = self.stage.get(group, [])
        want = numbers[None, :] ^ self.keys[group][layers][:, None]
        return bool(np.array_equal(self.values[layers][:, at], want))

    def fill(self, group: int, at: np.ndarray, numbers: np.ndarray) -> None:
        for layer in self.stage.get(group, []):
            self.values[layer, at] = numbers ^ self.keys[group][layer]


class Pipeline(Sim):
    """A simulated engine of several stages; each has a gate of its own before its copies."""

    def __init__(self, stages: Sequence[Stage], windows: Sequence[int] = (0,), **kw: Any) -> None:
        self.stages = stages
        super().__init__(
            windows=windows,
            ranks=len(stages),
            max_model_len=512,
            pipeline_parallel_size=len(stages),
            distributed_executor_backend="mp",
            **kw,
        )
        self.audit = _Audit(self)

    def make_cache(self, windows: Sequence[int], num_blocks: int) -> KVCacheConfig:
        self.vllm_config.cache_config.kv_cache_layout = "LBHNC"
        specs = [
            {f"group{g}.layer{i}": _spec(windows[g]) for g, layers in stage.items() for i in layers}
            for stage in self.stages
        ]
        memory = [1 << 24] * len(specs)  # more than the blocks that are asked for take
        self.configs = get_kv_cache_configs(self.vllm_config, specs, memory)
        for config in self.configs:
            for g, group in enumerate(config.kv_cache_groups):
                assert all(name.startswith(f"group{g}.") for name in group.layer_names)
        return generate_scheduler_kv_cache_config(self.configs)

    def make_rank(self, number: int, *args: Any) -> Rank:
        rank = StageRank(number, *args)
        rank.hold(self.stages[number], self.configs[number])
        return rank

    def separate_gates(self) -> list[Gate]:
        """A gate a stage, instead of one for all."""
        gates = [Gate() for _ in self.ranks]
        for rank, gate in zip(self.ranks, gates, strict=True):
            assert rank.tiered is not None
            rank.tiered._worker._open_copier = gate.wrap
        return gates


class _Audit(Audit):
    """Checks each stage's own layers."""

    def check_device(self) -> None:
        """What is read is checked when it is read."""

    def check_tier(self) -> None:
        for key, node in self._sim.half.core.index._nodes.items():
            if node.state is not NodeState.READY:
                continue
            for rank in self._sim.ranks:
                half = rank.tiered._worker
                image = half._pool.tensor.numpy().view(np.int64).reshape(half._pool.num_slots, -1)
                for group, layers in rank.stage.items():
                    got = image[node.slots[group], : len(layers) * BLOCK].reshape(-1, BLOCK)
                    want = self._blocks[key][None] ^ rank.keys[group][layers][:, None]
                    assert np.array_equal(got, want)


def _spec(window: int) -> FullAttentionSpec | SlidingWindowSpec:
    common: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if window:
        return SlidingWindowSpec(block_size=BLOCK, sliding_window=window, **common)
    return FullAttentionSpec(block_size=BLOCK, **common)


SPLITS: dict[str, list[Stage]] = {"2,1": [{0: [0, 1]}, {0: [2]}], "1,2": [{0: [0]}, {0: [1, 2]}]}
Make = Callable[..., Pipeline]


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[Pipeline] = []

    def make(stages: Sequence[Stage], split: str, **options: Any) -> Pipeline:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
        made.append(Pipeline(stages, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture(params=sorted(SPLITS))
def engine(request: pytest.FixtureRequest, pipeline: Make) -> Pipeline:
    return pipeline(SPLITS[request.param], request.param)


def test_each_stage_keeps_its_layers(engine: Pipeline) -> None:
    cold = engine.complete("cold", prompt(100), 4)
    engine.settle()
    engine.flush_device()
    warm = engine.complete("warm", prompt(100), 4)
    assert (warm.cpu, warm.output) == (96, cold.output)
    loaded = 6 * LAYERS * BLOCK * 8  # bytes, over both stages
    assert engine.counter("bytes", "load", "cpu") == loaded
    engine.check_quiet()


@pytest.fixture(params=[BLOCK * 8, 96, 4096])
def alignment(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of slots: a layer, less than one, and more than all."""
    monkeypatch.setattr("vllm_tiered_kv.geometry.SLOT_ALIGNMENT", request.param)


def memory_of(engine: Pipeline) -> tuple[int, int]:
    """Bytes of all ranks' pools, and of ``cpu.capacity``."""
    extra = engine.vllm_config.kv_transfer_config.kv_connector_extra_config
    halves = [rank.tiered._worker for rank in engine.ranks if rank.tiered is not None]
    pools = [half._pool for half in halves]
    assert all(pools)
    return sum(pool.num_slots * pool.slot_bytes for pool in pools), extra["cpu"]["capacity"]


LAYOUTS: dict[str, list[Stage]] = {
    "1,2": [{0: [0]}, {0: [1, 2]}],
    "2,1": [{0: [0, 1]}, {0: [2]}],
    "1,1,1": [{0: [0]}, {0: [1]}, {0: [2]}],
}


@pytest.mark.usefixtures("alignment")
@pytest.mark.parametrize("split", sorted(LAYOUTS))
def test_the_tier_fits_its_capacity_whichever_stage_is_larger(pipeline: Make, split: str) -> None:
    engine = pipeline(LAYOUTS[split], split)
    engine.complete("any", prompt(40))
    engine.settle()
    used, capacity = memory_of(engine)
    assert capacity * 0.4 < used <= capacity
    assert engine.half.core.index.num_slots == engine.half.core.settings.num_slots
    engine.check_quiet()


def test_a_stage_with_more_of_one_group_than_the_first_one_has_fewer_slots(
    pipeline: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has a layer of each of the two groups, the second two of one of them."""
    monkeypatch.setattr("vllm_tiered_kv.geometry.SLOT_ALIGNMENT", BLOCK * 8)
    stages: list[Stage] = [{0: [0], 1: [0, 1]}, {0: [1, 2], 1: [2]}]
    uneven: list[Stage] = [{0: [0], 1: [0]}, {0: [1, 2], 1: [1, 2]}]
    engine = pipeline(stages, "2,1", windows=(40, 0), num_blocks=128)
    engine.complete("any", prompt(40))
    assert engine.half.core.index.num_slots == engine.half.core.settings.num_slots

    engine = pipeline(uneven, "2,1", windows=(40, 0), num_blocks=128, capacity_chunks=1)
    engine.complete("cold", prompt(200), 1)
    engine.settle()
    used, capacity = memory_of(engine)
    assert used <= capacity
    assert engine.half.core.index.num_slots == engine.half.core.settings.num_slots // 2
    engine.flush_device()
    assert engine.complete("warm", prompt(200), 1).cpu > 0
    engine.settle()
    assert engine.counter("failures", "internal") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_chunk_counts_once_every_stage_has_it(engine: Pipeline, rank: int) -> None:
    gate = engine.separate_gates()[rank]
    gate.hold("store")
    engine.complete("cold", prompt(100), 1)
    for _ in range(3):
        engine.step()
    assert len(engine.half.core.ledger.stores) == 6
    assert engine.half.core.index.ready_run(engine.requests["cold"].block_hashes, 0) == []
    gate.release("store")
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", prompt(100), 1).cpu == 96
    engine.check_quiet()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_whose_load_is_late(engine: Pipeline, rank: int) -> None:
    gate = engine.separate_gates()[rank]
    engine.complete("cold", prompt(100), 1)
    engine.settle()
    engine.flush_device()
    gate.hold("load")
    engine.add("warm", prompt(100), 3)
    for _ in range(20):
        engine.step()
    assert engine.outputs["warm"] == []  # the other stage's bytes are not enough
    gate.release("load")
    engine.run()
    assert engine.hit_tokens == 96
    engine.check_quiet()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_stage_that_fails(engine: Pipeline, rank: int, direction: str) -> None:
    gate = engine.separate_gates()[rank]
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


def test_a_stage_without_layers_of_a_group(pipeline: Make) -> None:
    """The first stage has sliding layers only."""
    stages: list[Stage] = [{0: [0, 1, 2]}, {1: [0, 1, 2]}]
    engine = pipeline(stages, "2,1", windows=(40, 0), num_blocks=128)
    engine.complete("cold", prompt(200), 1)
    engine.settle()
    engine.flush_device()
    assert engine.complete("warm", prompt(200), 30).cpu == 192
    engine.settle()
    assert engine.counter("failures", "internal") == 0


@pytest.mark.parametrize("windows", [(40, 0), (0, 40)], ids=["window first", "window last"])
def test_on_disk_a_group_is_whole_without_the_stages_that_have_none_of_it(
    pipeline: Make, windows: tuple[int, ...], tmp_path: Path
) -> None:
    """Each stage has the layers of one group only."""
    stages: list[Stage] = [{0: [0, 1, 2]}, {1: [0, 1, 2]}]
    options: dict[str, Any] = {"windows": windows, "num_blocks": 128, "extra": disk(tmp_path)}
    engine = opened(pipeline(stages, "2,1", **options))
    cold = engine.complete("cold", prompt(200), 4)
    engine.settle()
    assert engine.counter("chunks", "stored", "disk") > 0
    assert engine.counter("failures", "disk_write") == 0
    engine.close()
    engine = opened(pipeline(stages, "2,1", **options))
    warm = engine.complete("warm", prompt(200), 4)
    assert engine.counter("hit_tokens", "disk") == 192
    assert warm.output == cold.output
    agent = engine.half.core.disk.agent
    assert agent.used <= agent.settings.capacity
    assert engine.counter("failures", "internal") == 0
