# SPDX-License-Identifier: Apache-2.0
"""How long it takes to compute tokens, from steps of the engine.

A step that computes ``P`` tokens takes ``w0 + w1 P + w2 A`` seconds: launch and weights, work in
each token, and attention, where a token costs what comes before it. A request that computes ``n``
tokens after ``c`` others adds ``n (c + n/2)`` to ``A``; pieces of one prompt add up to its whole
square. Tokens that are decoded beside them are just more of ``P`` and ``A``. Steps that only decode
are bound by memory and follow another line: their time is kept apart, as what a step takes at least
while others run.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_tiered_kv.gate.fit import Fit, Mean, Row

FEW_TOKENS = 16
"""Tokens of one request in a step, below which it may be decoding; more with more draft tokens."""
MEMORY = 60.0
"""Prefill steps."""
FIRST = 5
CHANGE = 6
FIXED_SHARE = 0.2
"""Share of the first steps' time that is taken for ``w0``."""


class Work(msgspec.Struct, frozen=True):
    """What one step computes."""

    tokens: int = 0
    attention: float = 0.0
    """Pairs of a token and one before it that it attends to."""
    is_prefill: bool = False
    """Some request computes more than it would by decoding."""


def _start(medians: Row, seconds: float) -> Sequence[float]:
    return FIXED_SHARE * seconds, (1 - FIXED_SHARE) * seconds / max(1.0, medians[1]), 0.0


class PrefillModel:
    """Seconds of a recompute.

    Args:
        budget: tokens of a request that fit in one step if it is alone.
        shared_budget: the same if others are running.
    """

    def __init__(self, budget: int, shared_budget: int | None = None) -> None:
        self._budget = max(1, budget)
        self._shared_budget = max(1, shared_budget or budget)
        self._prefill = Fit(_start, memory=MEMORY, first=FIRST, change=CHANGE)
        self._decode = Mean(memory=MEMORY, first=1, change=CHANGE)

    @property
    def is_known(self) -> bool:
        return self._prefill.is_known

    def budget(self, *, is_busy: bool) -> int:
        """Tokens of a request that fit in one step."""
        return self._shared_budget if is_busy else self._budget

    def observe(self, work: Work, seconds: float) -> None:
        """A step has run."""
        if work.is_prefill:
            x = (1.0, float(work.tokens), work.attention)
            self._prefill.observe(x, seconds)
        elif work.tokens:
            self._decode.observe(seconds)

    def decode_seconds(self) -> float:
        """Seconds of a step that only decodes; 0 while there was none."""
        return self._decode.value or 0.0

    def curve(self, *, is_busy: bool) -> Curve | None:
        """What a recompute takes now; None while too little is known.

        Args:
            is_busy: other requests are running.
        """
        if not self.is_known:
            return None
        fixed, token, pair = self._prefill.coefficients
        if is_busy:
            fixed = max(fixed, self.decode_seconds())
        return Curve(fixed, token, pair, self.budget(is_busy=is_busy))


class Curve(msgspec.Struct, frozen=True):
    """Seconds to compute a prompt from some token on."""

    step: float
    token: float
    pair: float
    budget: int

    def seconds(self, start: int, end: int) -> float:
        """Of tokens ``[start, end)``: concave in ``start`` on either side of ``end - budget``.

        Of whole steps only the first is counted whole, of the others the share that is filled:
        how full the last one is depends on what else runs.
        """
        tokens = end - start
        pairs = tokens * (start + 0.5 * tokens)
        return self.step * max(1.0, tokens / self.budget) + self.token * tokens + self.pair * pairs
