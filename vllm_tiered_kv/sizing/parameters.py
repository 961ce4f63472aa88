# SPDX-License-Identifier: Apache-2.0
"""About how many parameters a model has, and how many of them a token passes through.

Matrices are counted; norms and biases are not. For models of one kind of layer that is within a
percent of the truth, for hybrids within a few.
"""

from __future__ import annotations

import enum

import msgspec

from vllm_tiered_kv.sizing import families
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.hf_config import HIDDEN, HfConfig
from vllm_tiered_kv.sizing.kinds import Kind, count_layers, layer_kinds
from vllm_tiered_kv.sizing.read import attention_heads, head_dim, kv_heads
from vllm_tiered_kv.sizing.states import inner_width


class _Role(enum.Enum):
    """What a layer has beside what mixes tokens."""

    NOTHING = 0
    DENSE = 1
    EXPERTS = 2


_OWN_ROLES = {
    "-": _Role.DENSE,
    "mlp": _Role.DENSE,
    "E": _Role.EXPERTS,
    "moe": _Role.EXPERTS,
}
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk")
_OF_THEIR_OWN = frozenset(_OWN_ROLES)
"""Where these are layers of their own, the others have none."""


class Parameters(msgspec.Struct, frozen=True):
    """Of a model."""

    total: int
    active: int
    """What one token is multiplied with; fewer than the total where there are experts."""
    source: str


def estimate(config: HfConfig) -> Parameters | None:
    """Counted from the file's dimensions; None where it does not say enough.

    Args:
        config: with what its family adds (:func:`~.families.with_defaults`).
    """
    try:
        return _count(config)
    except SizingError:
        return None


def _count(config: HfConfig) -> Parameters | None:
    if config.ffn_config is not None:
        given = msgspec.structs.asdict(config.ffn_config)
        config = msgspec.structs.replace(config, **given, ffn_config=None)
    hidden = config.first(*HIDDEN)
    if hidden is None or not config.vocab_size or config.model_type in families.TWO_ATTENTIONS:
        return None
    kinds = layer_kinds(msgspec.structs.replace(config, num_kv_shared_layers=None))
    total = active = 0
    for index, kind in enumerate(kinds):
        mixing = _mixing(config, kind, hidden)
        dense, of_token = _feed_forward(config, index, hidden)
        total += mixing + dense
        active += mixing + of_token
    embeddings = _embeddings(config, hidden)
    return Parameters(total + embeddings, active + embeddings, "estimated from config.json")


def _embeddings(config: HfConfig, hidden: int) -> int:
    tied = config.tie_word_embeddings
    if tied is None:
        tied = config.model_type in families.TIED
    count = (config.vocab_size or 0) * hidden * (1 if tied else 2)
    per_layer = (config.vocab_size_per_layer_input or 0) * (config.hidden_size_per_layer_input or 0)
    return count + per_layer * (count_layers(config) if per_layer else 0)


def _mixing(config: HfConfig, kind: Kind, hidden: int) -> int:
    """Of what mixes tokens: attention or a recurrent layer."""
    if kind is Kind.NOTHING:
        return 0
    count = 0
    if kind is not Kind.STATE:
        count += _attention(config, hidden)
    if kind in (Kind.STATE, Kind.BOTH):
        if config.linear_num_value_heads:
            keys = (config.linear_num_key_heads or 0) * (config.linear_key_head_dim or 0)
            values = config.linear_num_value_heads * (config.linear_value_head_dim or 0)
            count += hidden * (2 * keys + 3 * values)
        elif config.conv_L_cache:
            count += 4 * hidden * hidden
        elif config.linear_attn_config is not None:
            linear = config.linear_attn_config
            count += 4 * hidden * (linear.num_heads or 0) * (linear.head_dim or 0)
        else:
            count += 3 * hidden * inner_width(config)
    return count


def _attention(config: HfConfig, hidden: int) -> int:
    heads = attention_heads(config)
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim or 0
    if not rank:
        return hidden * head_dim(config) * (2 * heads + 2 * kv_heads(config))
    plain, value = config.qk_nope_head_dim or 0, config.v_head_dim or 0
    query = heads * (plain + rope)
    queries = config.q_lora_rank * (hidden + query) if config.q_lora_rank else hidden * query
    keys = hidden * (rank + rope) + rank * heads * (plain + value)
    return queries + keys + heads * value * hidden


def _feed_forward(config: HfConfig, index: int, hidden: int) -> tuple[int, int]:
    """Of one layer: all, and those of one token."""
    matrices = 2 if config.model_type in families.TWO_MATRICES else 3
    width = config.first("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim") or 4 * hidden
    role = _role(config, index)
    if role is _Role.NOTHING:
        return 0, 0
    if role is _Role.DENSE:
        if config.intermediate_size_mlp:
            width = config.intermediate_size_mlp
        dense = matrices * hidden * width
        return dense, dense
    count, chosen = _experts(config), config.first(*_CHOSEN) or 1
    own = config.first("moe_intermediate_size") or width
    shared = _shared_width(config, own)
    always = matrices * hidden * shared + hidden * count
    expert = matrices * hidden * own
    return always + count * expert, always + min(chosen, count) * expert


def _role(config: HfConfig, index: int) -> _Role:
    names = config.layers_block_type or list(config.hybrid_override_pattern or "")
    if not _OF_THEIR_OWN.isdisjoint(names):
        return _OWN_ROLES.get(names[index], _Role.NOTHING)
    return _Role.EXPERTS if _has_experts(config, index) else _Role.DENSE


def _shared_width(config: HfConfig, own: int) -> int:
    given = config.first(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
    )
    if given is not None:
        return given
    if (config.model_type or "").startswith("llama4"):
        return own
    shared = config.first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return own * (shared or 0)


def _experts(config: HfConfig) -> int:
    names = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
    return config.first(*names) or 1


def _has_experts(config: HfConfig, index: int) -> bool:
    dense = config.first("first_k_dense_replace", "moe_layer_start_index") or 0
    if _experts(config) <= 1 or index < dense:
        return False
    if isinstance(config.moe_layer_freq, list):
        return index < len(config.moe_layer_freq) and config.moe_layer_freq[index] > 0
    if config.expert_layer_period:
        return index % config.expert_layer_period == (config.expert_layer_offset or 0)
    step = config.moe_layer_freq or config.decoder_sparse_step or config.interleave_moe_layer_step
    if config.decoder_sparse_step or config.interleave_moe_layer_step:
        return (index + 1) % (step or 1) == 0
    return index % (step or 1) == 0
