# SPDX-License-Identifier: Apache-2.0
"""Which configurations are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_tiered_kv.compat.groups import has_state
from vllm_tiered_kv.compat.names import KVConnectorBase_V1
from vllm_tiered_kv.compat.unsupported import UnsupportedModel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def has_prefix_caching(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's own prefix cache on the device is on."""
    return bool(vllm_config.cache_config.enable_prefix_caching)


def schedules_by_priority(vllm_config: VllmConfig) -> bool:
    """Whether requests with a higher priority take blocks from those with a lower one."""
    return bool(vllm_config.scheduler_config.policy == "priority")


def tokens_in_flight(vllm_config: VllmConfig) -> int:
    """Tokens of all requests that can be scheduled and not yet settled."""
    return int(vllm_config.max_in_flight_tokens)


def draft_tokens(vllm_config: VllmConfig) -> int:
    """Draft tokens of one request in one step; 0 without speculative decoding."""
    return int(vllm_config.num_speculative_tokens)


def token_budget(vllm_config: VllmConfig) -> int:
    """Tokens of one request that vLLM schedules in one step at most, if there is no other."""
    return int(vllm_config.scheduler_config.max_num_batched_tokens)


def shared_token_budget(vllm_config: VllmConfig) -> int:
    """The same beside other requests."""
    budget = token_budget(vllm_config)
    long_prefill = int(vllm_config.scheduler_config.long_prefill_token_threshold)
    return min(budget, long_prefill) if long_prefill > 0 else budget


def tells_of_sleep() -> bool:
    """Whether this vLLM tells connectors before it takes KV memory away (0.33 does)."""
    return all(
        hasattr(KVConnectorBase_V1, name)
        for name in ("supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches")
    )


def check_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Refuse, by name, what would be served wrongly.

    Raises:
        UnsupportedModel: the message says what and why.
    """
    speculative = vllm_config.speculative_config
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        kind = "encoder" if model.attn_type == "encoder_only" else "pooling model"
        raise UnsupportedModel(
            f"this {kind} needs the whole prompt in one pass: it cannot go on from a prefix"
        )
    if model.enable_sleep_mode and not tells_of_sleep():
        raise UnsupportedModel(
            "sleep mode needs vLLM 0.33 or later: this one takes KV memory away while chunks are "
            "copied, and does not say so"
        )
    if vllm_config.attention_config.hisparse_config is not None:
        raise UnsupportedModel(
            "HiSparse is not supported: it has several block pools, and vLLM tells either it or "
            "this connector when a block that is being read is handed out again"
        )
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise UnsupportedModel(
            "extract_hidden_states is not supported yet: hidden states lie in a KV cache group of "
            "their own, which the drafter writes after the forward pass"
        )
    groups = kv_cache_config.kv_cache_groups
    drafts = any(group.is_eagle_group for group in groups)
    if speculative is not None:
        drafts = drafts or speculative.use_eagle() or speculative.uses_draft_model()
    if drafts:
        raise UnsupportedModel(
            "speculative decoding with a draft model that has KV of its own (EAGLE, MTP) is not "
            "supported yet: its last block lags behind the tokens"
        )
    if not groups:
        raise UnsupportedModel("this model has no KV cache")
    if all(has_state(group.kv_cache_spec) for group in groups):
        raise UnsupportedModel("models of Mamba layers alone are not supported yet")
    if len(kv_cache_config.prefix_cacheable_group_ids) != len(groups):
        raise UnsupportedModel("some KV cache groups of this model cannot be cached by prefix")
