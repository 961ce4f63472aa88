# SPDX-License-Identifier: Apache-2.0
"""A byte-level BPE tokenizer, trained on a few modules of the standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

VOCAB_SIZE = 4096
PAD, BEGIN, END, USER, ASSISTANT = "<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"
SPECIAL = (PAD, BEGIN, END, USER, ASSISTANT)
PAD_ID, BEGIN_ID, END_ID = 0, 1, 2
IMAGE = "<image>"
IMAGE_ID = VOCAB_SIZE
"""Only in tokenizers of models that take images."""

_MODULES = ("argparse", "ast", "dataclasses", "datetime", "difflib", "doctest", "inspect")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}"
    "{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def training_text() -> list[str]:
    """The texts trained on, in order."""
    library = Path(sysconfig.get_path("stdlib"))
    return [(library / f"{name}.py").read_text(encoding="utf-8") for name in _MODULES]


def save_tokenizer(folder: Path, *, images: bool = False) -> None:
    """Train the tokenizer and save it where ``transformers`` and vLLM look for it."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    if images:
        fast.add_special_tokens({"additional_special_tokens": [IMAGE]})
    fast.save_pretrained(folder)
