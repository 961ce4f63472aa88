# SPDX-License-Identifier: Apache-2.0
"""Identities read from vLLM's own configuration objects."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_tiered_kv import compat, identity
from vllm_tiered_kv.identity import length, options, weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
KNOWN = identity.Established("ab" * 16)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 1024,
}


def make_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def configure(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    settings = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 2048}
    arguments = {**settings, **arguments}
    return EngineArgs(model=str(model), **arguments).create_engine_config()


def groups(vllm_config: Any, **changes: Any) -> Any:
    """The KV cache configuration that vLLM would make of a Llama."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        get_kv_quant_mode,
    )

    cache = vllm_config.cache_config
    fields = {
        "block_size": cache.block_size,
        "num_kv_heads": 2,
        "head_size": 32,
        "dtype": kv_cache_dtype_str_to_dtype(cache.cache_dtype, vllm_config.model_config),
        "kv_quant_mode": get_kv_quant_mode(cache.cache_dtype),
    }
    spec = FullAttentionSpec(**{**fields, **changes})
    return KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)],
        kv_cache_layout="LBHNC",
        hash_block_size=cache.block_size,
    )


def collect(vllm_config: Any, chunk_tokens: int = 128, **changes: Any) -> identity.Identity:
    return identity.collect(vllm_config, groups(vllm_config, **changes), chunk_tokens)


def namespace(model: Path, **arguments: Any) -> identity.Namespace:
    found = collect(configure(model, **arguments))
    assert found.reasons == ()
    return found.namespace(KNOWN)


@pytest.fixture(scope="module")
def usual(model) -> identity.Namespace:
    return namespace(model)


@pytest.mark.parametrize(
    ("arguments", "semantic", "layout"),
    [
        ({"dtype": "float32"}, True, True),
        ({"kv_cache_dtype": "fp8"}, True, True),
        ({"hf_overrides": {"rope_theta": 500000.0}}, True, False),
        ({"hf_overrides": {"rms_norm_eps": 1e-6}}, True, False),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, True, False),
        ({"enable_lora": True}, True, False),
        ({"model_impl": "vllm"}, True, False),
        ({"linear_backend": "marlin"}, True, False),
        ({"moe_backend": "triton"}, True, False),
        ({"block_size": 64}, False, True),
        # What says nothing about the bytes
        ({"max_model_len": 1024}, False, False),
        ({"max_num_seqs": 3}, False, False),
        ({"seed": 7}, False, False),
        ({"served_model_name": "other"}, False, False),
        ({"num_gpu_blocks_override": 99}, False, False),
        ({"hf_overrides": {"transformers_version": "1.0"}}, False, False),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else None,
)
def test_what_changes_a_namespace(model, usual, arguments, semantic, layout):
    other = namespace(model, **arguments)
    assert (other.semantic_digest != usual.semantic_digest) is semantic
    assert (other.layout_digest != usual.layout_digest) is layout


