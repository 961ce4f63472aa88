# SPDX-License-Identifier: Apache-2.0
"""Everything we override, call and read in vLLM; nothing else says it a second time.

The tests hold this list against our classes: a hook that is overridden and not listed, or listed
with other parameters, fails them.
"""

from __future__ import annotations

from vllm_tiered_kv.contract.structs import Kind, Need, Use

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
CONNECTOR = f"{_V1}.base:KVConnectorBase_V1"
HMA = f"{_V1}.base:SupportsHMA"
METADATA = f"{_V1}.base:KVConnectorMetadata"
WORKER_METADATA = f"{_V1}.base:KVConnectorWorkerMetadata"
STATS = f"{_V1}.metrics:KVConnectorStats"
PROM_METRICS = f"{_V1}.metrics:KVConnectorPromMetrics"


def _base(name: str) -> Need:
    return Need(name, Kind.BASE)


def _hooks(owner: str, hooks: dict[str, str], use: Use = Use.ALWAYS) -> list[Need]:
    return [
        Need(f"{owner}.{name}", Kind.OVERRIDDEN, tuple(arguments.split()), use)
        for name, arguments in hooks.items()
    ]


def _call(name: str, arguments: str = "", use: Use = Use.ALWAYS) -> Need:
    return Need(name, Kind.CALLED, tuple(arguments.split()), use)


def _read(owner: str, names: str = "", use: Use = Use.ALWAYS) -> list[Need]:
    """Attributes of a class, or members of a module."""
    dot = "." if ":" in owner else ":"
    return [Need(f"{owner}{dot}{name}", Kind.READ, use=use) for name in names.split()]


_BASES = [
    *map(_base, (CONNECTOR, HMA, METADATA, WORKER_METADATA, STATS, PROM_METRICS)),
]

_HOOKS = [
    *_hooks(
        CONNECTOR,
        {
            "__init__": "vllm_config role kv_cache_config",
            # scheduler half
            "bind_gpu_block_pool": "gpu_block_pool",
            "on_new_request": "request",
            "get_num_new_matched_tokens": "request num_computed_tokens",
            "update_state_after_alloc": "request blocks num_external_tokens",
            "get_external_cache_hit_sources": "request num_external_tokens",
            "build_connector_meta": "scheduler_output",
            "update_connector_output": "connector_output",
            "request_finished": "request block_ids",
            "take_events": "",
            "reset_cache": "",
            # worker half
            "register_kv_caches": "kv_caches",
            "handle_preemptions": "kv_connector_metadata",
            "bind_connector_metadata": "connector_metadata",
            "start_load_kv": "forward_context **kwargs",
            "wait_for_layer_load": "layer_name",
            "save_kv_layer": "layer_name kv_layer attn_metadata **kwargs",
            "wait_for_save": "",
            "get_transfer_results": "finished_req_ids",
            "get_finished": "finished_req_ids",
            "get_block_ids_with_load_errors": "",
            "build_connector_worker_meta": "",
            # both
            "get_kv_connector_stats": "",
            "shutdown": "",
            "build_kv_connector_stats": "data=",
            "build_prom_metrics": "vllm_config metric_types labelnames per_engine_labelvalues",
        },
    ),
    *_hooks(
        CONNECTOR,
        {
            "supports_sleep_mode": "kv_transfer_config",
            "unregister_kv_caches": "",
            "restore_kv_caches": "",
        },
        Use.NEWER,
    ),
    *_hooks(HMA, {"request_finished_all_groups": "request block_ids"}),
    *_hooks(WORKER_METADATA, {"aggregate": "other"}),
    *_hooks(STATS, {"reset": "", "is_empty": "", "aggregate": "other", "reduce": ""}),
    *_hooks(
        PROM_METRICS,
        {
            "__init__": "vllm_config metric_types labelnames per_engine_labelvalues",
            "observe": "transfer_stats_data engine_idx=",
        },
    ),
]

_CONNECTOR = [
    _call(f"{CONNECTOR}.__init__", "vllm_config role kv_cache_config"),
    _call(f"{CONNECTOR}.bind_connector_metadata", "connector_metadata"),
    *_read(CONNECTOR, "requires_kv_delivery role _connector_metadata"),
    *_read(f"{_V1}.base:KVConnectorRole", "SCHEDULER WORKER"),
    _call(f"{_V1}.base:KVConnectorTransferResults", "finished_recving= failed_recving="),
    *_read("vllm.v1.metrics.cache_hit_source:CacheHitSource", "HOST DISK P2P"),
    *_read(STATS, "data"),
    _call(f"{PROM_METRICS}.__init__", "vllm_config metric_types labelnames per_engine_labelvalues"),
    *_read(PROM_METRICS, "_counter_cls _gauge_cls per_engine_labelvalues"),
]

