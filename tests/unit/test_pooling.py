# SPDX-License-Identifier: Apache-2.0
"""Models without output tokens: served where a prompt may go on from a prefix, else refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from vllm_tiered_kv import compat

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 1024,
}
ENCODER = {"architectures": ["BertModel"], "model_type": "bert", **SIZES}
DECODER = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


def configured(folder: Path, model: dict[str, Any], **options: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(model))
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, runner="pooling", **options
    ).create_engine_config()


def cache(*specs: FullAttentionSpec) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, ENCODER)
    with pytest.raises(compat.UnsupportedModel, match="this encoder needs the whole prompt"):
        compat.check_supported(config, cache())


@pytest.mark.parametrize("pooling", ["MEAN", "CLS"])
def test_pooling_over_the_whole_prompt_is_refused(tmp_path: Path, pooling: str) -> None:
    options = {"convert": "embed", "pooler_config": {"seq_pooling_type": pooling}}
    config = configured(tmp_path, DECODER, **options)
    with pytest.raises(compat.UnsupportedModel, match="this pooling model needs the whole prompt"):
        compat.check_supported(config, cache(SPEC))


def test_the_last_tokens_embedding_is_served(tmp_path: Path) -> None:
    compat.check_supported(configured(tmp_path, DECODER, convert="embed"), cache(SPEC))
