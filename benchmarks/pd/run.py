# SPDX-License-Identifier: Apache-2.0
"""Which prompt is handed over when, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from benchmarks.ab_ttft.client import BenchmarkFailed
from benchmarks.ab_ttft.measure import random_tokens, rotated
from benchmarks.pd import idle
from benchmarks.pd.arms import Arm
from benchmarks.pd.limits import Limit, Limits
from benchmarks.pd.pair import Pair

BLOCK_TOKENS = 128
SPIN_SECONDS = 1.3
"""vLLM's workers look for work without a pause for a second after every step; NixlConnector's go
on, so that one cannot wait until they are at rest."""
READY_TOKENS = 1000


class Workload(msgspec.Struct, frozen=True):
    """How much is measured."""

    lengths: tuple[int, ...]
    prompts: int
    """New prompts of every length; each is computed once by each arm's producer."""
    repeats: int
    """So often each is handed over, to a consumer that has forgotten it."""
    idle_seconds: float

    @property
    def rounds(self) -> int:
        """Hand-overs of every length and arm."""
        return self.prompts * self.repeats


FULL = Workload((512, 4_000, 8_000, 12_000, 16_000), prompts=2, repeats=6, idle_seconds=10.0)
QUICK = Workload((512, 4_000), prompts=2, repeats=3, idle_seconds=3.0)


class HandOver(msgspec.Struct, frozen=True):
    """One prompt handed over from one arm's producer to its consumer."""

    arm: Arm
    tokens: int
    round: int
    seconds: float
    """From sending the request to the consumer to its answer of one token."""
    cached_seconds: float
    """The same for a prompt that it has in its device cache, right after."""
    nbytes: float
    read_seconds: float
    """The read alone, by the consumer's own counter."""


class Measured(msgspec.Struct):
    """Everything that was seen."""

    handovers: list[HandOver] = []
    limits: dict[int, list[Limit]] = {}
    """By prompt length, one a round."""
    first: dict[Arm, float] = {}
    """Seconds of the first hand-over of all, in which the engines meet."""
    idle: dict[Arm, dict[str, dict[str, tuple[float, float]]]] = {}
    """By role, then by kind of process: percent of a core in all, and beside main threads."""


class Run:
    """One benchmark over running pairs.

    Args:
        pairs: by arm.
        limits: what the machine can do.
        workload: how much is measured.
        say: told how far it is.
    """

    def __init__(
        self,
        pairs: Mapping[Arm, Pair],
        limits: Limits,
        workload: Workload,
        say: Callable[[str], None],
    ) -> None:
        self.measured = Measured()
        self._pairs = pairs
        self._limits = limits
        self._workload = workload
        self._say = say
        self._random = np.random.default_rng(24)

    def warm_up(self) -> None:
        """Let the engines meet, and see what they use while idle."""
        for arm, pair in self._pairs.items():
            with pair.awake():
                prompt = random_tokens(self._random, READY_TOKENS)
                self.measured.first[arm] = pair.make_ready(prompt)
        self._round(0, self._prompts(self._workload.lengths[:2]))
        self.measured.handovers.clear()
        self.measured.limits.clear()
        for arm, pair in self._pairs.items():
            self._say(f"{arm.label} idle")
            engines = {role.value: engine.processes for role, engine in pair.engines.items()}
            with pair.awake():
                time.sleep(SPIN_SECONDS)
                self.measured.idle[arm] = idle.watch(engines, self._workload.idle_seconds)

    def rounds(self) -> None:
        """Hand every prompt over as often as is wanted."""
        for number in range(self._workload.prompts):
            prompts = self._prompts(self._workload.lengths)
            for pair in self._pairs.values():
                with pair.awake():
                    for prompt in prompts.values():
                        pair.compute(prompt)
            for repeat in range(self._workload.repeats):
                counted = number * self._workload.repeats + repeat
                self._say(f"round {counted + 1} of {self._workload.rounds}")
                self._round(counted, prompts)

    def _prompts(self, lengths: Sequence[int]) -> dict[int, list[int]]:
        return {length: random_tokens(self._random, length) for length in lengths}

    def _round(self, number: int, prompts: Mapping[int, list[int]]) -> None:
        for arm in rotated(list(self._pairs), number):
            pair = self._pairs[arm]
            with pair.awake():
                pair.reset()
                offered = {length: pair.prefill(prompt) for length, prompt in prompts.items()}
                time.sleep(SPIN_SECONDS)
                for length in rotated(list(prompts), number):
                    self._hand_over(pair, number, prompts[length], offered[length])
        for length in rotated(list(prompts), number):
            found = self._limits.measure(length)
            self.measured.limits.setdefault(length, []).append(found)

    def _hand_over(self, pair: Pair, number: int, prompt: list[int], body: bytes) -> None:
        pulled = pair.decode(body, len(prompt))
        # The device keeps whole blocks: as after the hand-over one token is left to compute.
        held = (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        cached = pair.cached(prompt[: held + 1])
        if cached.cached_tokens != held:
            raise BenchmarkFailed(
                f"{pair.arm.label}: {cached.cached_tokens} of {held} in its cache"
            )
        self.measured.handovers.append(
            HandOver(
                pair.arm,
                len(prompt),
                number,
                pulled.answer.seconds,
                cached.seconds,
                pulled.nbytes,
                pulled.seconds,
            )
        )
