# SPDX-License-Identifier: Apache-2.0
"""The shapes of the tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.tinymodels.tokenizer import BEGIN_ID, END_ID, PAD_ID, VOCAB_SIZE

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LORA_BASE = "llama-tiny"
LORA_VARIANT = f"{LORA_BASE}-lora"

# KV bytes a token: layers x 2 x KV heads x head size x bytes a number.
MODEL_VARIANTS: dict[str, dict[str, Any]] = {
    # 16 KiB a token in float32: a long prompt takes seconds on two cores, its KV is ~64 MiB.
    "llama": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 16384,
    },
    "llama-tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    # Five sliding layers to one full: several KV cache groups.
    "gemma3-tiny": {
        "model_type": "gemma3_text",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 256,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # One KV cache group, and it only sees a window.
    "mistral-swa-tiny": {
        "model_type": "mistral",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "sliding_window": 256,
        "max_position_embeddings": 8192,
    },
}


def model_config(variant: str, dtype: str) -> PretrainedConfig:
    """The ``transformers`` configuration of a variant.

    Raises:
        KeyError: no such variant.
    """
    from transformers import AutoConfig

    shape = dict(MODEL_VARIANTS[variant])
    return AutoConfig.for_model(
        shape.pop("model_type"),
        vocab_size=VOCAB_SIZE,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=False,
        dtype=dtype,
        **shape,
    )
