# SPDX-License-Identifier: Apache-2.0
"""Configurations: those of published models, and small ones of many architectures."""

from __future__ import annotations

import json
from typing import Any

from vllm_tiered_kv.sizing.dtypes import Dtype
from vllm_tiered_kv.sizing.hf_config import HfConfig, decode_config
from vllm_tiered_kv.sizing.read import Choices, Model, read_model

Json = dict[str, Any]


def llama(layers: int, hidden: int, heads: int, kv_heads: int, **more: Any) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_3_70B = llama(80, 8192, 64, 8, intermediate_size=28672, vocab_size=128256)
LLAMA_3_8B = llama(32, 4096, 32, 8, intermediate_size=14336, vocab_size=128256)
LLAMA_31_405B = llama(126, 16384, 128, 8, intermediate_size=53248, vocab_size=128256)
LLAMA_2_7B = llama(32, 4096, 32, 32, torch_dtype="float16", intermediate_size=11008)
DEEPSEEK_V3: Json = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "torch_dtype": "bfloat16",
}

SMALL: Json = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
_LATENT: Json = {
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 64,
}
_EXPERTS: Json = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
}
_FROM_HEADS = ("head_dim", "num_key_value_heads")
_PER_LAYER: Json = {"vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 32}


def _small(architecture: str, model_type: str, **more: Any) -> Json:
    return {**SMALL, "architectures": [architecture], "model_type": model_type, **more}


def _falcon(**more: Any) -> Json:
    plain = {name: value for name, value in SMALL.items() if name not in _FROM_HEADS}
    return {**plain, "architectures": ["FalconForCausalLM"], "model_type": "falcon", **more}


ARCHITECTURES: dict[str, Json] = {
    "llama": _small("LlamaForCausalLM", "llama"),
    "llama, 8-bit cache": _small(
        "LlamaForCausalLM",
        "llama",
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
            "ignore": ["re:.*"],
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "symmetric": True,
                "dynamic": False,
            },
        },
    ),
    "mistral": _small("MistralForCausalLM", "mistral", sliding_window=64),
    "qwen2": _small("Qwen2ForCausalLM", "qwen2", sliding_window=64, use_sliding_window=False),
    "gemma2": _small("Gemma2ForCausalLM", "gemma2", sliding_window=64),
    "gemma3": _small(
        "Gemma3ForCausalLM", "gemma3_text", sliding_window=64, sliding_window_pattern=3
    ),
    "gemma3n": _small(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        sliding_window=64,
        num_hidden_layers=10,
        num_kv_shared_layers=4,
        **_PER_LAYER,
    ),
    "gemma4": _small(
        "Gemma4ForCausalLM",
        "gemma4_text",
        sliding_window=64,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        **_PER_LAYER,
    ),
    "gpt_oss": _small(
        "GptOssForCausalLM",
        "gpt_oss",
        sliding_window=64,
        num_local_experts=4,
        num_key_value_heads=4,
    ),
    "cohere2": _small("Cohere2ForCausalLM", "cohere2", sliding_window=64),
    "olmo3": _small("Olmo3ForCausalLM", "olmo3", sliding_window=64),
    "llama4": _small(
        "Llama4ForCausalLM",
        "llama4_text",
        attention_chunk_size=512,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=512,
    ),
    "falcon 7B": _falcon(multi_query=True),
    "falcon 40B": _falcon(multi_query=True, num_kv_heads=2, new_decoder_architecture=True),
    "gpt_bigcode": {
        "architectures": ["GPTBigCodeForCausalLM"],
        "model_type": "gpt_bigcode",
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 8,
        "n_positions": 4096,
        "vocab_size": 512,
        "multi_query": True,
        "torch_dtype": "float16",
    },
    "minicpm3": _small("MiniCPM3ForCausalLM", "minicpm3", **_LATENT),
    "deepseek_v3": _small("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT, **_EXPERTS),
    "longcat_flash": {
        **{name: value for name, value in SMALL.items() if name != "num_hidden_layers"},
        **_LATENT,
        "architectures": ["LongcatFlashForCausalLM"],
        "model_type": "longcat_flash",
        "num_layers": 3,
        "ffn_hidden_size": 512,
        "expert_ffn_hidden_size": 64,
        "n_routed_experts": 4,
        "moe_topk": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_num": 1,
        "zero_expert_type": "identity",
        "routed_scaling_factor": 1.0,
    },
    "qwen3_next": _small(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        full_attention_interval=4,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    ),
    "jamba": _small(
        "JambaForCausalLM",
        "jamba",
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
    ),
    "granitemoehybrid": _small(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_head=64,
        mamba_d_conv=4,
        mamba_expand=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "nemotron_h": _small(
        "NemotronHForCausalLM",
        "nemotron_h",
        hybrid_override_pattern="M-M*-M-*",
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=4,
        ssm_state_size=16,
        conv_kernel=4,
    ),
    "falcon_h1": _small(
        "FalconH1ForCausalLM",
        "falcon_h1",
        mamba_d_ssm=512,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        time_step_limit=[0.0, float("inf")],
    ),
    "zamba2": {
        **{name: value for name, value in SMALL.items() if name not in _FROM_HEADS},
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"] * 2,
        "hybrid_layer_ids": [2, 6],
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_mem_blocks": 1,
        "adapter_rank": 16,
    },
    "lfm2": _small(
        "Lfm2ForCausalLM",
        "lfm2",
        layer_types=["conv", "conv", "full_attention", "conv"] * 2,
        conv_L_cache=3,
        conv_dim=256,
        conv_dim_out=256,
        block_dim=256,
        block_ff_dim=512,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
    ),
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 64,
        "n_groups": 1,
        "expand": 2,
        "conv_kernel": 4,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
    },
}
"""Small models that vLLM can build on a CPU."""


def decode(config: Json) -> HfConfig:
    return decode_config(json.dumps(config).encode(), "config.json")


def read(config: Json, kv: Dtype | None = None, state: Dtype | None = None) -> Model:
    return read_model(decode(config), Choices(kv, state))
