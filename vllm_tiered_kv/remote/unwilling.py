# SPDX-License-Identifier: Apache-2.0
"""What becomes of engines that do not answer, or refuse; the same for hand-overs and for chunks."""

from __future__ import annotations

from vllm_tiered_kv.remote.facts import Facts, IdentityFacts, differences
from vllm_tiered_kv.remote.messages import Reason, Refused
from vllm_tiered_kv.remote.options import Address

QUIET_SECONDS = 0.5
"""An engine that does not answer is left alone for so long, twice as long each time ..."""
MAX_QUIET_SECONDS = 30.0
"""... up to this."""


def silence(failures: int) -> float:
    """Seconds in which an engine is not asked that did not answer so often, one after the other."""
    return min(MAX_QUIET_SECONDS, QUIET_SECONDS * 2.0 ** min(failures, 16))


def no_answer(address: Address) -> str:
    """Who does not answer, and why that may be."""
    return (
        f"{address} does not answer: it is not there or stands still, its remote.listen is not an "
        "address that reaches it from here, the port is closed to this host, or it has another key"
    )


def kind_of(answer: Refused) -> str:
    """A refusal, as it is counted."""
    return f"remote_{answer.reason.value.replace(' ', '_')}"


def sentence_of(answer: Refused, ours: IdentityFacts) -> str:
    """A refusal in words: where identities differ, in what."""
    facts: dict[Reason, Facts] = {Reason.SEMANTIC: ours.semantic, Reason.PAGES: ours.pages}
    differing = differences(answer.facts, facts.get(answer.reason, ()))
    return f"{answer.sentence}; they differ in: {differing}" if differing else answer.sentence
