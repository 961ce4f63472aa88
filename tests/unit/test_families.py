# SPDX-License-Identifier: Apache-2.0
"""What becomes of each kind of KV cache group vLLM builds: served, or refused in a sentence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, SpeculativeConfig
from vllm.config.attention import HiSparseConfig
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from vllm_tiered_kv import compat
from vllm_tiered_kv.geometry import GroupKind

COMMON: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 64,
    "dtype": torch.bfloat16,
}
FULL = FullAttentionSpec(**COMMON)
WINDOW = SlidingWindowSpec(sliding_window=100, **COMMON)


def mamba(**options: Any) -> MambaSpec:
    given = {"mamba_cache_mode": "align", **options}
    return MambaSpec(block_size=64, shapes=((4, 8),), dtypes=(torch.float32,), **given)


def config(*specs: KVCacheSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(**options: Any) -> Any:
    model = SimpleNamespace(
        runner_type="generate", is_prefix_caching_supported=True, enable_sleep_mode=False
    )
    given = {
        "model_config": model,
        "speculative_config": None,
        "attention_config": AttentionConfig(),
        **options,
    }
    return SimpleNamespace(**given)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (FULL, (GroupKind.FULL, 16, 0)),
        (
            MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16),
            (GroupKind.FULL, 64, 0),
        ),
        (FullAttentionSpec(**{**COMMON, "dtype": torch.uint8}), (GroupKind.FULL, 16, 0)),
        (WINDOW, (GroupKind.WINDOW, 16, 100)),
        (mamba(), (GroupKind.STATE, 64, 0)),
        (
            UniformTypeKVCacheSpecs(
                block_size=16,
                kv_cache_specs={
                    "a": FULL,
                    "b": FullAttentionSpec(**{**COMMON, "head_size": 128}),
                },
            ),
            (GroupKind.FULL, 16, 0),
        ),
    ],
    ids=["full", "MLA", "fp8", "window", "state", "several sizes of one kind"],
)
def test_a_group_that_is_served(spec: KVCacheSpec, want: object) -> None:
    assert compat.describe_group(spec, dcp=1) == want


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ChunkedLocalAttentionSpec(attention_chunk_size=64, **COMMON), "chunked local attention"),
        (CrossAttentionSpec(**COMMON), "encoder attention"),
        (EncoderOnlyAttentionSpec(**COMMON), "encoder attention"),
        (mamba(mamba_cache_mode="none"), "'none': states of Mamba .* --mamba-cache-mode align"),
        (mamba(mamba_cache_mode="all"), "'all': states of Mamba"),
        (mamba(num_speculative_blocks=2), "speculative decoding with Mamba"),
        (
            UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": WINDOW}),
            "differ in kind",
        ),
    ],
)
def test_a_group_that_is_refused(spec: KVCacheSpec, reason: str) -> None:
    with pytest.raises(compat.UnsupportedModel, match=reason):
        compat.describe_group(spec, dcp=1)


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW, FULL), (mamba(), FULL), (mamba(), WINDOW)])
def test_a_model_that_is_served(specs: tuple[KVCacheSpec, ...]) -> None:
    compat.check_supported(engine(), config(*specs))


def test_mamba_layers_alone_are_refused() -> None:
    with pytest.raises(compat.UnsupportedModel, match="Mamba layers alone"):
        compat.check_supported(engine(), config(mamba(), mamba()))


def test_a_model_without_a_cache_is_refused() -> None:
    with pytest.raises(compat.UnsupportedModel, match="no KV cache"):
        compat.check_supported(engine(), config())


@pytest.mark.parametrize("method", ["use_eagle", "uses_draft_model"])
def test_draft_models_with_kv_of_their_own_are_refused(method: str) -> None:
    answers = {"use_eagle": False, "uses_draft_model": False, method: True}
    asked = engine()
    asked.speculative_config = SimpleNamespace(
        method="any", **{name: lambda value=value: value for name, value in answers.items()}
    )
    with pytest.raises(compat.UnsupportedModel, match="EAGLE, MTP"):
        compat.check_supported(asked, config(FULL))


def test_hidden_states_in_the_cache_are_refused() -> None:
    asked = engine(speculative_config=object.__new__(SpeculativeConfig))
    asked.speculative_config.method = "extract_hidden_states"
    with pytest.raises(compat.UnsupportedModel, match="extract_hidden_states"):
        compat.check_supported(asked, config(FULL))


def test_another_that_watches_blocks_is_refused() -> None:
    asked = engine(attention_config=AttentionConfig(hisparse_config=HiSparseConfig()))
    with pytest.raises(compat.UnsupportedModel, match="HiSparse"):
        compat.check_supported(asked, config(FULL))
