# SPDX-License-Identifier: Apache-2.0
"""Which of vLLM's options say nothing about the numbers in a KV cache.

Every option that is not named here counts, so an option that a later vLLM adds makes a
namespace of its own (its version does so anyway) until somebody has judged it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from vllm_tiered_kv.identity.canonical import Canonical, canonical

VOLATILE_MODEL_KEYS = frozenset(
    {
        # where it came from and what read it
        "_name_or_path",
        "name_or_path",
        "_commit_hash",
        "transformers_version",
        "_attn_implementation_autoset",
        # written into the configuration by vLLM while it builds the model
        "max_model_len",
        "total_num_heads",
        "total_num_kv_heads",
    }
)
"""Keys of a model configuration that say nothing about its content, at any depth."""

_MODEL_ELSEWHERE = frozenset(
    {
        # ingredients of their own, or part of the weights' digest
        "model",
        "model_weights",
        "hf_config",
        "hf_text_config",
        "hf_config_path",
        "hf_overrides",
        "dtype",
        "max_model_len",
        "quantization",
        "quantization_config",
        "disable_sliding_window",
        "multimodal_config",
        "revision",
        "code_revision",
        "generation_config",
        "override_generation_config",
    }
)
_MODEL_IRRELEVANT = frozenset(
    {
        "allow_deprecated_quantization",
        "allowed_local_media_path",
        "allowed_media_domains",
        "config_format",
        "disable_cascade_attn",
        "enable_cumem_allocator",
        "enable_nccl_comm_suspend",
        "enable_prompt_embeds",
        "enable_sleep_mode",
        "enable_trace_replay",
        "enforce_eager",
        "hf_token",
        "io_processor_plugin",
        "is_submodel_config",
        "logits_processors",
        "logprobs_mode",
        "max_logprobs",
        "pooler_config",
        "renderer_num_workers",
        "return_sampling_mask",
        "served_model_name",
        "skip_tokenizer_init",
        "seed",  # of sampling; random weights have it in their digest
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
        "spec_target_max_model_len",
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "use_fp64_gumbel",
        "word_embeddings_untied_by_checkpoint",
    }
)
MODEL = _MODEL_ELSEWHERE | _MODEL_IRRELEVANT

_CACHE_ELSEWHERE = frozenset(
    {
        "block_size",
        "cache_dtype",
        "hash_block_size",
        "kv_cache_dtype_skip_layers",
        "kv_cache_layout",
        "mamba_block_size",
        "prefix_caching_hash_algo",
        "prefix_match_unit",
        "sliding_window",
    }
)
_CACHE_IRRELEVANT = frozenset(
    {
        "_block_size_resolved",
        "cache_hit_alignment_tokens",
        "effective_attention_block_size",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "is_attention_free",
        "kv_cache_max_concurrency",
        "kv_cache_memory_bytes",
        "kv_cache_size_tokens",
        "kv_offloading_backend",
        "kv_offloading_size",
        "mamba_page_size_padded",
        "num_cpu_blocks",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
        "prefix_cache_retention_interval",
        "skip_page_size_padded",
        "user_specified_block_size",
    }
)
CACHE = _CACHE_ELSEWHERE | _CACHE_IRRELEVANT
STATES = frozenset(
    {
        "enable_mamba_shared_prefix_checkpoint",
        "mamba_cache_dtype",
        "mamba_cache_mode",
        "mamba_ssm_cache_dtype",
        "replayssm_buffer_len",
        "use_kda_recoverssm",
        "use_replayssm",
    }
)
"""Cache options of Mamba and linear attention: vLLM sets some by the processor's abilities,
also for models without such layers, where they say nothing."""

BACKEND_CHOICE = frozenset({"backend", "backend_per_kind", "flash_attn_version"})
"""Options of attention that belong to the layout."""
_ATTENTION_IRRELEVANT = frozenset(
    {
        "flash_attn_max_num_splits_for_cuda_graph",
        "flex_attn_block_m",
        "flex_attn_block_n",
        "flex_attn_kv_block_size",
        "flex_attn_q_block_size",
        "hisparse_config",
        "indexer_sparse_logits",
        "minimax_m3_msa_decode_backend",
        "mla_prefill_backend",
        "sparse_mla_force_mqa",
        "sparse_mla_prefill_workspace_factor",
        "tokenspeed_mla_min_split_kv",
        "tq_max_kv_splits_for_cuda_graph",
    }
)
ATTENTION = BACKEND_CHOICE | _ATTENTION_IRRELEVANT

MULTIMODAL = frozenset(
    {
        "allow_missing_mm_embeddings",
        "enable_mm_embeds",
        "interleave_mm_strings",
        "limit_per_prompt",
        "mm_encoder_attn_backend",
        "mm_encoder_fp8_scale_path",  # its content is part of the weights' digest
        "mm_encoder_fp8_scale_save_margin",
        "mm_encoder_fp8_scale_save_path",
        "mm_encoder_tp_mode",
        "mm_ipc_gpu_memory_gb",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc",
        "skip_mm_profiling",
    }
)

LORA = frozenset(
    {
        "default_mm_loras",  # names and paths, which block hashes hold
        "fully_sharded_loras",
        "max_cpu_loras",
        "max_lora_cls_labels",
        "max_lora_rank",
        "max_loras",
        "specialize_active_lora",
    }
)

DRAFT_OPTIONS = (
    "disable_eagle_block_drop",
    "index_share_for_mtp_iteration",
    "num_speculative_tokens",
    "parallel_drafting",
    "use_heterogeneous_vocab",
)
"""Options of speculative decoding that shape the draft's KV, or which of it is kept."""

METHODS_WITHOUT_KV = frozenset({"medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix"})
"""Speculative methods whose drafter keeps no KV cache."""

MAMBA = frozenset({"backend", "ssu_algorithm"})

KERNELS = ("linear_backend", "linear_backend_per_quant", "moe_backend")
"""Options that choose the kernels of quantized layers: not only rounding depends on them. Some
leave activations as they are that others quantize, and some quantize weights anew."""

NUMBER_VARIABLES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_CPU_INT4_W4A8",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE",
    "VLLM_FLOAT32_MATMUL_PRECISION",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION",
    "VLLM_ROCM_USE_AITER_FP4BMM",
    "VLLM_ROCM_USE_AITER_FP8BMM",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4",
    "VLLM_USE_DEEP_GEMM",
    "VLLM_USE_DEEP_GEMM_E8M0",
    "VLLM_XPU_INC_WNA16_BACKEND",
)
"""Environment variables that quantise something more, or route elsewhere."""

LAYOUT_VARIABLES = (
    "VLLM_MLA_DISABLE",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)


def describe(config: object, leave_out: Collection[str]) -> Canonical:
    """All options of one of vLLM's configurations except ``leave_out``.

    Raises:
        Unidentifiable: an option has no content to go by.
        TypeError: ``config`` is not a dataclass.
    """
    names = [f.name for f in dataclasses.fields(config)]  # type: ignore[arg-type]
    return canonical({name: getattr(config, name) for name in names if name not in leave_out})
