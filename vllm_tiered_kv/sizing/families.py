# SPDX-License-Identifier: Apache-2.0
"""What a ``config.json`` leaves out because the model's family says it, by ``model_type``.

The values are transformers' defaults (its ``configuration_*.py``), which a test compares.
"""

from __future__ import annotations

from types import MappingProxyType

import msgspec

from vllm_tiered_kv.sizing.hf_config import HfConfig

_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}

DEFAULTS = MappingProxyType(
    {
        "gemma": {"head_dim": 256},
        "gemma2": {"head_dim": 256, "sliding_window": 4096},
        "gemma3_text": {**_GEMMA3, "sliding_window": 4096, "vocab_size": 262_208},
        "gemma3n_text": {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "sliding_window": 512,
            "num_kv_shared_layers": 15,
        },
        "gpt_oss": {"head_dim": 64, "sliding_window": 128},
        "qwen3_next": {"head_dim": 256},
        "qwen3_5_text": {"head_dim": 256},
        "qwen3_5_moe_text": {"head_dim": 256},
        "gemma4_text": {**_GEMMA3, "sliding_window": 512},
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