_REQUEST = "vllm.v1.request:Request"
_OUTPUT = "vllm.v1.core.sched.output"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_UTILS = "vllm.v1.core.kv_cache_utils"

_SCHEDULING = [
    *_read(
        _REQUEST,
        "request_id block_hashes num_tokens num_prompt_tokens num_computed_tokens "
        "max_tokens kv_transfer_params skip_reading_prefix_cache",
    ),
    _call(f"{_REQUEST}.is_finished"),
    *_read(
        f"{_OUTPUT}:SchedulerOutput",
        "num_scheduled_tokens kv_connector_block_state preempted_req_ids",
    ),
    _call(f"{_OUTPUT}:KVConnectorBlockState.get_block_ids", "req_id"),
    *_read(f"{_OUTPUT}:KVConnectorBlockState", "boundary_state_offloads"),
    *_read(
        "vllm.v1.outputs:KVConnectorOutput",
        "finished_recving failed_recving invalid_block_ids kv_connector_worker_meta",
    ),
    _call("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", use=Use.SCHEDULER),
    _call(f"{_POOL}.touch", "blocks", Use.SCHEDULER),
    _call(f"{_POOL}.unpin_blocks", "blocks on_reuse", Use.SCHEDULER),
    _call(f"{_POOL}.free_blocks", "ordered_blocks", Use.SCHEDULER),
    _call(f"{_POOL}.get_num_free_blocks", use=Use.SCHEDULER),
    _call(f"{_POOL}.get_cached_block", "block_hash kv_cache_group_ids", Use.SCHEDULER),
    _call(f"{_POOL}.evict_blocks", "block_ids", Use.SCHEDULER),
    *_read(_POOL, "blocks null_block num_gpu_blocks", Use.SCHEDULER),
    *_read(f"{_UTILS}:KVCacheBlock", "block_id next_free_block"),
]

_CACHE = "vllm.v1.kv_cache_interface"

_KV_CACHE = [
    _call(f"{_UTILS}:resolve_kv_cache_block_sizes", "kv_cache_config vllm_config"),
    *_read(
        _CACHE,
        "ChunkedLocalAttentionSpec CrossAttentionSpec EncoderOnlyAttentionSpec RSWASpec",
    ),
    *_read(f"{_CACHE}:KVCacheSpec", "block_size dcp_sharded prefix_cacheable page_size_bytes"),
    *_read(f"{_CACHE}:FullAttentionSpec", "block_size"),
    *_read(f"{_CACHE}:SlidingWindowSpec", "sliding_window extra_retained_tokens"),
    *_read(f"{_CACHE}:MambaSpec", "mamba_cache_mode num_speculative_blocks"),
    *_read(f"{_CACHE}:UniformTypeKVCacheSpecs", "kv_cache_specs"),
    *_read(
        f"{_CACHE}:KVCacheConfig",
        "num_blocks kv_cache_tensors kv_cache_groups prefix_cacheable_group_ids kv_cache_layout",
    ),
    *_read(f"{_CACHE}:KVCacheTensor", "layers layer_stride block_stride"),
    *_read(f"{_CACHE}:KVCacheGroupSpec", "layer_names kv_cache_spec is_eagle_group"),
]

_CONFIG = [
    *_read(
        "vllm.config:VllmConfig",
        "parallel_config cache_config model_config speculative_config kv_transfer_config "
        "attention_config scheduler_config max_in_flight_tokens num_speculative_tokens",
    ),
    *_read(
        "vllm.config:ParallelConfig",
        "world_size rank decode_context_parallel_size pipeline_parallel_size nnodes_within_dp "
        "distributed_executor_backend",
    ),
    *_read(
        "vllm.config:SchedulerConfig",
        "policy max_num_batched_tokens long_prefill_token_threshold",
    ),
    *_read("vllm.config:CacheConfig", "enable_prefix_caching kv_cache_layout"),
    *_read(
        "vllm.config:ModelConfig",
        "runner_type attn_type is_prefix_caching_supported enable_sleep_mode",
    ),
    _call("vllm.config:ModelConfig.get_total_num_hidden_layers"),
    *_read("vllm.config:AttentionConfig", "hisparse_config"),
    *_read("vllm.config:SpeculativeConfig", "method"),
    _call("vllm.config:SpeculativeConfig.use_eagle"),
    _call("vllm.config:SpeculativeConfig.uses_draft_model"),
    *_read("vllm.config:KVTransferConfig", "kv_connector_extra_config kv_load_failure_policy"),
    _call("vllm.distributed.utils:get_pp_indices", "num_hidden_layers pp_rank pp_size"),
    _call(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector",
        "name module_path class_name",
    ),
    *_read("vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory", "_registry"),
]

