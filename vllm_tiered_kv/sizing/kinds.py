# SPDX-License-Identifier: Apache-2.0
"""Of which kind each layer of a model is. There are many ways to say it in a ``config.json``."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from vllm_tiered_kv.sizing import families
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.hf_config import MAX_LAYERS, HfConfig


class Kind(enum.Enum):
    """What a layer keeps."""

    FULL = "full attention"
    WINDOW = "sliding window"
    CHUNK = "chunked attention"
    STATE = "recurrent state"
    BOTH = "full attention and a recurrent state"
    NOTHING = "nothing"


_BY_NAME = {
    "full_attention": Kind.FULL,
    "attention": Kind.FULL,
    "deepseek_sparse_attention": Kind.FULL,
    "sliding_attention": Kind.WINDOW,
    "sliding_window_attention": Kind.WINDOW,
    "chunked_attention": Kind.CHUNK,
    "linear_attention": Kind.STATE,
    "mamba": Kind.STATE,
    "mamba2": Kind.STATE,
    "conv": Kind.STATE,
    "short_conv": Kind.STATE,
    "hybrid": Kind.BOTH,
    "mlp": Kind.NOTHING,
    "moe": Kind.NOTHING,
}
_BY_LETTER = {"*": Kind.FULL, "M": Kind.STATE, "-": Kind.NOTHING, "E": Kind.NOTHING}
_STATES_ALONE = frozenset({"mamba", "mamba2", "falcon_mamba"})


def layer_kinds(config: HfConfig) -> list[Kind]:
    """One for each layer, in order, without those that use another layer's KV.

    Raises:
        SizingError: the number of layers is missing, or a layer's kind is not known.
    """
    kinds = list(_kinds(config))
    if len(kinds) > MAX_LAYERS:
        raise SizingError(f"{len(kinds)} layers are more than a model has")
    shared = config.num_kv_shared_layers or 0
    return kinds[: len(kinds) - shared] if 0 < shared < len(kinds) else kinds


def count_layers(config: HfConfig) -> int:
    """Raises: SizingError: the number is missing, or is not one of a model."""
    layers = config.first("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if config.model_type in families.TWO_ATTENTIONS and config.num_layers:
        layers = 2 * config.num_layers
    if layers is None:
        raise SizingError("the number of layers is missing (num_hidden_layers); give --layers")
    if layers > MAX_LAYERS:
        raise SizingError(f"{layers} layers are more than a model has")
    return layers


def _kinds(config: HfConfig) -> Iterator[Kind]:
    if config.hybrid_override_pattern and not config.layers_block_type:
        return _from_letters(config.hybrid_override_pattern)
    if config.model_type == "falcon_h1":
        return iter([Kind.BOTH] * count_layers(config))
    named = config.layers_block_type or config.layer_types
    if named:
        return _from_names(config, named)
    if config.model_type in _STATES_ALONE:
        return iter([Kind.STATE] * count_layers(config))
    if config.block_configs:
        return iter(_pruned(config))
    states = _with_states(config)
    if states is not None:
        return states
    return _with_windows(config, count_layers(config))


def _from_letters(pattern: str) -> Iterator[Kind]:
    for letter in pattern:
        if letter not in _BY_LETTER:
            raise SizingError(f"hybrid_override_pattern: {letter!r} is not known here")
        yield _BY_LETTER[letter]


def _from_names(config: HfConfig, names: list[str]) -> Iterator[Kind]:
    layers = config.num_hidden_layers or len(names)
    if len(names) < layers:
        raise SizingError(f"the types of {len(names)} of {layers} layers are given")
    for index, name in enumerate(names[:layers]):  # what follows are layers that predict ahead
        kind = _BY_NAME.get(name)
        if kind is None:
            raise SizingError(f"layer {index} is of type {name!r}, which is not known here")
        if kind is Kind.WINDOW and not config.sliding_window:
            raise SizingError("layer_types names sliding windows, but sliding_window is missing")
        if kind is Kind.WINDOW and not _has_window(config):
            kind = Kind.FULL
        if kind is Kind.CHUNK and not config.attention_chunk_size:
            kind = Kind.FULL
        yield kind


def _pruned(config: HfConfig) -> list[Kind]:
    kinds = []
    for block in config.block_configs or ():
        attends = block.attention is not None and not (
            block.attention.no_op or block.attention.replace_with_linear
        )
        kinds.append(Kind.FULL if attends else Kind.NOTHING)
    return kinds


def _with_states(config: HfConfig) -> Iterator[Kind] | None:
    """Layers of models that have recurrent states; None where nothing says so."""
    linear = config.linear_attn_config
    if linear is not None and linear.kda_layers:
        full = {layer - 1 for layer in linear.full_attn_layers}
    elif config.attn_type_list:
        full = {i for i, kind in enumerate(config.attn_type_list) if kind}
    elif config.attn_layer_period:
        offset = config.attn_layer_offset or 0
        full = {i for i in range(MAX_LAYERS) if i % config.attn_layer_period == offset}
    elif config.attn_layer_indices is not None:
        full = set(config.attn_layer_indices)
    elif config.full_attn_idxs is not None:
        full = set(config.full_attn_idxs)
    elif config.hybrid_layer_ids is not None:
        both = set(config.hybrid_layer_ids)
        return (Kind.BOTH if i in both else Kind.STATE for i in range(count_layers(config)))
    elif interval := (
        config.full_attention_interval or families.FULL_INTERVAL.get(config.model_type or "")
    ):
        full = {i for i in range(MAX_LAYERS) if (i + 1) % interval == 0}
    else:
        return None
    return (Kind.FULL if i in full else Kind.STATE for i in range(count_layers(config)))


def _with_windows(config: HfConfig, layers: int) -> Iterator[Kind]:
    family = config.model_type or ""
    if family.startswith("llama4") and config.attention_chunk_size:
        return _llama4(config, layers)
    if not _has_window(config) or config.use_sliding_window is False:
        return iter([Kind.FULL] * layers)
    if family.startswith("qwen"):
        first = config.max_window_layers if config.use_sliding_window else None
        first = layers if first is None else first
        return (Kind.WINDOW if i >= first else Kind.FULL for i in range(layers))
    pattern = config.sliding_window_pattern
    if isinstance(pattern, str):
        return (Kind.FULL if (pattern * layers)[i] == "G" else Kind.WINDOW for i in range(layers))
    interval = pattern or families.WINDOW_PATTERN.get(family, 0)
    if not interval:
        return iter([Kind.WINDOW] * layers)
    last = layers - 1 if family in families.LAST_IS_FULL else -1
    return (
        Kind.FULL if (i + 1) % interval == 0 or i == last else Kind.WINDOW for i in range(layers)
    )


def _has_window(config: HfConfig) -> bool:
    """A window that no prompt outgrows is none."""
    window, longest = config.sliding_window or 0, config.max_position_embeddings or 0
    return window > 0 and not 0 < longest <= window


def _llama4(config: HfConfig, layers: int) -> Iterator[Kind]:
    """Layers without rotary embedding have full attention (0 in ``no_rope_layers``)."""
    interval = config.no_rope_layer_interval or 4
    ropes = config.no_rope_layers or [int((i + 1) % interval != 0) for i in range(layers)]
    if len(ropes) < layers:
        raise SizingError(f"no_rope_layers names {len(ropes)} of {layers} layers")
    return (Kind.CHUNK if ropes[i] else Kind.FULL for i in range(layers))
