# SPDX-License-Identifier: Apache-2.0
"""A producer and a consumer of one arm, and what a router between them does."""

from __future__ import annotations

import contextlib
import http.client
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.ab_ttft.client import Answer, BenchmarkFailed, Connection, completion_body
from benchmarks.ab_ttft.cpu import CpuClock
from benchmarks.pd.arms import Arm, Role, connector, consumer_params, environment, moved
from tools.serving import Server, ServeSpec

READY_SECONDS = 60.0
_TO_PRODUCER = {"do_remote_decode": True, "do_remote_prefill": False}
_COUNTED_SECONDS = 5.0
_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
}


class Setup(msgspec.Struct, frozen=True):
    """What every engine is given."""

    model: Path
    work: Path
    """Folder for logs."""
    key: Path
    """The fleet's key."""
    capacity_gib: int
    """Of our CPU tier."""
    serve_args: tuple[str, ...]
    token_bytes: int
    """KV of one token."""


class Pulled(msgspec.Struct, frozen=True):
    """One request that went on from KV that was handed over."""

    answer: Answer
    nbytes: float
    """KV bytes read, by the consumer's own counter ..."""
    seconds: float
    """... and the time of the read alone, likewise."""


class Engine:
    """One server and what measures it."""

    def __init__(self, server: Server, connection: Connection) -> None:
        self._server = server
        self.connection = connection
        self.processes = CpuClock([server.pid]).processes

    def pause(self) -> None:
        """It stands still until :meth:`resume`: one that spins while idle takes a core."""
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def exchange(self, body: bytes) -> tuple[Answer, dict[str, Any]]:
        """Send a request.

        Raises:
            BenchmarkFailed: it was refused, or the server is gone.
        """
        try:
            return self.connection.exchange(body)
        except (OSError, http.client.HTTPException) as error:
            log = f"{self._server.log}:\n{self._server.tail()}"
            raise BenchmarkFailed(f"{error!r}; {log}") from error


class Pair:
    """One arm's engines."""

    def __init__(self, arm: Arm, setup: Setup, producer: Engine, consumer: Engine) -> None:
        self.arm = arm
        self.producer = producer
        self.consumer = consumer
        self._model = str(setup.model)
        self._token_bytes = setup.token_bytes

    @property
    def engines(self) -> dict[Role, Engine]:
        return {Role.PRODUCER: self.producer, Role.CONSUMER: self.consumer}

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Within this block the engines run; beside it they stand still."""
        for engine in self.engines.values():
            engine.resume()
        try:
            yield
        finally:
            for engine in self.engines.values():
                engine.pause()

    def compute(self, prompt: Sequence[int]) -> None:
        """Let the producer have a prompt in its device cache."""
        self.producer.exchange(completion_body(self._model, prompt))

    def prefill(self, prompt: Sequence[int]) -> bytes:
        """Let the producer offer a prompt's KV; the request for the consumer.

        Raises:
            BenchmarkFailed: it offers nothing.
        """
        _, answered = self.producer.exchange(
            completion_body(self._model, prompt, kv_transfer_params=_TO_PRODUCER)
        )
        if not answered.get("do_remote_prefill"):
            raise BenchmarkFailed(f"{self.arm.label}: the producer hands nothing over")
        params = consumer_params(self.arm, answered)
        return completion_body(self._model, prompt, kv_transfer_params=params)

    def decode(self, body: bytes, tokens: int) -> Pulled:
        """Go on from it, in the consumer.

        Raises:
            BenchmarkFailed: not all of it was read.
        """
        before = self._moved()
        answer, _ = self.consumer.exchange(body)
        pulled = self._counted(answer, before)
        # The answer's count of cached tokens is the prefill engine's.
        if answer.prompt_tokens != tokens or pulled.nbytes < tokens * self._token_bytes:
            raise BenchmarkFailed(
                f"{self.arm.label}: {pulled.nbytes:.0f} bytes of {tokens} tokens were handed over"
            )
        return pulled

    def cached(self, prompt: Sequence[int]) -> Answer:
        """A prompt that the consumer has in its device cache, but for the last token."""
        params = consumer_params(self.arm)
        body = completion_body(self._model, prompt, kv_transfer_params=params)
        return self.consumer.exchange(body)[0]

    def reset(self) -> None:
        """Let the consumer forget every prompt."""
        self.consumer.connection.reset_device_cache()

    def make_ready(self, prompt: Sequence[int]) -> float:
        """Hand a prompt over until it works; seconds of that first request, handshake included.

        Raises:
            BenchmarkFailed: nothing was handed over in time.
        """
        deadline = time.monotonic() + READY_SECONDS
        self.cached(prompt[:8])  # ranks come with a first step
        while True:
            try:
                body = self.prefill(prompt)
                return self.decode(body, len(prompt)).answer.seconds
            except BenchmarkFailed:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)
            self.reset()

    def _moved(self) -> tuple[float, float]:
        return moved(self.arm, self.consumer.connection.metrics())

    def _counted(self, answer: Answer, before: tuple[float, float]) -> Pulled:
        """What the consumer's counters say of a read; they come shortly after the answer.

        Raises:
            BenchmarkFailed: they say nothing.
        """
        deadline = time.monotonic() + _COUNTED_SECONDS
        while time.monotonic() < deadline:
            nbytes, seconds = self._moved()
            if nbytes > before[0]:
                return Pulled(answer, nbytes - before[0], seconds - before[1])
            time.sleep(0.02)
        raise BenchmarkFailed(f"{self.arm.label}: the consumer counts no read")


def _core(role: Role) -> str:
    """The core an engine computes on: one each, so that one that spins leaves the other alone."""
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[list(Role).index(role) % len(cores)])


@contextlib.contextmanager
def running(arm: Arm, setup: Setup) -> Iterator[Pair]:
    """Start an arm's engines, which stand still until they are wanted; leaving the block ends them.

    Raises:
        ServerFailed: one did not become healthy.
    """
    setup.work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        engines = {}
        for role in Role:
            spec = ServeSpec.make(
                setup.model,
                setup.serve_args,
                env={
                    **_ENVIRONMENT,
                    **environment(arm),
                    "VLLM_CPU_OMP_THREADS_BIND": _core(role),
                },
                kv_transfer_config=connector(arm, role, setup.key, setup.capacity_gib),
            )
            log = setup.work / f"{arm.value}-{role.value}.log"
            server = stack.enter_context(Server(spec, log))
            connection = Connection(server.port)
            stack.callback(connection.close)
            engines[role] = Engine(server, connection)
            engines[role].pause()
        yield Pair(arm, setup, engines[Role.PRODUCER], engines[Role.CONSUMER])
