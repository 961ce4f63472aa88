# SPDX-License-Identifier: Apache-2.0
"""Every import from vLLM's internals, in one place.

What vLLM renames or moves is mended here and nowhere else. Importing this with a vLLM
that does not fit raises ``contract.check.UnsupportedVllm``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tiered_kv.compat.accepted import VERDICT
from vllm_tiered_kv.compat.blocks import (
    claim,
    device_cache,
    free_blocks,
    handed_over_states,
    is_free,
    is_unused,
    null_block_id,
    preempted,
    uncache_blocks,
    usable_blocks,
    watch_blocks,
)
from vllm_tiered_kv.compat.events import (
    CPU_MEDIUM,
    DISK_MEDIUM,
    EventGroup,
    EventMedium,
    block_removed,
    block_stored,
    event_extra_keys,
    event_groups,
    event_origin,
)
from vllm_tiered_kv.compat.facts import (
    attention_backends,
    attention_kernel,
    cache_layout,
    device_name,
    hash_seed,
    hub_snapshot,
    instruction_set,
    is_cpu,
    torch_version,
    uses_modelscope,
    vllm_version,
)
from vllm_tiered_kv.compat.groups import (
    block_sizes,
    bytes_per_block,
    describe_group,
)
from vllm_tiered_kv.compat.handover import (
    ended_well,
    engine_id,
    engine_index,
    hold_blocks,
    is_consumer,
    is_producer,
    kv_heads,
    let_go_blocks,
    proof_of,
    tensor_parallel_rank,
    tensor_parallel_size,
)
from vllm_tiered_kv.compat.lora import find_adapters, lora_of
from vllm_tiered_kv.compat.names import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm_tiered_kv.compat.parallel import (
    context_parallel_size,
    largest_layer_share,
    ranks_elsewhere,
    worker_rank,
    world_size,
)
from vllm_tiered_kv.compat.supported import (
    check_supported,
    draft_tokens,
    has_prefix_caching,
    schedules_by_priority,
    shared_token_budget,
    token_budget,
    tokens_in_flight,
)
from vllm_tiered_kv.compat.unsupported import UnsupportedModel

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig as KVTransferConfig
    from vllm.config import LoadConfig as LoadConfig
    from vllm.config import ModelConfig as ModelConfig
    from vllm.config import VllmConfig as VllmConfig
    from vllm.v1.core.block_pool import BlockPool as BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock as KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec as KVCacheGroupSpec
    from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
    from vllm.v1.request import Request as Request

__all__ = [
    "CPU_MEDIUM",
    "DISK_MEDIUM",
    "VERDICT",
    "CacheHitSource",
    "EventGroup",
    "EventMedium",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "KVConnectorWorkerMetadata",
    "SupportsHMA",
    "UnsupportedModel",
    "attention_backends",
    "attention_kernel",
    "block_removed",
    "block_sizes",
    "block_stored",
    "bytes_per_block",
    "cache_layout",
    "check_supported",
    "claim",
    "context_parallel_size",
    "describe_group",
    "device_cache",
    "device_name",
    "draft_tokens",
    "ended_well",
    "engine_id",
    "engine_index",
    "event_extra_keys",
    "event_groups",
    "event_origin",
    "find_adapters",
    "free_blocks",
    "handed_over_states",
    "has_prefix_caching",
    "hash_seed",
    "hold_blocks",
    "hub_snapshot",
    "instruction_set",
    "is_consumer",
    "is_cpu",
    "is_free",
    "is_producer",
    "is_unused",
    "kv_heads",
    "largest_layer_share",
    "let_go_blocks",
    "lora_of",
    "null_block_id",
    "preempted",
    "proof_of",
    "ranks_elsewhere",
    "schedules_by_priority",
    "shared_token_budget",
    "tensor_parallel_rank",
    "tensor_parallel_size",
    "token_budget",
    "tokens_in_flight",
    "torch_version",
    "uncache_blocks",
    "usable_blocks",
    "uses_modelscope",
    "vllm_version",
    "watch_blocks",
    "worker_rank",
    "world_size",
]
