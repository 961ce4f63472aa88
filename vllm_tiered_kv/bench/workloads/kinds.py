# SPDX-License-Identifier: Apache-2.0
"""The kinds of workload and their sizes. Lengths are in tokens and means."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Tokens = Annotated[int, Meta(ge=1, le=1 << 24)]
MaybeTokens = Annotated[int, Meta(ge=0, le=1 << 24)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Pause = Annotated[float, Meta(ge=0, le=3600)]
Skew = Annotated[float, Meta(ge=0, le=10)]
Spread = Annotated[float, Meta(ge=0, le=3)]


class _Kind(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"
):
    spread: Spread = 0.3
    """Of lengths: the sigma of a log-normal distribution around their means; 0: all alike. Shared
    content keeps its length."""


class Shared(_Kind, frozen=True, tag="shared-prompt"):
    """Unrelated questions behind one of a few system prompts."""

    system_prompts: Count = 4
    system_tokens: Tokens = 2000
    input_tokens: Tokens = 100
    output_tokens: Tokens = 64
    skew: Skew = 1.0
    """The exponent of Zipf's law by which shared content is chosen; 0: evenly."""


class Chat(_Kind, frozen=True, tag="chat"):
    """Conversations: every turn repeats all before it, after somebody has thought."""

    system_prompts: Count = 1
    system_tokens: MaybeTokens = 500
    turns: Count = 4
    input_tokens: Tokens = 200
    output_tokens: Tokens = 64
    think: Pause = 2.0
    """Seconds between an answer and the next turn, exponentially distributed."""
    skew: Skew = 1.0


class Rag(_Kind, frozen=True, tag="rag"):
    """Questions about a few of many documents, always in the same order."""

    system_tokens: MaybeTokens = 200
    documents: Count = 40
    document_tokens: Tokens = 1000
    shown: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Documents in a prompt."""
    input_tokens: Tokens = 50
    output_tokens: Tokens = 64
    skew: Skew = 1.0


class Agent(_Kind, frozen=True, tag="agent"):
    """A loop of short answers (calls of tools) and results that come back after a moment."""

    agents: Count = 3
    """Different instructions and tools."""
    system_tokens: Tokens = 2000
    steps: Count = 8
    result_tokens: Tokens = 400
    output_tokens: Tokens = 32
    tool_seconds: Pause = 0.3
    """That a tool takes, exponentially distributed."""
    skew: Skew = 1.0


class Trace(_Kind, frozen=True, tag="trace"):
    """A recorded trace: JSON lines of timestamp (ms), input_length, output_length, hash_ids."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """``.jsonl``, also ``.gz`` and ``.xz``."""
    block_tokens: Annotated[int, Meta(ge=1, le=512)] = 512
    """Tokens that one of ``hash_ids`` becomes; below 512 all lengths shrink with it, and what is
    shared stays shared."""
    speed: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Open loop: by how much faster than recorded."""
    max_input_tokens: Tokens = 1 << 24
    """Longer prompts, after shrinking, are left out."""
    max_output_tokens: Tokens = 1 << 20
    """Longer answers are cut to this."""


class Cold(_Kind, frozen=True, tag="cold"):
    """Prompts that share nothing: what a connector costs where it cannot help."""

    input_tokens: Tokens = 2000
    output_tokens: Tokens = 64


Workload = Shared | Chat | Rag | Agent | Trace | Cold