def test_a_copied_folder_has_the_same_namespace(model, usual, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    assert namespace(copy) == usual


def test_another_configuration_file_has_another_namespace(usual, tmp_path):
    other = namespace(make_model(tmp_path / "other", rope_theta=20000.0))
    assert other.semantic_digest != usual.semantic_digest
    assert other.semantic.rope != usual.semantic.rope


def test_the_maximum_length_counts_with_longrope(tmp_path):
    folder = make_model(tmp_path / "long", rope_parameters=LONGROPE)
    short, long = namespace(folder, max_model_len=1024), namespace(folder, max_model_len=2048)
    assert (short.semantic.max_model_len, long.semantic.max_model_len) == (1024, 2048)
    assert short.semantic_digest != long.semantic_digest
    assert short.layout_digest == long.layout_digest


def test_one_configuration_under_many_changes(model, usual, monkeypatch):
    """Cheap variations on one configuration, which costs seconds to make."""
    config = configure(model)

    def made(**arguments: Any) -> identity.Namespace:
        return collect(config, **arguments).namespace(KNOWN)

    assert made() == usual
    assert made(chunk_tokens=256).layout_digest != usual.layout_digest
    assert made(num_kv_heads=1).layout_digest != usual.layout_digest
    assert made(num_kv_heads=1).semantic_digest == usual.semantic_digest

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert made().semantic.hash_seed == "0"
    assert made().semantic_digest != usual.semantic_digest
    monkeypatch.delenv("PYTHONHASHSEED")

    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert made().semantic_digest != usual.semantic_digest
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8")
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    assert made().layout_digest != usual.layout_digest
    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION")

    monkeypatch.setattr(compat, "instruction_set", lambda: "x86_64 avx2")
    assert made().layout_digest != usual.layout_digest
    assert made().semantic_digest == usual.semantic_digest
    monkeypatch.undo()

    known = identity.collect(config, groups(config), 128, attention_backends=[["Flash"]])
    assert known.layout.groups[0].backends == ("Flash",)

    config.parallel_config.tensor_parallel_size = 2
    assert made().semantic_digest == usual.semantic_digest
    assert made().layout_digest != usual.layout_digest


def test_what_cannot_be_told_is_a_reason_not_a_failure(model, monkeypatch):
    config = configure(model)
    cases = {
        "random seed": lambda: setattr(config.cache_config, "prefix_caching_hash_algo", "xxhash"),
        "first requests": lambda: setattr(config.cache_config, "calculate_kv_scales", True),
        "while the engine runs": lambda: setattr(config, "weight_transfer_config", object()),
        "engine options": lambda: setattr(config, "additional_config", {"a": object()}),
        "model configuration": lambda: setattr(config.model_config.hf_config, "live", object()),
        "draft model": lambda: setattr(config, "speculative_config", object()),
    }
    for text, spoil in cases.items():
        assert text not in " ".join(collect(config).reasons)
        spoil()
        found = collect(config)
        assert text in " ".join(found.reasons)
        assert not found.namespace(KNOWN).persistent


def test_multimodal_settings_count_where_they_shape_embeddings(model, usual):
    from vllm.config import MultiModalConfig

    config = configure(model)

    def semantic(**settings: Any) -> identity.SemanticIdentity:
        config.model_config.multimodal_config = MultiModalConfig(**settings)
        return collect(config).namespace(KNOWN).semantic

    plain = semantic()
    assert plain != usual.semantic
    assert plain.max_model_len == 2048
    assert semantic(mm_processor_cache_gb=1, limit_per_prompt={"image": 1}) == plain
    assert semantic(mm_processor_kwargs={"num_crops": 4}) != plain
    assert semantic(media_io_kwargs={"video": {"num_frames": 3}}) != plain
    assert semantic(video_pruning_rate=0.5) != plain
    assert semantic(language_model_only=True) == usual.semantic


def test_rope_that_follows_the_batch_is_a_reason(model):
    config = configure(model)
    config.model_config.hf_config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0}
    assert collect(config).reasons == ()
    config.model_config._architecture = "TransformersForCausalLM"
    assert "Transformers backend" in collect(config).reasons[0]


def test_attention_temperature_counts_by_its_setting(model, monkeypatch):
    monkeypatch.setattr(length, "scales_by_temperature", lambda _: True)
    config = configure(model)

    def semantic() -> identity.SemanticIdentity:
        return collect(config).namespace(KNOWN).semantic

    plain = semantic()
    assert plain.max_model_len == 2048
    config.model_config.hf_config.attn_temperature_tuning = True  # vLLM's own note
    assert semantic() == plain
    config.model_config.override_generation_config = {"temperature": 0.5}
    assert semantic() == plain
    config.model_config.override_generation_config = {"attn_temperature_tuning": True}
    assert semantic() != plain


