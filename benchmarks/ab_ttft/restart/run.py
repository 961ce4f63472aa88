# SPDX-License-Identifier: Apache-2.0
"""Which prompt is stored and asked when, and what is kept of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.ab_ttft.arms import Arm, Setup, files_folder
from benchmarks.ab_ttft.client import BenchmarkFailed, completion_body
from benchmarks.ab_ttft.floor import DiskRead
from benchmarks.ab_ttft.measure import CHUNK_TOKENS, TAIL_TOKENS, Phase, random_tokens, rotated
from benchmarks.ab_ttft.restart import page_cache
from benchmarks.ab_ttft.servers import Engine, running

DEVICE_SHARE = 0.9
"""Share of a hit's KV bytes that must have come from the device; the rest is rounding."""
_SETTLE_S = 60.0
_STABLE_S = 1.0


class Workload(msgspec.Struct, frozen=True):
    """How much is measured."""

    lengths: tuple[int, ...]
    rounds: int
    """Restarts of every arm."""
    prompts: int
    """Prompts of each length that are asked after a restart, each once."""

    @property
    def stored_tokens(self) -> int:
        """Tokens that every arm stores."""
        return sum(self.lengths) * self.rounds * self.prompts


FULL = Workload(lengths=(1024, 2048, 4096, 8000), rounds=4, prompts=3)
QUICK = Workload(lengths=(1024, 4096), rounds=2, prompts=1)


class Sample(msgspec.Struct, frozen=True):
    """One request."""

    arm: Arm
    tokens: int
    """Nominal prompt length."""
    prompt: int
    """Which of the prompts of that length."""
    phase: Phase
    """COLD when it was stored, or without a connector; HIT after the restart; DEVICE: asked of no
    connector a second time."""
    seconds: float
    cached_tokens: int
    device_bytes: int
    """Bytes the arm's processes had read from the disk meanwhile."""

    @property
    def hit(self) -> bool:
        return self.cached_tokens >= self.tokens - CHUNK_TOKENS


class Measured(msgspec.Struct):
    """Everything that was seen."""

    token_bytes: int
    """KV bytes of a token."""
    samples: list[Sample] = []
    disk_reads: dict[int, list[float]] = {}
    """Seconds of one direct read of a prompt's KV bytes, by prompt length."""
    disk_hits: float = 0.0
    """Tokens that our own counter says came from disk, over all rounds."""
    starts: dict[Arm, list[float]] = {}
    """Seconds from the start of an arm's first process until it was at rest."""

    def is_from_device(self, sample: Sample) -> bool:
        """Whether the files were read from the disk, and not from the page cache."""
        return sample.device_bytes >= DEVICE_SHARE * sample.cached_tokens * self.token_bytes


class Run:
    """One benchmark.

    Args:
        arms: in the order in which they are stored.
        setup: what every arm is given.
        workload: how much.
        token_bytes: KV bytes of a token.
        say: takes lines about the progress.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        setup: Setup,
        workload: Workload,
        token_bytes: int,
        say: Callable[[str], None],
    ) -> None:
        self.measured = Measured(token_bytes)
        self._arms = arms
        self._setup = setup
        self._workload = workload
        self._say = say
        self._random = np.random.default_rng(21)
        count = range(workload.rounds * workload.prompts)
        self._bodies = {
            (n, length): self._body(length) for n in count for length in workload.lengths
        }

    def store(self) -> None:
        """Every arm computes every prompt and keeps it."""
        for arm in self._arms:
            folder = files_folder(arm, self._setup)
            if folder is None:
                continue
            self._say(f"storing: {arm.label}")
            with running(arm, self._setup) as engine:
                self._warm(engine)
                for number, length in self._bodies:
                    self._ask(engine, length, number, Phase.COLD)
                self._wait_stored(folder, engine)

    def rounds(self) -> None:
        """Every arm is started anew and asked, in rotating order."""
        workload = self._workload
        with DiskRead(self._setup.work, max(workload.lengths) * self.measured.token_bytes) as disk:
            for number in range(workload.rounds):
                for arm in rotated(self._arms, number):
                    self._say(f"round {number + 1} of {workload.rounds}: {arm.label}")
                    self._round(arm, number)
                for length in workload.lengths:
                    for _ in range(workload.prompts):
                        seconds = disk.seconds(length * self.measured.token_bytes)
                        self.measured.disk_reads.setdefault(length, []).append(seconds)

    def _round(self, arm: Arm, number: int) -> None:
        workload = self._workload
        if (folder := files_folder(arm, self._setup)) is not None:
            left = page_cache.drop(folder)
            if left:
                raise BenchmarkFailed(f"{arm.label}: {left} pages stay in the page cache")
        started = time.perf_counter()
        with running(arm, self._setup) as engine:
            engine.clock.wait_quiet(_SETTLE_S)
            self.measured.starts.setdefault(arm, []).append(time.perf_counter() - started)
            self._warm(engine)
            hits = _disk_hits(engine)
            first = number * workload.prompts
            for prompt in range(first, first + workload.prompts):
                for length in rotated(workload.lengths, number + prompt):
                    if arm is Arm.NONE:
                        self._ask(engine, length, prompt, Phase.COLD)
                        self._ask(engine, length, prompt, Phase.DEVICE)
                    else:
                        self._ask(engine, length, prompt, Phase.HIT)
            self.measured.disk_hits += _disk_hits(engine) - hits

    def _warm(self, engine: Engine) -> None:
        """The first requests of a process are slower whatever they ask for."""
        body = self._body(min(self._workload.lengths))
        for _ in range(2):
            engine.complete(body)
        engine.clock.wait_quiet(_SETTLE_S)

    def _ask(self, engine: Engine, length: int, number: int, phase: Phase) -> None:
        clock = engine.clock
        before = page_cache.device_reads(clock.processes)
        answer = engine.complete(self._bodies[number, length])
        clock.wait_done(_SETTLE_S)
        read = page_cache.device_reads(clock.processes) - before
        if answer.prompt_tokens != length + TAIL_TOKENS:
            raise BenchmarkFailed(f"{engine.arm.label}: saw {answer.prompt_tokens} tokens")
        if phase is Phase.COLD and answer.cached_tokens:
            raise BenchmarkFailed(f"{engine.arm.label}: a new prompt was cached")
        self.measured.samples.append(
            Sample(engine.arm, length, number, phase, answer.seconds, answer.cached_tokens, read)
        )

    def _wait_stored(self, folder: Path, engine: Engine) -> None:
        """Wait until the files hold all prompts and nothing changes any more."""
        lengths = [length for _, length in self._bodies]
        whole = sum(length // CHUNK_TOKENS * CHUNK_TOKENS for length in lengths)
        deadline = time.monotonic() + _SETTLE_S
        for held in _stable_sizes(folder, deadline):
            if held >= whole * self.measured.token_bytes:
                engine.clock.wait_quiet(_SETTLE_S)
                return
        self._say(f"{engine.arm.label} has not stored all prompts; what lacks is a miss")

    def _body(self, length: int) -> bytes:
        return completion_body(
            str(self._setup.model), random_tokens(self._random, length + TAIL_TOKENS)
        )


def _stable_sizes(folder: Path, deadline: float) -> Iterator[int]:
    """Sizes of a folder that were the same twice, until the deadline."""
    before = -1
    while time.monotonic() < deadline:
        held = page_cache.folder_bytes(folder)
        if held == before:
            yield held
        before = held
        time.sleep(_STABLE_S)


def _disk_hits(engine: Engine) -> float:
    return engine.metrics().value("vllm:tiered_kv_hit_tokens_total", tier="disk")
