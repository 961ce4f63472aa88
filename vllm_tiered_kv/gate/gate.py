# SPDX-License-Identifier: Apache-2.0
"""The gate: the models, and what they say of one request."""

from __future__ import annotations

import msgspec

from vllm_tiered_kv.gate.choice import (
    AS_GOOD,
    AS_GOOD_FOR_OTHERS,
    Choice,
    Decision,
    Question,
    Reason,
    decide,
    forced,
)
from vllm_tiered_kv.gate.load import LoadModel
from vllm_tiered_kv.gate.mode import GateMode
from vllm_tiered_kv.gate.prefill import Curve, PrefillModel
from vllm_tiered_kv.gate.regret import Allowance

COPY_BANDWIDTH = 2e9
"""Bytes a second that slots are copied with at least, where nothing else is known."""
READ_BANDWIDTH = 2e8
PEER_BANDWIDTH = 2e8
PATIENCE = 3.0
"""What has taken so many times what was predicted is late."""
LEAST_PATIENCE = 0.1
"""Seconds in which nothing is late."""


class Gate:
    """Decides; scheduler thread only.

    Args:
        budget: tokens of a request that fit in one step if it is alone.
        deadline: seconds that anything may take at most.
        shared_budget: tokens of a request that fit in one step if others are running.
    """

    def __init__(self, budget: int, deadline: float, shared_budget: int | None = None) -> None:
        self._deadline = deadline
        self.prefill = PrefillModel(budget, shared_budget)
        self.copy = LoadModel(COPY_BANDWIDTH, first=3)
        """From slots to the device."""
        self.disk = LoadModel(READ_BANDWIDTH, first=2)
        """From files to slots."""
        self.peers = LoadModel(PEER_BANDWIDTH, first=2)
        """From other engines' slots to ours."""
        self._allowance = Allowance()

    def decide(
        self,
        question: Question,
        mode: GateMode,
        *,
        is_busy: bool,
        slow: LoadModel | None = None,
    ) -> Decision:
        """Choose for one request.

        Args:
            slow: the source that the options read from; None: none does.
            mode: not ``NEVER``: then there is nothing to ask.
            is_busy: other requests are running.
        """
        curve = self.prefill.curve(is_busy=is_busy)
        if mode is GateMode.ALWAYS:
            return forced(question, Reason.FORCED, curve)
        if curve is None or not self._knows(question, slow):
            return forced(question, Reason.LEARNING, curve)
        decision = decide(question, curve, AS_GOOD_FOR_OTHERS if is_busy else AS_GOOD)
        if decision.choice is not Choice.NONE:
            self._allowance.begin_again()
        return decision

    def explore(self, refused: Decision, question: Question, *, is_busy: bool) -> Decision:
        """What was refused may be tried now and then, for what it is expected to cost.

        Args:
            refused: the choice to load nothing.
            question: what may be tried, one option: the less, the sooner.
        """
        curve = self.prefill.curve(is_busy=is_busy)
        if curve is None or refused.total is None:
            return refused
        load = forced(question, Reason.EXPLORING, curve)
        if load.total is None:
            return refused
        if not self._allowance.allows(load.total - refused.total):
            return refused
        return msgspec.structs.replace(load, choice=Choice.PART)

    def admitted(self, decision: Decision) -> None:
        """A request that was decided on is admitted; until then it may be asked for it again."""
        if decision.reason is not Reason.EXPLORING:
            return
        if decision.total is not None and decision.instead is not None:
            self._allowance.spend(decision.total - decision.instead)

    def curve(self, *, is_busy: bool) -> Curve | None:
        return self.prefill.curve(is_busy=is_busy)

    def _knows(self, question: Question, slow: LoadModel | None) -> bool:
        """Whether all has been measured that the options need."""
        if not question.options:
            return True
        reads = question.options[-1].reads and slow is not None
        return self.copy.is_known and (not reads or slow is None or slow.is_known)

    def took(self, seconds: float) -> None:
        """A request that was decided on has its first token."""
        self._allowance.earn(seconds)

    def patience(self, predicted: float) -> float:
        """Seconds after which something that was to take so long is late."""
        return min(self._deadline, max(LEAST_PATIENCE, PATIENCE * predicted))
