# SPDX-License-Identifier: Apache-2.0
"""The shapes of the tiny models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.tinymodels.tokenizer import BEGIN_ID, END_ID, IMAGE_ID, PAD_ID, VOCAB_SIZE

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
    # One KV head, which every tensor-parallel rank holds.
    "llama-mqa-tiny": {
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
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
    # Latent attention: one vector a token for all heads. The CPU kernels want these very sizes.
    "deepseek-mla-tiny": {
        "model_type": "deepseek_v2",
        "hidden_size": 128,
        "intermediate_size": 384,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "max_position_embeddings": 8192,
    },
    # Three layers of linear attention, which keep a state, to one of full attention.
    "qwen3-next-tiny": {
        "model_type": "qwen3_next",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 1, 2],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "max_position_embeddings": 8192,
    },
    # The last two layers read the KV of earlier ones and have none of their own.
    "gemma3n-tiny": {
        "model_type": "gemma3n_text",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 256,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 32,
        "altup_num_inputs": 2,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.0] * 6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    # Fused projections and partial rotary dimensions.
    "phi3-tiny": {
        "model_type": "phi3",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 8192,
        "max_position_embeddings": 8192,
    },
}

# The only ones here whose code in vLLM needs no torchvision. An image takes 196 tokens, so it
# begins and ends within blocks of 128.
VISION_VARIANTS: dict[str, dict[str, Any]] = {
    "blip2-tiny": {
        "model_type": "blip-2",
        "num_query_tokens": 196,
        "image_token_index": IMAGE_ID,
        "text_config": {
            "model_type": "opt",
            "vocab_size": VOCAB_SIZE + 64,
            "hidden_size": 128,
            "word_embed_proj_dim": 128,
            "ffn_dim": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "max_position_embeddings": 4096,
            "bos_token_id": BEGIN_ID,
            "eos_token_id": END_ID,
            "pad_token_id": PAD_ID,
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        "qformer_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "encoder_hidden_size": 64,
            "vocab_size": 8,
            "max_position_embeddings": 8,
        },
    },
}


def vision_config(variant: str, dtype: str) -> PretrainedConfig:
    """The ``transformers`` configuration of a model that also takes images.

    Raises:
        KeyError: no such variant.
    """
    from transformers import AutoConfig

    shape = dict(VISION_VARIANTS[variant])
    return AutoConfig.for_model(shape.pop("model_type"), dtype=dtype, **shape)


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
        dtype=dtype,
        **{"tie_word_embeddings": False, **shape},
    )
