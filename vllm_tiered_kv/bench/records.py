# SPDX-License-Identifier: Apache-2.0
"""What is known of each request afterwards."""

from __future__ import annotations

import enum

import msgspec


class Failure(str, enum.Enum):
    """How a request failed."""

    REFUSED = "refused"
    """An HTTP status other than 200."""
    ERROR = "error"
    """The stream said so."""
    BROKEN = "broken"
    """No connection, or the stream ended early."""
    TIMEOUT = "timeout"
    MALFORMED = "malformed"
    """The stream is not what the API promises."""


class Counted(str, enum.Enum):
    """Where the number of output tokens comes from."""

    USAGE = "usage"
    """The server says it."""
    CHUNKS = "chunks"
    """Parts of the stream with something in them: fewer than tokens where some were joined."""


def printable(text: str) -> str:
    """Without what would steer a terminal."""
    return "".join(each if each.isprintable() else " " for each in text)


class Answer(msgspec.Struct, frozen=True):
    """One finished completion. Times are of a monotonic clock, in seconds."""

    ttft: float
    """From sending to the first token's arrival."""
    gaps: tuple[float, ...]
    """Between arrivals of parts with tokens in them."""
    seconds: float
    """From sending to the last token's arrival."""
    prompt_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens not computed, by the answer's own account."""
    output_tokens: int
    counted: Counted
    text: str
    tokens: tuple[int, ...]
    """Token ids; empty where the server gives none."""
    logprobs: tuple[float, ...]

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where there is but one."""
        if self.output_tokens < 2:
            return None
        return (self.seconds - self.ttft) / (self.output_tokens - 1)


class Failed(msgspec.Struct, frozen=True):
    """A request without an answer."""

    kind: Failure
    reason: str
    seconds: float


class Record(msgspec.Struct, frozen=True):
    """One request of one arm."""

    arm: str
    block: int
    session: int
    step: int
    prompt: str
    """A digest of it: equal digests, equal prompts."""
    sent: float
    """Seconds since the block began."""
    late: float
    """Seconds after it was due."""
    answer: Answer | None
    failed: Failed | None
