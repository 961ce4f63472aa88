# SPDX-License-Identifier: Apache-2.0
"""What a model computes for a prompt."""

from __future__ import annotations

from collections import Counter

import msgspec

from vllm_tiered_kv.sizing import families
from vllm_tiered_kv.sizing.kinds import Kind, layer_kinds
from vllm_tiered_kv.sizing.read import Model, attention_heads, head_dim
from vllm_tiered_kv.sizing.timing import Pairs


def attention_pairs(model: Model) -> tuple[Pairs, ...]:
    """The operations of attention, layers that use others' KV included.

    A prefill of latent attention works on whole keys and values. Chunks are taken for windows.

    Raises:
        SizingError: the number of heads is missing.
    """
    config = model.config
    # Those that share KV compute all the same.
    counts = Counter(layer_kinds(msgspec.structs.replace(config, num_kv_shared_layers=None)))
    full = counts[Kind.FULL] + counts[Kind.BOTH]
    found = []
    if full:
        found.append(Pairs(full * _flops(model, full=True)))
    for kind, window in (
        (Kind.WINDOW, config.sliding_window),
        (Kind.CHUNK, config.attention_chunk_size),
    ):
        if counts[kind] and window:
            found.append(Pairs(counts[kind] * _flops(model, full=False), window))
    return tuple(found)


def _flops(model: Model, *, full: bool) -> int:
    """Of one layer, for each pair of tokens."""
    config = model.config
    heads = attention_heads(config)
    if config.kv_lora_rank and config.model_type not in families.EXPANDED_LATENT:
        key = (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0)
        return 2 * heads * (key + (config.v_head_dim or 0))
    dim = head_dim(config)
    if full and config.model_type in families.GLOBAL_HEAD_DIM:
        dim = config.global_head_dim or families.GLOBAL_HEAD_DIM[config.model_type or ""]
    return 4 * heads * dim
