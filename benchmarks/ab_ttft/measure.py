# SPDX-License-Identifier: Apache-2.0
"""Which request goes to which arm when, and what is kept of it."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.ab_ttft.arms import Arm
from benchmarks.ab_ttft.client import Answer, BenchmarkFailed, completion_body
from benchmarks.ab_ttft.floor import Memcpy
from benchmarks.ab_ttft.servers import Engine
from tools.serving import Metrics

TAIL_TOKENS = 8
"""Tokens of a prompt beyond its nominal length, as a question after a document. No cache covers
the last token, so with a prompt of whole blocks the device cache would compute a whole block again
and the floor would be too high."""
CHUNK_TOKENS = 256
"""A hit may lack this many tokens at most: LMCache keeps whole runs of 256."""

_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 16, 4000
_SETTLE_S = 20.0

T = TypeVar("T")


class Phase(str, enum.Enum):
    """What the server knew of a prompt."""

    COLD = "cold"
    HIT = "hit"
    """It was in the connector's tier and no longer on the device."""
    DEVICE = "device"
    """It was still in the device cache."""


class Sample(msgspec.Struct, frozen=True):
    """One request."""

    arm: Arm
    tokens: int
    """Nominal prompt length."""
    round: int
    phase: Phase
    seconds: float
    cached_tokens: int
    cpu_seconds: float
    """Processor time of all of the arm's processes: up to the answer all of it, from there until
    they were at rest all but the worker's spinning."""

    @property
    def hit(self) -> bool:
        return self.cached_tokens >= self.tokens - CHUNK_TOKENS


class Workload(msgspec.Struct, frozen=True):
    """How much is measured."""

    lengths: tuple[int, ...]
    warmup_rounds: int
    rounds: int
    pairs: int
    """Further cold prompts to no connector and to ours alone, one right after the other."""


FULL = Workload(lengths=(512, 1024, 2048, 4096, 8000), warmup_rounds=2, rounds=12, pairs=20)
QUICK = Workload(lengths=(512, 2048), warmup_rounds=1, rounds=6, pairs=6)


class Measured(msgspec.Struct):
    """Everything that was seen."""

    samples: list[Sample] = []
    memcpy: dict[int, list[float]] = {}
    """Seconds of one copy of a prompt's KV, by prompt length, one a round."""
    hook_seconds: dict[int, dict[str, float]] = {}
    """Seconds in our hooks a cold prompt, by prompt length, then by half."""
    idle: dict[Arm, float] = {}
    """Cores in use by an arm that nothing is asked of."""
    hit_tokens: dict[Arm, float] = {}
    """Tokens the server's own counter says came from the connector, over all rounds."""
    unquiet: int = 0
    """Requests after which an arm did not come to rest."""


