# SPDX-License-Identifier: Apache-2.0
"""What a ``config.json`` leaves out because the model's family says it, by ``model_type``.

The values are transformers' defaults (its ``configuration_*.py``), which a test compares.
"""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from vllm_tiered_kv.sizing.hf_config import HfConfig


def _of(kv_heads: int | None = None, head_dim: int | None = None, **more: int) -> dict[str, int]:
    given = {"num_key_value_heads": kv_heads, "head_dim": head_dim, **more}
    return {name: value for name, value in given.items() if value is not None}


# A text model inside another is written without what its family says, KV heads among it.
DEFAULTS = MappingProxyType(
    {
        "bamba": _of(8),
        "ernie4_5": _of(2, 128),
        "ernie4_5_moe": _of(4),
        "falcon_h1": _of(8),
        "gemma": _of(16, 256),
        "gemma2": _of(4, 256, sliding_window=4096),
        "gemma3_text": _of(4, 256, num_attention_heads=8, sliding_window=4096, vocab_size=262_208),
        "gemma3n_text": _of(
            2, 256, num_attention_heads=8, sliding_window=512, num_kv_shared_layers=15
        ),
        "gemma4_text": _of(4, 256, num_attention_heads=8, sliding_window=512),
        "glm4": _of(2, 128),
        "glm4_moe": _of(8),
        "glm4v_moe_text": _of(8),
        "glm4v_text": _of(2),
        "gpt_oss": _of(8, 64, sliding_window=128),
        "jamba": _of(8),
        "lfm2": _of(8),
        "lfm2_moe": _of(8),
        "llama4_text": _of(8, 128),
        "minimax": _of(8),
        "ministral": _of(8),
        "ministral3": _of(8, 128),
        "mistral": _of(8),
        "mixtral": _of(8),
        "nemotron_h": _of(8, 128),
        "qwen2": _of(32),
        "qwen2_5_omni_text": _of(4),
        "qwen2_5_vl_text": _of(8),
        "qwen2_moe": _of(16),
        "qwen2_vl_text": _of(8),
        "qwen3": _of(32, 128),
        "qwen3_5_moe_text": _of(2, 256),
        "qwen3_5_text": _of(4, 256),
        "qwen3_moe": _of(4),
        "qwen3_next": _of(2, 256),
        "qwen3_omni_moe_text": _of(4),
        "qwen3_vl_moe_text": _of(16),
        "qwen3_vl_text": _of(32, 128),
        "seed_oss": _of(8, 128),
        "smollm3": _of(4),
        "starcoder2": _of(2),
    }
)

# Every n-th layer has full attention, the others a window; True: the last one as well.
WINDOW_PATTERN = MappingProxyType(
    {
        "gemma2": 2,
        "gemma3_text": 6,
        "gemma3n_text": 5,
        "gemma4_text": 6,
        "gpt_oss": 2,
        "cohere2": 4,
        "exaone4": 4,
        "olmo3": 4,
    }
)
LAST_IS_FULL = frozenset({"gemma4_text"})

# Every n-th layer has full attention, the others a recurrent state.
FULL_INTERVAL = MappingProxyType({"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4})

HEADS_ALIKE = frozenset(
    {
        *(
            "apertus",
            "bloom",
            "codegen",
            "cohere",
            "cohere2",
            "gpt2",
            "gpt_neox",
            "gptj",
            "granite",
        ),
        *("granite", "llama", "olmo", "olmo2", "olmo3", "opt", "persimmon", "phi", "phi3"),
    }
)
"""These have a KV head for each query head unless the file says otherwise."""

EXTRA_WINDOW_TOKENS = MappingProxyType({"cohere2": 1})
"""These see a token more than ``sliding_window`` says."""

GLOBAL_HEAD_DIM = MappingProxyType({"gemma4_text": 512})
"""Heads of full attention, where they differ from those with a window."""

EXPANDED_LATENT = frozenset({"minicpm3"})
"""These have a latent rank, but vLLM keeps whole keys and values of them."""

TWO_ATTENTIONS = frozenset({"longcat_flash"})
"""Each of their layers (``num_layers``) attends twice."""

TIED = frozenset({"gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "cohere2"})
"""Input and output embeddings are the same unless the file says otherwise."""

TWO_MATRICES = frozenset(
    {
        *("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt"),
        *("nemotron", "nemotron_h", "persimmon", "phi", "starcoder2"),
    }
)
"""Their feed-forward layers have two matrices; those of others have three."""


def with_defaults(config: HfConfig) -> HfConfig:
    """``config`` with what its family adds to it."""
    defaults = DEFAULTS.get(config.model_type or "", {})
    missing = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    return msgspec.structs.replace(config, **missing)
