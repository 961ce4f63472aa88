# SPDX-License-Identifier: Apache-2.0
"""What an engine loads its weights from, read out of its configuration."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_tiered_kv import compat
from vllm_tiered_kv.identity import length, options
from vllm_tiered_kv.identity.canonical import Canonical, canonical

if TYPE_CHECKING:
    from vllm_tiered_kv.compat import LoadConfig, ModelConfig, VllmConfig

_FILE_FORMATS = frozenset(
    {
        "auto",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "safetensors",
    }
)


class Refused(Exception):
    """These weights cannot be identified; the message says why."""


class Part(enum.Enum):
    """Which of a source's files are meant."""

    ALL = "all"
    SETTINGS = "settings"  # Python and JSON
    CODE = "code"  # Python alone


class Source(msgspec.Struct, frozen=True):
    """One model's files."""

    model: str
    """A folder, a file, or a repository's name on the hub."""
    load_format: str
    revision: str | None = None
    cache_folder: str | None = None
    """Of the hub's cache; None for its default."""
    part: Part = Part.ALL
    generation_config: bool = False
    """Whether ``generation_config.json`` shapes numbers too."""


class Plan(msgspec.Struct, frozen=True):
    """All that loads: the target's sources, and the draft's where it has KV of its own."""

    target: tuple[Source, ...] = ()
    draft: tuple[Source, ...] | None = None
    dummy: Canonical | None = None
    """What random weights are made from; no file is read then."""


def plan(vllm_config: VllmConfig) -> Plan:
    """Decide what identifies the weights. No file is touched.

    Raises:
        Refused: this way of loading leaves nothing to identify them by.
    """
    model = vllm_config.model_config
    load = vllm_config.load_config
    drafter = _drafter(vllm_config)
    if load.load_format == "dummy":
        return Plan(dummy=_dummy(vllm_config), draft=None if drafter is None else ())
    target = tuple(_all_sources(model, load))
    draft = None
    if drafter is not None:
        draft_load = vllm_config.speculative_config.draft_load_config or load
        draft = tuple(_all_sources(drafter, draft_load))
    return Plan(target, draft)


def _all_sources(model: ModelConfig, load: LoadConfig) -> Iterator[Source]:
    own = _own(model, load)
    yield own
    config = model.hf_config
    if own.cache_folder is not None and not Path(own.model).exists():
        # Weights go to the folder that was asked for, all else to the hub's usual cache.
        yield msgspec.structs.replace(own, cache_folder=None, part=Part.SETTINGS)
    for attribute in ("audio_model_id", "text_model_id"):
        name = getattr(config, attribute, None)
        if isinstance(name, str) and name:
            yield Source(name, own.load_format, cache_folder=own.cache_folder)
    for name in (
        getattr(getattr(model, "multimodal_config", None), "mm_encoder_fp8_scale_path", None),
        getattr(config, "quantization_config_file", None),
    ):
        if isinstance(name, str) and name:
            yield Source(name, own.load_format, part=Part.SETTINGS)
    if model.trust_remote_code:
        for name in _code_repositories(getattr(config, "auto_map", None)):
            if name != own.model:
                yield Source(name, own.load_format, revision=model.code_revision, part=Part.CODE)


def _own(model: ModelConfig, load: LoadConfig) -> Source:
    load_format = str(load.load_format)
    if load_format not in _FILE_FORMATS:
        raise Refused(f"load_format {load_format!r} gives no files to identify the weights by")
    remote = getattr(model, "model_weights", "") or model.model
    if remote != model.model or "://" in remote:
        raise Refused(f"weights are streamed from {remote}")
    return Source(
        model=str(model.model),
        load_format=load_format,
        revision=model.revision,
        cache_folder=load.download_dir,
        generation_config=length.scales_by_temperature(model.hf_config.to_dict()),
    )


def _code_repositories(auto_map: object) -> Iterable[str]:
    """Repositories named in ``"repository--module.Class"`` entries, sorted."""
    found: set[str] = set()
    for entry in auto_map.values() if isinstance(auto_map, Mapping) else ():
        for reference in entry if isinstance(entry, (list, tuple)) else (entry,):
            if isinstance(reference, str) and "--" in reference:
                found.add(reference.partition("--")[0])
    return sorted(found)


def _drafter(vllm_config: VllmConfig) -> Any:
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in options.METHODS_WITHOUT_KV:
        return None
    if speculative.draft_model_config is None:
        raise Refused(f"speculative method {speculative.method!r} names no model")
    return speculative.draft_model_config


def _dummy(vllm_config: VllmConfig) -> Canonical:
    """Random weights: each rank fills its own share from a fixed seed with torch's generator,
    so the way the model is split and the device's generator count too."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    return canonical(
        {
            "config": canonical(model.hf_config, omit=options.VOLATILE_MODEL_KEYS),
            "device": compat.device_name(),
            "dtype": model.dtype,
            "expert_parallel": parallel.enable_expert_parallel and parallel.data_parallel_size,
            "pipeline_parallel": parallel.pipeline_parallel_size,
            "quantization": model.quantization,
            "seed": model.seed,
            "tensor_parallel": parallel.tensor_parallel_size,
            "torch": compat.torch_version(),
        }
    )
