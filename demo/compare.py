# SPDX-License-Identifier: Apache-2.0
"""When two outputs count as equal."""

from __future__ import annotations

from tools.serving import Completion

LOGPROB_TOLERANCE = 1e-3
"""Largest difference of a token's log-probability.

A hit computes the last tokens alone where a cold run computes them with the whole prompt, so
sums are rounded in another order. In float32 that moves log-probabilities of this model by about
1e-5, while one wrong page (one block in one layer) moves them by 0.08 or more.
"""


def largest_difference(reference: Completion, other: Completion) -> float | None:
    """The largest difference of log-probabilities; None when the tokens themselves differ."""
    if reference.token_ids != other.token_ids:
        return None
    pairs = zip(reference.logprobs, other.logprobs, strict=True)
    return max((abs(a - b) for a, b in pairs), default=0.0)


def equal(reference: Completion, other: Completion) -> bool:
    """Same tokens, and every log-probability within :data:`LOGPROB_TOLERANCE`."""
    difference = largest_difference(reference, other)
    return difference is not None and difference <= LOGPROB_TOLERANCE
