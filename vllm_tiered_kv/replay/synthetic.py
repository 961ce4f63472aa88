# SPDX-License-Identifier: Apache-2.0
"""Made-up loads in the form of a trace, the same for the same seed.

Their numbers are round guesses at three ways of using a service, not measurements.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator

import msgspec

from vllm_tiered_kv.replay.trace import BLOCK_TOKENS, Request


class Sessions(msgspec.Struct, frozen=True):
    """Conversations whose context grows turn by turn. Lengths are means, in tokens."""

    system_prompts: int
    """Different ones; each session begins with one, the first most often."""
    system_tokens: int
    input_tokens: int
    """What a turn adds to the prompt beside the answer before it."""
    output_tokens: int
    turns: float
    gap: float
    """Seconds between turns."""
    rate: float
    """Sessions that begin in a second."""


class Documents(msgspec.Struct, frozen=True):
    """Questions about a few of many documents, in the order of their ranks."""

    documents: int
    document_tokens: int
    shown: int
    """Documents in a prompt."""
    system_tokens: int
    question_tokens: int
    output_tokens: int
    skew: float
    """The exponent of Zipf's law by which documents are asked for."""
    rate: float
    """Requests a second."""


CHAT = Sessions(4, 1_000, 400, 400, turns=5.0, gap=60.0, rate=1.0)
AGENTS = Sessions(3, 8_000, 1_500, 300, turns=20.0, gap=8.0, rate=0.1)
RAG = Documents(5_000, 3_000, 3, 500, 100, 300, skew=1.0, rate=5.0)

MAX_TOKENS = 128_000
"""A session ends when its context has grown to this."""


class _Session:
    def __init__(self, prompt: list[int], tokens: int, turns: int) -> None:
        self.blocks = prompt  # ids of full blocks
        self.tokens = tokens
        self.turns = turns


class _Ids:
    """Hands out ids of blocks, one after another."""

    def __init__(self) -> None:
        self._last = -1
        self._known: dict[tuple[int, int, int], int] = {}

    def new(self) -> int:
        self._last += 1
        return self._last

    def named(self, parent: int, content: int, part: int) -> int:
        """The id of the ``part``-th block of some shared content behind ``parent``."""
        name = (parent, content, part)
        if name not in self._known:
            self._known[name] = self.new()
        return self._known[name]


def sessions(load: Sessions, seed: int) -> Iterator[Request]:
    """Requests without end, in the order of their arrival."""
    rng, ids = random.Random(seed), _Ids()
    clock, number = 0.0, 0
    waiting: list[tuple[float, int, _Session]] = []
    while True:
        clock += rng.expovariate(load.rate)
        while waiting and waiting[0][0] <= clock:
            now, order, session = heapq.heappop(waiting)
            added, answer = _length(rng, load.input_tokens), _length(rng, load.output_tokens)
            yield _turn(session, now, added, answer, ids)
            session.turns -= 1
            if session.turns and session.tokens < MAX_TOKENS:
                heapq.heappush(waiting, (now + rng.expovariate(1 / load.gap), order, session))
        kind = min(int(rng.expovariate(1.0)), load.system_prompts - 1)
        parent, prompt = -1, []
        for part in range(load.system_tokens // BLOCK_TOKENS):
            parent = ids.named(parent, kind, part)
            prompt.append(parent)
        turns = 1 + int(rng.expovariate(1 / load.turns))
        number += 1
        heapq.heappush(waiting, (clock, number, _Session(prompt, load.system_tokens, turns)))


def documents(load: Documents, seed: int) -> Iterator[Request]:
    """Requests without end, in the order of their arrival."""
    rng, ids = random.Random(seed), _Ids()
    weights = [1 / rank**load.skew for rank in range(1, load.documents + 1)]
    lengths = [_length(rng, load.document_tokens) for _ in weights]
    ranks = range(load.documents)
    totals = [weights[0]]
    for weight in weights[1:]:
        totals.append(totals[-1] + weight)
    clock = 0.0
    while True:
        clock += rng.expovariate(load.rate)
        chosen = sorted(set(rng.choices(ranks, cum_weights=totals, k=load.shown)))
        tokens = load.system_tokens
        blocks: list[int] = []
        for document in (-1, *chosen):  # -1: the system prompt
            tokens += lengths[document] if document >= 0 else 0
            for part in range(tokens // BLOCK_TOKENS - len(blocks)):
                blocks.append(ids.named(blocks[-1] if blocks else -1, document, part))
        tokens += _length(rng, load.question_tokens)
        blocks += [ids.new() for _ in range(math.ceil(tokens / BLOCK_TOKENS) - len(blocks))]
        yield Request(clock * 1e3, tokens, _length(rng, load.output_tokens), tuple(blocks))


LOADS: dict[str, Callable[[int], Iterator[Request]]] = {
    "chat": lambda seed: sessions(CHAT, seed),
    "rag": lambda seed: documents(RAG, seed),
    "agents": lambda seed: sessions(AGENTS, seed),
}
"""The loads by name; each takes a seed."""


def _turn(session: _Session, now: float, added: int, answer: int, ids: _Ids) -> Request:
    session.tokens += added
    full = session.tokens // BLOCK_TOKENS
    session.blocks += [ids.new() for _ in range(full - len(session.blocks))]
    # A block that is not full holds something else in the next turn.
    rest = (ids.new(),) if session.tokens % BLOCK_TOKENS else ()
    request = Request(now * 1e3, session.tokens, answer, (*session.blocks, *rest))
    session.tokens += answer
    return request


def _length(rng: random.Random, mean: int) -> int:
    """Tokens: log-normal with a long tail, ``mean`` on average, at least 1."""
    sigma = 0.8
    return max(1, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))