_EVENTS = "vllm.distributed.kv_events"

_KV_EVENTS = [
    *_read("vllm.config:VllmConfig", "kv_events_config lora_config"),
    *_read("vllm.config:KVEventsConfig", "enable_kv_cache_events"),
    *_read(_EVENTS, "MEDIUM_CPU MEDIUM_STORAGE"),
    _call(
        f"{_EVENTS}:BlockStored",
        "block_hashes= parent_block_hash= token_ids= block_size= lora_id= medium= lora_name= "
        "extra_keys= group_idx= kv_cache_spec_kind= kv_cache_spec_sliding_window= locality= "
        "session_id=",
    ),
    _call(f"{_EVENTS}:BlockRemoved", "block_hashes= medium= group_idx= locality="),
    _call(
        f"{_UTILS}:generate_block_hash_extra_keys",
        "request start_token_idx end_token_idx start_mm_idx",
    ),
    _call(f"{_UTILS}:to_event_extra_keys", "extra_keys"),
    _call(f"{_CACHE}:get_kv_cache_spec_kind", "kv_cache_spec"),
    _call(f"{_CACHE}:get_kv_cache_spec_sliding_window", "kv_cache_spec"),
    *_read("vllm.envs", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"),
    *_read(_REQUEST, "all_token_ids lora_request session_id"),
    *_read(
        "vllm.lora.request:LoRARequest",
        "adapter_id name lora_int_id lora_name lora_path load_inplace",
    ),
    *_read(_POOL, "cached_block_hash_to_block", Use.SCHEDULER),
]

_ADAPTERS = [
    _call("vllm.lora.model_manager:LoRAModelManager.list_adapters", use=Use.ADAPTERS),
    *_read("vllm.lora.model_manager:LoRAModelManager", "lora_config", Use.ADAPTERS),
]

_NAMESPACE = [
    _call("vllm.utils.hashing:get_hash_fn_by_name", "hash_fn_name", Use.NAMESPACE),
    _call(f"{_UTILS}:resolve_none_hash_seed", "hash_fn", Use.NAMESPACE),
    *_read(_UTILS, "_NON_CRYPTO_HASH_FUNCTIONS", Use.NAMESPACE),
    *_read("vllm.platforms", "current_platform", Use.NAMESPACE),
    *_read("vllm.envs", "VLLM_USE_MODELSCOPE", Use.NAMESPACE),
    _call(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        "dtype block_size head_size kv_cache_dtype",
        Use.NAMESPACE,
    ),
    _call(
        "vllm.config:get_layers_from_vllm_config",
        "vllm_config layer_type layer_names",
        Use.NAMESPACE,
    ),
    _call("vllm.config:set_current_vllm_config", "vllm_config", Use.NAMESPACE),
    _call(
        "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend",
        use=Use.NAMESPACE,
    ),
    _call(
        "vllm.v1.attention.selector:get_attn_backend",
        "head_size= dtype= kv_cache_dtype= use_mla= has_sliding_window=",
        Use.NAMESPACE,
    ),
    *_read(f"{_CACHE}:AttentionSpec", "head_size", Use.NAMESPACE),
    *_read(_CACHE, "MLAAttentionSpec SlidingWindowMLASpec", Use.NAMESPACE),
]

_HANDOVER = [
    *_read(_REQUEST, "status"),
    *_read("vllm.v1.request:RequestStatus", "FINISHED_STOPPED FINISHED_LENGTH_CAPPED"),
    *_read("vllm.config:KVTransferConfig", "engine_id is_kv_producer is_kv_consumer"),
    *_read("vllm.config:ParallelConfig", "tensor_parallel_size data_parallel_index"),
    _call("vllm.config:ModelConfig.get_total_num_kv_heads"),
    *_read(f"{_CACHE}:AttentionSpec", "num_kv_heads"),
]

NEEDS: tuple[Need, ...] = (
    *_BASES,
    *_HOOKS,
    *_CONNECTOR,
    *_SCHEDULING,
    *_KV_CACHE,
    *_CONFIG,
    *_KV_EVENTS,
    *_ADAPTERS,
    *_NAMESPACE,
    *_HANDOVER,
)


def implemented(base: str) -> frozenset[str]:
    """Names of the methods that our subclass of ``base`` defines."""
    return frozenset(
        need.name.rpartition(".")[2]
        for need in NEEDS
        if need.kind is Kind.OVERRIDDEN and need.owner == base
    )
