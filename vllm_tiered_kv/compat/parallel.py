# SPDX-License-Identifier: Apache-2.0
"""Ranks, and what each of them holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def world_size(vllm_config: VllmConfig) -> int:
    """Ranks that each hold a part of this engine's KV cache."""
    return int(vllm_config.parallel_config.world_size)


def worker_rank(vllm_config: VllmConfig) -> int:
    """This worker's rank among :func:`world_size`."""
    return int(vllm_config.parallel_config.rank)


def ranks_elsewhere(vllm_config: VllmConfig) -> str | None:
    """Why ranks of this engine can't reach a local socket of its scheduler, if that is known.

    Where Ray places them is not known before they have come.
    """
    parallel = vllm_config.parallel_config
    hosts = int(parallel.nnodes_within_dp)
    if hosts > 1:
        return f"its ranks are on {hosts} hosts"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return "each of its ranks has a scheduler of its own (external_launcher)"
    return None


def context_parallel_size(vllm_config: VllmConfig) -> int:
    """Ranks that share the tokens of one block (decode context parallelism)."""
    return int(vllm_config.parallel_config.decode_context_parallel_size)


def largest_layer_share(vllm_config: VllmConfig) -> float:
    """Layers of the rank that has the most, per layer of the first rank (pipelines differ)."""
    stages = int(vllm_config.parallel_config.pipeline_parallel_size)
    if stages == 1:
        return 1.0
    from vllm.distributed.utils import get_pp_indices

    total = vllm_config.model_config.get_total_num_hidden_layers()
    bounds = [get_pp_indices(total, stage, stages) for stage in range(stages)]
    layers = [end - start for start, end in bounds]
    return float(max(layers) / max(1, layers[0]))
