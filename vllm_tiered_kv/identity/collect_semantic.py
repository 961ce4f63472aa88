# SPDX-License-Identifier: Apache-2.0
"""Read what the numbers mean out of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import length, options
from vllm_tiered_kv.identity.canonical import Canonical, canonical
from vllm_tiered_kv.identity.reader import NOTHING, Reader, chosen, dtype_name, environment
from vllm_tiered_kv.identity.semantic import DraftIdentity, SemanticIdentity

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import ModelConfig, VllmConfig

_ROPE_KEYS = (
    "dual_chunk_attention_config",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
_NO_SEED: str | None = ""


def collect_semantic(vllm_config: VllmConfig, reader: Reader) -> SemanticIdentity:
    """The meaning, but for the weights; what cannot be told is left to ``reader``."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    read = reader.read
    content: Mapping[str, object] = read(
        "the model configuration", lambda: _plain_config(model.hf_config), {}
    )
    multimodal = _active_multimodal(model)
    draft = read("the draft model", lambda: _drafter(vllm_config), None)
    draft_content: Mapping[str, object] = (
        read("the draft model", lambda: _plain_config(draft.hf_config), {}) if draft else {}
    )
    by_length = length.depends_on_length(content, multimodal=multimodal is not None) or (
        length.depends_on_length(draft_content, multimodal=False)
    )
    algorithm = read("the hash algorithm", lambda: str(cache.prefix_caching_hash_algo), "")
    seed = read("the hash seed", lambda: compat.hash_seed(algorithm), _NO_SEED)
    scales = bool(getattr(cache, "calculate_kv_scales", False))
    architecture = read("the architecture", lambda: str(model.architecture), "")
    attention_type = read("the attention type", lambda: str(model.attn_type), "")
    cache_left_out = options.CACHE | (options.STATES if attention_type == "decoder" else set())

    reader.refuse_if(seed is None, f"block hashes ({algorithm}) have a random seed per process")
    reader.refuse_if(scales, "KV scales are calculated from the first requests")
    reader.refuse_if(
        getattr(vllm_config, "weight_transfer_config", None) is not None,
        "weights may be replaced while the engine runs",
    )
    reader.refuse_if(
        architecture.startswith("Transformers")
        and length.rope_types(content) & length.LENGTH_DEPENDENT_ROPE,
        "the Transformers backend scales this model's rope by the longest running sequence",
    )
    return SemanticIdentity(
        vllm_version=read("vLLM's version", compat.vllm_version, ""),
        architecture=architecture,
        model=read("the model configuration", lambda: _model(model, content), NOTHING),
        model_options=read("model options", lambda: _model_options(model, content), NOTHING),
        attention_type=attention_type,
        dtype=read("the dtype", lambda: dtype_name(model.dtype), ""),
        quantization=read("quantization", lambda: _optional(model.quantization), None),
        quantization_config=read(
            "quantization options",
            lambda: canonical(getattr(model, "quantization_config", None)),
            NOTHING,
        ),
        rope=read("rope settings", lambda: _rope(model), NOTHING),
        max_model_len=read("the maximum length", lambda: int(model.max_model_len), None)
        if by_length
        else None,
        sliding_window=read("the sliding window", model.get_sliding_window, None),
        sliding_window_disabled=bool(getattr(model, "disable_sliding_window", False)),
        attention_options=read(
            "attention options",
            lambda: options.describe(vllm_config.attention_config, options.ATTENTION),
            NOTHING,
        ),
        cache_dtype=read("the cache dtype", lambda: str(cache.cache_dtype), ""),
        cache_dtype_skip_layers=read(
            "layers without a quantized cache",
            lambda: tuple(sorted(map(str, cache.kv_cache_dtype_skip_layers))),
            (),
        ),
        calculated_scales=scales,
        cache_options=read(
            "cache options", lambda: options.describe(cache, cache_left_out), NOTHING
        ),
        engine_options=read("engine options", lambda: _engine_options(vllm_config), NOTHING),
        multimodal=read(
            "multimodal options",
            lambda: _described(multimodal, options.MULTIMODAL),
            None,
        ),
        lora=read("LoRA options", lambda: _described(vllm_config.lora_config, options.LORA), None),
        draft=read("the draft model", lambda: _draft(vllm_config, draft), None),
        hash_algorithm=algorithm,
        hash_seed=seed or "",
        environment=environment(options.NUMBER_VARIABLES),
    )


def _plain_config(hf_config: Any) -> Mapping[str, object]:
    config: Mapping[str, object] = hf_config.to_dict()
    return config


def _model(model: ModelConfig, content: Mapping[str, object]) -> Canonical:
    leave_out = set(options.VOLATILE_MODEL_KEYS)
    if length.scales_by_temperature(content):
        # vLLM writes its decision here while it builds the model, in the workers alone.
        leave_out.add("attn_temperature_tuning")
    configs = [model.hf_config]
    if model.hf_text_config is not model.hf_config:
        configs.append(model.hf_text_config)
    return canonical(configs, omit=leave_out)


def _model_options(model: ModelConfig, content: Mapping[str, object]) -> Canonical:
    described = options.describe(model, options.MODEL)
    if not length.scales_by_temperature(content):
        return described
    override = model.override_generation_config.get("attn_temperature_tuning")
    return canonical([described, override])


def _rope(model: ModelConfig) -> Canonical:
    config = model.hf_text_config
    found = {key: getattr(config, key, None) for key in _ROPE_KEYS}
    return canonical({key: value for key, value in found.items() if value is not None})


def _active_multimodal(model: ModelConfig) -> Any:
    config = getattr(model, "multimodal_config", None)
    return None if getattr(config, "language_model_only", False) else config


def _engine_options(vllm_config: VllmConfig) -> Canonical:
    mamba = getattr(vllm_config, "mamba_config", None)
    additional = vllm_config.additional_config
    hashed = getattr(additional, "compute_hash", None)
    return canonical(
        {
            "additional": hashed() if callable(hashed) else additional,
            "diffusion": getattr(vllm_config, "diffusion_config", None),
            "kernels": chosen(getattr(vllm_config, "kernel_config", None), options.KERNELS),
            "mamba": _described(mamba, options.MAMBA),
        }
    )


def _drafter(vllm_config: VllmConfig) -> Any:
    """The model configuration of a draft that keeps KV, or None."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in options.METHODS_WITHOUT_KV:
        return None
    if speculative.draft_model_config is None:
        raise ValueError(f"method {speculative.method!r} names no model")
    return speculative.draft_model_config


def _draft(vllm_config: VllmConfig, draft: Any) -> DraftIdentity | None:
    if draft is None:
        return None
    speculative = vllm_config.speculative_config
    return DraftIdentity(
        method=str(speculative.method),
        model=canonical(draft.hf_config, omit=options.VOLATILE_MODEL_KEYS),
        dtype=dtype_name(draft.dtype),
        cache_dtype=str(
            getattr(speculative, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype
        ),
        quantization=_optional(draft.quantization),
        options=chosen(speculative, options.DRAFT_OPTIONS),
    )


def _described(config: Any, leave_out: Iterable[str]) -> Canonical | None:
    return None if config is None else options.describe(config, frozenset(leave_out))


def _optional(value: object) -> str | None:
    return None if value is None else str(value)
