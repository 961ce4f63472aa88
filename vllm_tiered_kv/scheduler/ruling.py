# SPDX-License-Identifier: Apache-2.0
"""What was decided for a request, and how it is put into words."""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.gate import Choice, Decision


class Ruling:
    """What was decided for a request. Mutable; until its first token."""

    __slots__ = (
        "admitted",
        "ahead",
        "began",
        "copied",
        "decision",
        "give_up_at",
        "known",
        "lost",
        "predicted_read",
        "turn",
    )

    def __init__(self, decision: Decision, began: float, turn: float) -> None:
        self.decision = decision
        self.began = began
        """When it began to cost the request anything."""
        self.turn = turn
        """Seconds of an engine step then."""
        self.ahead = 0
        """Bytes of loads that were queued before its own."""
        self.admitted: float | None = None
        self.copied: float | None = None
        """Seconds of its load by the load's own clock, from its end until vLLM goes on."""
        self.lost = 0
        """Tokens of a load that was given up, until vLLM goes on."""
        self.known = 0
        """Chunks that were in the CPU tier then."""
        self.predicted_read = 0.0
        self.give_up_at: float | None = None
        """When what is read from disk for it is late; None: it is not waited for, or patiently."""

    def arrives(self, found: Decision) -> None:
        """Of what was to be read something else is worth loading in the end."""
        replaced = 0.0 if found.choice is Choice.NONE else found.replaced
        self.decision = msgspec.structs.replace(self.decision, end=found.end, replaced=replaced)

    def words(self, tokens: int) -> str:
        """The decision with all its terms, for a prompt of so many tokens."""
        decision = self.decision
        total, instead, replaced = map(
            _seconds, (decision.total, decision.instead, decision.replaced)
        )
        return (
            f"load {decision.choice.value} ({decision.reason.value}): {decision.end} of {tokens} "
            f"tokens will be on the device; load {decision.load:.4g} s, first token in {total} s, "
            f"the other way in {instead} s; replaced recompute {replaced} s; step {self.turn:.4g} s"
        )


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.4g}"
