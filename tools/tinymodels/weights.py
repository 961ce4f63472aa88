# SPDX-License-Identifier: Apache-2.0
"""Random weights whose output depends on every part of the KV cache."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

# With ordinary initialisation the residual stream of an untrained model is mostly the token's own
# embedding. With these, exchanging one page (one block, one layer) for another's moves the next
# tokens' log-probabilities by 0.08 or more, in every variant and wherever the page lies.
_GAIN = {
    "q_proj": 1.5,
    "k_proj": 1.5,
    "v_proj": 2.0,
    "o_proj": 2.0,
    "out_proj": 2.0,
    "lm_head": 3.0,
}


def save_weights(
    config: Any, folder: Path, *, dtype: str, seed: int, auto: str = "AutoModelForCausalLM"
) -> None:
    """Write ``config.json`` and ``model.safetensors`` of a randomly initialised model.

    Args:
        auto: the class of ``transformers`` that knows which model a configuration is for.
    """
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = getattr(transformers, auto).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.named_parameters()):
            if tensor.dim() < 2:
                continue  # norms keep their starting value
            std = 1.0 if "embed_tokens" in name else _gain(name) / math.sqrt(tensor.shape[-1])
            tensor.normal_(0.0, std, generator=generator)
    model.to(getattr(torch, dtype)).save_pretrained(folder, safe_serialization=True)


def save_image_processor(config: Any, folder: Path) -> None:
    """Write what turns images into the model's input, beside the tokenizer that is there."""
    from transformers import AutoTokenizer, Blip2Processor, BlipImageProcessorPil

    side = config.vision_config.image_size
    Blip2Processor(
        image_processor=BlipImageProcessorPil(size={"height": side, "width": side}),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        num_query_tokens=config.num_query_tokens,
    ).save_pretrained(folder)


def save_adapter(config: Any, folder: Path, *, base: str, dtype: str, seed: int) -> None:
    """Write a rank-8 LoRA adapter on ``q_proj`` and ``v_proj`` in PEFT's format."""
    import json

    import torch
    from safetensors.torch import save_file

    rank = 8
    generator = torch.Generator().manual_seed(seed)
    heads = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    tensors: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        for module, count in heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {
                "lora_A": (rank, config.hidden_size),
                "lora_B": (count * config.head_dim, rank),
            }
            for part, shape in shapes.items():
                value = torch.empty(shape).normal_(
                    0.0, 1.0 / math.sqrt(shape[1]), generator=generator
                )
                tensors[f"{prefix}.{part}.weight"] = value.to(getattr(torch, dtype))
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(heads),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _gain(name: str) -> float:
    return next((gain for part, gain in _GAIN.items() if part in name), 1.0)
