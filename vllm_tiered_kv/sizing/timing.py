# SPDX-License-Identifier: Apache-2.0
"""How long it takes to compute a prompt again, and how long to fetch its KV instead.

Computing: every parameter is used once a token, in one multiplication and one addition, so ``2 N``
operations a token (Kaplan et al., "Scaling laws for neural language models", 2020, section 2.1).
That leaves out attention itself, whose operations grow with the square of the length. They can be
added: each pair of a token and one it reads costs two operations a number of the key and two a
number of the value.
"""

from __future__ import annotations

import enum

import msgspec

from vllm_tiered_kv.sizing.layers import Footprint

MAX_TOKENS = 1 << 24
"""Lengths above this are not looked at."""


class Compute(msgspec.Struct, frozen=True):
    """The GPUs that compute a prompt."""

    peak_flops: float
    """Operations a second of one GPU at most."""
    fraction: float
    """Of the peak that a prefill reaches."""
    gpus: int

    @property
    def flops(self) -> float:
        return self.peak_flops * self.fraction * self.gpus


class Pairs(msgspec.Struct, frozen=True):
    """What attention adds, in layers that are alike."""

    flops: int
    """For each pair of tokens, over all heads of all these layers."""
    window: int = 0
    """Tokens that a token reads at most; 0: all before it."""

    def of_prompt(self, tokens: int) -> int:
        """Operations of a prompt; a token reads itself, too."""
        reach = min(self.window or tokens, tokens)
        full = tokens - reach  # tokens that read a whole window
        return self.flops * (reach * (reach + 1) // 2 + full * reach)


class Work(msgspec.Struct, frozen=True):
    """What a model computes."""

    parameters: int
    """That one token passes through."""
    pairs: tuple[Pairs, ...] = ()
    """Empty: attention is left out."""

    def flops(self, tokens: int) -> int:
        """Operations of a prompt of ``tokens`` tokens."""
        return 2 * self.parameters * tokens + sum(pairs.of_prompt(tokens) for pairs in self.pairs)

    def seconds(self, tokens: int, compute: Compute) -> float:
        return self.flops(tokens) / compute.flops


class Link(msgspec.Struct, frozen=True):
    """The way from a tier to the GPUs of one engine, all of them together."""

    name: str
    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds before the first byte, the engine steps that a load takes included."""
    source: str

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


class Choice(enum.Enum):
    """The faster way to a prompt's KV."""

    FETCH = "fetch"
    COMPUTE = "compute"


def fetch_seconds(footprint: Footprint, link: Link, tokens: int) -> float:
    """Of what is needed to go on after ``tokens`` tokens: of windows only what they still see."""
    return link.seconds(footprint.request_bytes(tokens))


def break_even(footprint: Footprint, link: Link, work: Work, compute: Compute) -> int | None:
    """The shortest prompt whose fetching takes no longer than computing it.

    Fetching takes a latency and then at most so much a token; computing takes at least as much for
    each token as for the one before. So once fetching pays it pays for all longer prompts, and the
    length is found by bisection. None: it does not pay up to :data:`MAX_TOKENS`.
    """
    if not _pays(footprint, link, work, compute, MAX_TOKENS):
        return None
    low, high = (
        0,
        MAX_TOKENS,
    )  # it does not pay for `low` (or that is no prompt), it does for `high`
    while high - low > 1:
        middle = (low + high) // 2
        if _pays(footprint, link, work, compute, middle):
            high = middle
        else:
            low = middle
    return high


def _pays(footprint: Footprint, link: Link, work: Work, compute: Compute, tokens: int) -> bool:
    return fetch_seconds(footprint, link, tokens) <= work.seconds(tokens, compute)