class Run:
    """One benchmark over running engines."""

    def __init__(
        self, engines: Mapping[Arm, Engine], workload: Workload, *, model: str, token_bytes: int
    ) -> None:
        self.measured = Measured()
        self._engines = engines
        self._workload = workload
        self._model = model
        self._token_bytes = token_bytes
        self._memcpy = Memcpy(max(workload.lengths) * token_bytes)
        self._random = np.random.default_rng(20)
        self._last: Arm | None = None

    def warm_up(self) -> None:
        """Rounds that are not kept, after the arms came to rest."""
        for engine in self._engines.values():
            engine.clock.wait_quiet(60.0)
        for arm, engine in self._engines.items():
            self.measured.idle[arm] = engine.clock.share(2.0)
        for number in range(self._workload.warmup_rounds):
            self._round(number)
        self.measured.samples.clear()
        self.measured.memcpy.clear()
        self.measured.unquiet = 0

    def rounds(self) -> Iterator[int]:
        """Every arm, every length: cold, then again from where the connector put it."""
        before = self._external_hits()
        for number in range(self._workload.rounds):
            self._round(number)
            yield number
        after = self._external_hits()
        self.measured.hit_tokens = {arm: after[arm] - before[arm] for arm in after}

    def pairs(self) -> Iterator[int]:
        """Cold prompts to no connector and to ours, neighbours in time, in alternating order."""
        if Arm.OURS not in self._engines or Arm.NONE not in self._engines:
            return
        ours = self._engines[Arm.OURS]
        for length in self._workload.lengths:
            before = hook_seconds(ours.metrics())
            for pair in range(self._workload.pairs):
                body = self._prompt(length)
                order = [Arm.NONE, Arm.OURS] if pair % 2 else [Arm.OURS, Arm.NONE]
                for arm in order:
                    self._ask(arm, length, self._workload.rounds + pair, Phase.COLD, body)
            after = hook_seconds(ours.metrics())
            if after:
                count = max(1, self._workload.pairs)
                self.measured.hook_seconds[length] = {
                    half: (seconds - before.get(half, 0.0)) / count
                    for half, seconds in after.items()
                }
            yield length

    def _round(self, number: int) -> None:
        arms = rotated(list(self._engines), number)
        lengths = rotated(list(self._workload.lengths), number)
        bodies = {length: self._prompt(length) for length in lengths}
        for arm in arms:
            for length in lengths:
                self._ask(arm, length, number, Phase.COLD, bodies[length])
        for arm in arms:
            phase = Phase.DEVICE if arm is Arm.NONE else Phase.HIT
            if phase is Phase.HIT:
                self._turn(arm)
                self._engines[arm].reset_device_cache()
            for length in lengths:
                self._ask(arm, length, number, phase, bodies[length])
            self._engines[arm].discard_files()
        for length in lengths:
            copy = self._memcpy.seconds(length * self._token_bytes)
            self.measured.memcpy.setdefault(length, []).append(copy)

    def _turn(self, arm: Arm) -> None:
        """Let the arm before come to rest, its worker's spinning included."""
        if self._last is not None and self._last is not arm:
            self.measured.unquiet += not self._engines[self._last].clock.wait_quiet(_SETTLE_S)
        self._last = arm

    def _ask(self, arm: Arm, length: int, number: int, phase: Phase, body: bytes) -> None:
        self._turn(arm)
        engine = self._engines[arm]
        clock = engine.clock
        start = clock.seconds()
        answer = engine.complete(body)
        answered, rest = clock.seconds(), clock.work_seconds()
        self.measured.unquiet += not clock.wait_done(_SETTLE_S)
        used = answered - start + clock.work_seconds() - rest
        _check(arm, length, phase, answer)
        self.measured.samples.append(
            Sample(arm, length, number, phase, answer.seconds, answer.cached_tokens, used)
        )

    def _external_hits(self) -> dict[Arm, float]:
        return {
            arm: engine.metrics().value("vllm:external_prefix_cache_hits_total")
            for arm, engine in self._engines.items()
            if arm is not Arm.NONE
        }

    def _prompt(self, length: int) -> bytes:
        """The request for a prompt that was never sent before."""
        return completion_body(self._model, random_tokens(self._random, length + TAIL_TOKENS))


def hook_seconds(metrics: Metrics) -> dict[str, float]:
    """Processor seconds in our hooks by half; empty when the server does not report them."""
    total: dict[str, float] = {}
    for sample in metrics:
        if sample.name != "vllm:tiered_kv_hook_seconds_total":
            continue
        # The wall clock would also count what other threads take from a busy machine.
        if sample.labels.get("clock") == "cpu":
            half = sample.labels.get("half", "")
            total[half] = total.get(half, 0.0) + sample.value
    return total


def _check(arm: Arm, length: int, phase: Phase, answer: Answer) -> None:
    """Refuse figures that are not of what they claim to be; a missed hit is counted instead."""
    where = f"{arm.label}, {length} tokens, {phase.value}"
    if answer.prompt_tokens != length + TAIL_TOKENS:
        raise BenchmarkFailed(f"{where}: the server saw {answer.prompt_tokens} tokens")
    if phase is Phase.COLD and answer.cached_tokens:
        raise BenchmarkFailed(f"{where}: {answer.cached_tokens} tokens came from a cache")
    if phase is Phase.DEVICE and answer.cached_tokens < length - CHUNK_TOKENS:
        raise BenchmarkFailed(f"{where}: only {answer.cached_tokens} tokens were cached")


def random_tokens(random: np.random.Generator, count: int) -> list[int]:
    """Tokens of a prompt that was never sent before."""
    found: list[int] = random.integers(_FIRST_TOKEN_ID, _LAST_TOKEN_ID, size=count).tolist()
    return found


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items, beginning with another one."""
    by %= len(items)
    return [*items[by:], *items[:by]]
