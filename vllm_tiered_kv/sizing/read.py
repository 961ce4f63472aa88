# SPDX-License-Identifier: Apache-2.0
"""From a model's ``config.json`` to the layers that keep something."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from vllm_tiered_kv.sizing import families
from vllm_tiered_kv.sizing.dtypes import Dtype, parse_dtype
from vllm_tiered_kv.sizing.errors import SizingError
from vllm_tiered_kv.sizing.hf_config import HIDDEN, HfConfig
from vllm_tiered_kv.sizing.kinds import Kind, layer_kinds
from vllm_tiered_kv.sizing.layers import AttentionLayers, Reach, Shape, StateLayers
from vllm_tiered_kv.sizing.states import state_layers

_NOT_KNOWN = {
    "compress_ratios": "a compressed cache (DeepSeek V4)",
    "hybrid_layer_pattern": "heads that differ between layers (MiMo V2)",
    "swa_head_dim": "heads that differ between layers",
    "swa_num_key_value_heads": "heads that differ between layers",
    "attention_other_setting": "heads that differ between layers (Step 3.5)",
    "is_encoder_decoder": "an encoder with a cache of its own",
}
_SCALE_BLOCK = 128
"""Numbers that share one scale in DeepSeek's 8-bit formats; a scale takes four bytes."""


class Choices(msgspec.Struct, frozen=True):
    """What is decided when the model is served."""

    kv: Dtype | None = None
    """Format of the KV cache; None: what the file says."""
    state: Dtype | None = None
    """Format of recurrent memory; None: what the file says."""


class Model(msgspec.Struct, frozen=True):
    """What was read."""

    config: HfConfig
    """With what its family adds."""
    shape: Shape
    dtype: Dtype
    """Of the weights' and activations' numbers."""
    kv_dtype: Dtype
    kv_dtype_source: str
    """``"--kv-dtype"``, for instance."""


def read_model(config: HfConfig, choices: Choices) -> Model:
    """The layers of a model.

    Raises:
        SizingError: something is missing, contradictory, or of a kind that is not known here.
    """
    for name, what in _NOT_KNOWN.items():
        if getattr(config, name):
            raise SizingError(
                f"{name}: {what} is not known here, and any figure would be wrong; describe the "
                "layers by flags, without the model"
            )
    config = families.with_defaults(config)
    model = _model_dtype(config)
    kv, source = _kv_dtype(config, choices.kv, model)
    counts = Counter(layer_kinds(config))
    attention: list[AttentionLayers] = []
    full = counts[Kind.FULL] + counts[Kind.BOTH]
    if full:
        attention += _full(config, full, kv)
    if counts[Kind.WINDOW]:
        extra = families.EXTRA_WINDOW_TOKENS.get(config.model_type or "", 0)
        window = (config.sliding_window or 0) + extra
        attention.append(_heads(config, counts[Kind.WINDOW], kv, Reach.WINDOW, window))
    if counts[Kind.CHUNK]:
        chunk = config.attention_chunk_size or 0
        attention.append(_heads(config, counts[Kind.CHUNK], kv, Reach.CHUNK, chunk))
    states: tuple[StateLayers, ...] = ()
    recurrent = counts[Kind.STATE] + counts[Kind.BOTH]
    if recurrent:
        states = (state_layers(config, recurrent, model, choices.state),)
    return Model(config, Shape(tuple(attention), states), model, kv, source)


def _full(config: HfConfig, count: int, kv: Dtype) -> list[AttentionLayers]:
    if config.block_configs:
        return _pruned(config, kv)
    if _is_latent(config):
        return _latent(config, count, kv)
    layers = _heads(config, count, kv)
    family = config.model_type or ""
    dim = config.global_head_dim or families.GLOBAL_HEAD_DIM.get(family)
    if family in families.GLOBAL_HEAD_DIM and dim is not None:
        heads = config.num_global_key_value_heads if config.attention_k_eq_v else None
        heads = heads or layers.kv_heads
        layers = msgspec.structs.replace(layers, kv_heads=heads, key_dim=dim, value_dim=dim)
    return [layers]


def _is_latent(config: HfConfig) -> bool:
    return bool(config.kv_lora_rank) and config.model_type not in families.EXPANDED_LATENT


