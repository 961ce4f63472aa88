# SPDX-License-Identifier: Apache-2.0
"""Token ids out of nothing but a seed and a name."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from vllm_tiered_kv.bench.errors import BenchError

_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which one you were all her she there would their we him been has when who will no "
    "more if out so up said what its about than into them can only other time new some could these "
    "two may first then do any like my now over such our man me even most made after also did many "
    "before must through back years where much your way well down should because each just those "
    "people too how little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come "
    "since against go came right used take three"
).split()


MAX_TOKENS = 1 << 28
"""Of all prompts together: 2 GiB of memory."""


class Content:
    """The same name gives the same tokens, and a shorter piece is the head of a longer one.

    Args:
        seed: another one makes other tokens.
        first, last: token ids are drawn from these and all between them.
    """

    def __init__(self, seed: int, first: int, last: int) -> None:
        self._seed = seed
        # Each id once in memory, however often it stands in prompts.
        self._ids = tuple(range(first, last + 1))
        self._shared: dict[str, tuple[int, ...]] = {}
        self._left = MAX_TOKENS

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self._seed}/{name}")

    def tokens(self, name: str, count: int) -> tuple[int, ...]:
        """Raises: BenchError: together with what came before it is too much for memory."""
        self._left -= count
        if self._left < 0:
            raise BenchError(f"the workload has more than {MAX_TOKENS} tokens; ask for less")
        return tuple(self.rng(name).choices(self._ids, k=count))

    def shared(self, name: str, count: int) -> tuple[int, ...]:
        """What many prompts hold; kept."""
        key = f"{name}/{count}"
        if key not in self._shared:
            self._shared[key] = self.tokens(name, count)
        return self._shared[key]


def length(rng: random.Random, mean: int, spread: float) -> int:
    """Tokens: log-normal, ``mean`` on average, at least 1."""
    if not spread:
        return mean
    return max(1, round(rng.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def zipf(count: int, skew: float) -> list[float]:
    """Cumulated weights of ranks 1 to ``count``."""
    total, weights = 0.0, []
    for rank in range(1, count + 1):
        total += rank**-skew
        weights.append(total)
    return weights


def words(tokens: Sequence[int]) -> str:
    """Common words instead of ids, about one token each; equal heads stay equal."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