def test_a_bad_group_is_a_reason(model, monkeypatch):
    def explode(*_: object) -> str:
        raise ImportError("renamed")

    monkeypatch.setattr(compat, "attention_kernel", explode)
    monkeypatch.setattr(compat, "attention_backends", explode)
    if not compat.is_cpu():
        pytest.skip("kernels are looked up on the CPU platform only")
    config = configure(model)
    reasons = " ".join(collect(config).reasons)
    assert "attention kernel cannot be told: renamed" in reasons
    assert "attention backends cannot be told: renamed" in reasons


def test_the_cpu_kernel_is_vllms_own_choice(model):
    if not compat.is_cpu():
        pytest.skip("for the CPU platform")
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    config = configure(model)
    layout = collect(config).layout
    assert layout.groups[0].kernel == _get_attn_isa(torch.bfloat16, 128, 32, "auto")
    assert layout.groups[0].backends == ("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",)
    assert layout.instruction_set
    assert layout.device == "cpu"


def weights_of(config: Any) -> identity.WeightsResult:
    found: list[identity.WeightsResult] = []
    done = threading.Event()
    digester = identity.start_weights(config, lambda r: (found.append(r), done.set()))
    assert done.wait(30)
    assert digester.join(30)
    return found[0]


def test_weights_of_a_real_configuration(model, tmp_path, monkeypatch):
    config = configure(model)
    copied = configure(shutil.copytree(model, tmp_path / "copy"))
    other = make_model(tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"Weights")

    early = weights_of(config)  # the folder is younger than this process
    assert isinstance(early, identity.Unestablished)
    assert "after this engine started" in early.reason

    monkeypatch.setattr(weights, "process_start_ns", lambda: time.time_ns() + 10**12)
    found = weights_of(config)
    assert isinstance(found, identity.Established)
    assert weights_of(copied) == found
    assert weights_of(configure(other)) != found
    assert collect(config).namespace(found) == collect(copied).namespace(found)
    assert collect(config).namespace(found).persistent

    random = weights_of(configure(model, load_format="dummy"))
    assert isinstance(random, identity.Established)
    assert random != found


def test_a_draft_model_is_part_of_the_identity(model, usual, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "process_start_ns", lambda: None)
    draft = make_model(tmp_path / "draft", num_hidden_layers=1)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    config = configure(model, speculative_config=speculative)
    found = collect(config)
    assert found.semantic_without_weights.draft is not None
    assert found.semantic_without_weights.draft.method == "draft_model"
    digests = weights_of(config)
    assert isinstance(digests, identity.Established)
    assert digests.draft is not None
    made = found.namespace(digests)
    assert made.persistent
    assert made.semantic.draft is not None
    assert made.semantic.draft.weights == digests.draft
    assert made.semantic_digest != usual.semantic_digest

    long = make_model(tmp_path / "long", rope_parameters=LONGROPE)
    by_length = configure(model, speculative_config={**speculative, "model": str(long)})
    assert collect(by_length).semantic_without_weights.max_model_len == 2048
    assert found.semantic_without_weights.max_model_len is None

    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    assert namespace(model, speculative_config=lookup) == usual


def test_options_are_spelled_as_vllm_spells_them(model):
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        KernelConfig,
        LoRAConfig,
        ModelConfig,
        MultiModalConfig,
        SpeculativeConfig,
    )

    for config, names in (
        (ModelConfig, options.MODEL),
        (CacheConfig, options.CACHE | options.STATES),
        (AttentionConfig, options.ATTENTION),
        (KernelConfig, frozenset(options.KERNELS)),
        (MultiModalConfig, options.MULTIMODAL),
        (LoRAConfig, options.LORA),
        (SpeculativeConfig, frozenset(options.DRAFT_OPTIONS)),
    ):
        assert names <= {f.name for f in dataclasses.fields(config)}, config.__name__
    from vllm import envs

    assert {*options.NUMBER_VARIABLES, *options.LAYOUT_VARIABLES} <= set(envs.environment_variables)