def _latent(config: HfConfig, count: int, kv: Dtype) -> list[AttentionLayers]:
    """One vector for all heads (DeepSeek-V2, 2024), in V3.2 with the keys of an indexer."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if rank is None or rope is None:
        raise SizingError("kv_lora_rank is given, but qk_rope_head_dim is missing; give --rope-dim")
    numbers, element = rank + rope, kv.nbytes
    if not config.index_topk:
        return [AttentionLayers(count, 1, numbers, 0, element, what="latent attention")]
    width = config.index_head_dim
    if width is None:
        raise SizingError("index_topk is given, but index_head_dim is missing")
    if kv is Dtype.FP8:
        numbers = rank + _scales(rank) + 2 * rope  # the rotated part stays in 16 bits
    return [
        AttentionLayers(count, 1, numbers, 0, element, what="latent attention"),
        AttentionLayers(count, 1, width + _scales(width), 0, 1, what="indexer keys"),
    ]


def _scales(numbers: int) -> int:
    return numbers // _SCALE_BLOCK * 4


def _heads(
    config: HfConfig, count: int, kv: Dtype, reach: Reach = Reach.FULL, window: int = 0
) -> AttentionLayers:
    dim = head_dim(config)
    return AttentionLayers(count, kv_heads(config), dim, dim, kv.nbytes, reach, window)


def _pruned(config: HfConfig, kv: Dtype) -> list[AttentionLayers]:
    """Layers whose numbers of heads differ."""
    heads, dim = attention_heads(config), head_dim(config)
    counts: Counter[int] = Counter()
    for block in config.block_configs or ():
        found = block.attention
        if found is None or found.no_op or found.replace_with_linear:
            continue
        if not found.n_heads_in_group:
            raise SizingError("block_configs: an attention layer lacks n_heads_in_group")
        counts[heads // found.n_heads_in_group] += 1
    return [AttentionLayers(counts[n], n, dim, dim, kv.nbytes) for n in sorted(counts)]


def attention_heads(config: HfConfig) -> int:
    """Of one layer.

    Raises:
        SizingError: the number is missing.
    """
    heads = config.first("num_attention_heads", "n_head", "n_heads")
    if heads is None:
        raise SizingError("num_attention_heads is missing; give --heads")
    return heads


def kv_heads(config: HfConfig) -> int:
    """Of one layer, before they are spread over GPUs.

    Raises:
        SizingError: the number is missing.
    """
    if config.model_type in families.EXPANDED_LATENT:
        return attention_heads(config)
    if config.multi_query and not config.new_decoder_architecture:
        return 1
    if config.multi_query_attention is False:
        return attention_heads(config)
    given = config.first(
        "n_head_kv",
        "num_kv_heads",
        "num_key_value_heads",
        "multi_query_group_num",
        "num_attention_groups",
    )
    if given is None and config.attn_config is not None:
        given = config.attn_config.kv_n_heads
    if given is None and config.inside and config.model_type not in families.HEADS_ALIKE:
        raise SizingError(
            "num_key_value_heads is missing where the file describes the text model, and what "
            f"{config.model_type} has then is not known here; give --kv-heads"
        )
    return given or attention_heads(config)


def head_dim(config: HfConfig) -> int:
    """Numbers of a key, of one head.

    Raises:
        SizingError: neither it nor what it follows from is there.
    """
    if config.model_type in families.EXPANDED_LATENT:
        return (config.qk_nope_head_dim or 0) + (config.qk_rope_head_dim or 0)
    given = config.first("head_dim", "kv_channels", "hidden_size_per_head")
    if given is not None:
        return given
    hidden, heads = config.first(*HIDDEN), attention_heads(config)
    if hidden is None:
        raise SizingError("head_dim is missing, and hidden_size as well; give --head-dim")
    if hidden < heads:
        raise SizingError(f"hidden_size {hidden} is less than one number for each of {heads} heads")
    if config.model_type == "zamba2":
        hidden *= 2  # its attention sees the layer's input and the model's side by side
    return hidden // heads


def _model_dtype(config: HfConfig) -> Dtype:
    named = config.dtype or config.torch_dtype
    if named is None:
        return Dtype.BF16
    found = parse_dtype(named)
    # vLLM computes in 16 bits what is stored in 32, unless it is told otherwise.
    return Dtype.BF16 if found in (Dtype.FP32, Dtype.FP8) else found


def _kv_dtype(config: HfConfig, asked: Dtype | None, model: Dtype) -> tuple[Dtype, str]:
    if asked is not None:
        return asked, "--kv-dtype"
    scheme = _quantised_cache(config)
    if scheme is not None:
        return scheme, "quantization_config"
    named = config.dtype or config.torch_dtype
    return model, f"the model's {named}" if named else "no format is given: 16 bits"


def _quantised_cache(config: HfConfig) -> Dtype | None:
    """The cache's format where the checkpoint's tool has set one and vLLM follows it."""
    quantisation = config.quantization_config or {}
    method = str(quantisation.get("quant_method", "")).lower().replace("_", "-")
    producer = quantisation.get("producer")
    by_modelopt = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if method == "compressed-tensors" and not _is_latent(config):  # llm-compressor
        found = quantisation.get("kv_cache_scheme")
        return _of_scheme(found) if isinstance(found, dict) else None
    if not (by_modelopt or method.startswith("modelopt")):
        return None
    inner = quantisation.get("quantization")
    places = [inner, quantisation] if isinstance(inner, dict) else [quantisation]
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        for place in places:
            found = place.get(name)
            if isinstance(found, dict):
                return _of_scheme(found)
            if isinstance(found, str):
                return Dtype.FP8 if found.lower() == "fp8" else _refuse(found)
    return None


def _of_scheme(scheme: dict[str, Any]) -> Dtype:
    is_fp8 = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return Dtype.FP8 if is_fp8 else _refuse(scheme)


def _refuse(found: object) -> Dtype:
    raise SizingError(f"the cache's format {found!r} is not known here; give --kv-dtype")
