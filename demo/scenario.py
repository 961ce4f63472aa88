# SPDX-License-Identifier: Apache-2.0
"""The requests of the demo: a prompt that comes back, and a conversation, both pushed out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

BLOCK_TOKENS = 128
"""vLLM's block size on the CPU platform."""
DEVICE_BLOCKS = 33
"""One of them is never used, so 32 blocks hold 4,096 tokens: less than two long requests."""
MAX_TOKENS = (DEVICE_BLOCKS - 1) * BLOCK_TOKENS
LONG_TOKENS = 3900
PUSH_OUT_TOKENS = MAX_TOKENS - 40  # takes every block, so nothing else stays on the device
OPENING_TOKENS = 1500
QUESTION_TOKENS = 150
TURNS = 4
ANSWER_TOKENS = 24

_MARKERS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>")
_WORDS = (
    "archive basin beacon bridge canal cargo census cistern clock coast copper current depot "
    "district engine ferry field forest garden gate glacier grain harbour horizon island lamp "
    "ledger letter library lighthouse map market meadow mill mirror mountain museum north orchard "
    "paper pier plain quarry railway rain record river road rope salt season shore signal silver "
    "station stone storm summer survey table tower track tunnel valley village water weather winter"
).split()


class Step(msgspec.Struct, frozen=True):
    """One request."""

    name: str
    prompt: tuple[int, ...]
    measured: bool
    """False for the requests that are only there to push others out of the device's cache."""


class Transcript(msgspec.Struct):
    """Answers of the first run; the conversation's later prompts contain them."""

    answers: dict[str, tuple[int, ...]] = {}


class Scenario:
    """The steps in order; the second arm gets exactly the prompts of the first.

    Args:
        model: folder with the tokenizer.
        seed: of all texts.
    """

    def __init__(self, model: Path, seed: int = 0) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._seed = seed
        vocabulary = self._tokenizer.get_vocab()
        self._markers: list[int] = [vocabulary[name] for name in _MARKERS]

    def steps(self, transcript: Transcript) -> Iterator[Step]:
        """Yield the steps; ``transcript`` must hold an answer before the next step is asked for."""
        long_prompt = self._chat(self._text("long", LONG_TOKENS - 4))
        yield Step("long prompt", long_prompt, measured=True)
        yield self._push_out(0)
        yield Step("long prompt, pushed out", long_prompt, measured=True)
        yield Step("long prompt, at once again", long_prompt, measured=True)

        history: tuple[int, ...] = ()
        for turn in range(1, TURNS + 1):
            if turn > 1:
                yield self._push_out(turn)
            size = OPENING_TOKENS if turn == 1 else QUESTION_TOKENS
            prompt = self._chat(self._text(f"turn {turn}", size - 4), history)
            name = f"conversation, turn {turn}"
            yield Step(name, prompt, measured=True)
            history = prompt + transcript.answers[name]

    def text(self, name: str, tokens: int) -> tuple[int, ...]:
        """A prompt of just so many tokens, the same for the same name."""
        return self._chat(self._text(name, tokens - 4))

    def _push_out(self, number: int) -> Step:
        prompt = self._chat(self._text(f"other {number}", PUSH_OUT_TOKENS - 4))
        return Step("another request", prompt, measured=False)

    def _chat(self, question: Sequence[int], history: Sequence[int] = ()) -> tuple[int, ...]:
        """The model's chat format as token ids; the history ends with an answer."""
        begin, end, user, assistant = self._markers
        start = [*history, end] if history else [begin]
        return (*start, user, *question, end, assistant)

    def _text(self, name: str, tokens: int) -> list[int]:
        """Sentences of ordinary words, cut to ``tokens`` tokens."""
        rng = random.Random(f"{self._seed} {name}")
        text = f"About {name}."
        while True:
            words = " ".join(rng.choices(_WORDS, k=rng.randint(6, 14)))
            text += f" {words.capitalize()}."
            if len(text) < 3 * tokens:
                continue
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) >= tokens:
                return ids[:tokens]
