# SPDX-License-Identifier: Apache-2.0
"""Mixed load on one server: conversations, shared prefixes, aborts, resets; answers are checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from tests.engine._server import LOGPROB_TOLERANCE, prompt
from tools.serving import Client, Completion

WORKERS = 4
MAX_TOKENS = 1500
"""Of a conversation; then it ends and another begins."""
CHECKED = 0.25
"""Share of the answers that are computed again from nothing."""


class Load:
    """Threads that talk to a server until they are stopped.

    Args:
        client: the server.
        seed: of everything that is drawn.
        external: whether the connector is reset too now and then, which ends a disk tier's part.
    """

    def __init__(self, client: Client, seed: int, *, external: bool) -> None:
        self._client = client
        self._seed = seed
        self._external = external
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.counts = dict.fromkeys(("answered", "checked", "flipped", "aborted", "reset"), 0)
        """``flipped``: checked, and two tokens so near each other that sums in another order
        chose the other one; what follows cannot be compared."""
        self.wrong: list[str] = []
        """What should never be."""

    def run(self, seconds: float) -> None:
        """Keep all threads busy for so long, then wait for their last answers."""
        threads = [
            threading.Thread(target=self._talk, args=(random.Random(f"{self._seed} {i}"),))
            for i in range(WORKERS)
        ]
        for thread in threads:
            thread.start()
        self._stop.wait(seconds)
        self._stop.set()
        for thread in threads:
            thread.join(300)
            if thread.is_alive():
                self.wrong.append("a request did not come to an end within five minutes")

    def _talk(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            try:
                self._conversation(rng)
            except Exception as error:  # noqa: BLE001 - a thread must say why it ended
                self.wrong.append(f"{type(error).__name__}: {error}")
                self._stop.set()

    def _conversation(self, rng: random.Random) -> None:
        # A few system prompts, so that many conversations share a prefix.
        system = prompt(f"system {rng.randrange(4)}", rng.choice((130, 300, 700)))
        history = [*system, *prompt(rng.random(), rng.randrange(5, 200))]
        while len(history) < MAX_TOKENS and not self._stop.is_set():
            draw = rng.random()
            if draw < 0.12:
                self._client.abandon(history, after=rng.randrange(3), max_tokens=64)
                self._count("aborted")
            elif draw < 0.15:
                # Refused while blocks are in use: a busy server may always say no.
                self._client.reset_prefix_cache(external=self._external and rng.random() < 0.3)
                self._count("reset")
            history = self._turn(rng, history)

    def _turn(self, rng: random.Random, history: list[int]) -> list[int]:
        length = rng.choice((1, 8, 40, 130))
        params = {}
        if rng.random() < 0.1:
            params = {"tiered_kv": {"store": rng.random() < 0.5, "load": rng.random() < 0.5}}
        answer = self._client.complete(history, max_tokens=length, kv_transfer_params=params)
        self._count("answered")
        if len(answer.token_ids) != length:
            self.wrong.append(f"{len(answer.token_ids)} tokens where {length} were asked for")
        if rng.random() < CHECKED:
            cold = self._client.complete(
                history,
                max_tokens=length,
                cache_salt=f"cold {rng.random()}",
                kv_transfer_params={"tiered_kv": {"store": False, "load": False}},
            )
            self._check(history, cold, answer)
        return [*history, *answer.token_ids, *prompt(rng.random(), rng.randrange(3, 150))]

    def _check(self, history: Sequence[int], cold: Completion, answer: Completion) -> None:
        self._count("checked")
        pairs = zip(cold.token_ids, answer.token_ids, cold.logprobs, answer.logprobs, strict=True)
        for i, (want, got, expected, found) in enumerate(pairs):
            if abs(expected - found) > LOGPROB_TOLERANCE:
                self.wrong.append(
                    f"token {i} after {len(history)} ({answer.cached_tokens} of them cached): "
                    f"log-probability {found}, computed from nothing {expected}"
                )
                return
            if want != got:
                self._count("flipped")
                return

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def wait_idle(client: Client, timeout_s: float = 60.0) -> str | None:
    """Wait until nothing runs, is copied or holds a device block; what still does, if any."""
    deadline = time.monotonic() + timeout_s
    while True:
        client.complete([9, 8, 9], max_tokens=1)  # figures move with requests only
        metrics = client.metrics()
        busy = {
            name: value
            for name in (
                "vllm:num_requests_running",
                "vllm:num_requests_waiting",
                "vllm:tiered_kv_jobs_in_flight",
                "vllm:kv_cache_usage_perc",
            )
            if (value := metrics.value(name)) > 0
        }
        if not busy:
            return None
        if time.monotonic() > deadline:
            return f"still busy after {timeout_s:.0f} s: {busy}"
