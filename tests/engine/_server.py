# SPDX-License-Identifier: Apache-2.0
"""Start, share and stop real ``vllm serve`` processes."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from tools.serving import Client, Completion, Server, ServeSpec
from tools.tinymodels import build_lora, build_model

BLOCK_TOKENS = 128
"""vLLM's default block size on the CPU platform."""
LOGPROB_TOLERANCE = 1e-3
"""Float32 sums in another order move log-probabilities by about 1e-5; one wrong page (one block in
one layer) moves them by 0.08 or more."""
_LIVE = 2

Dtype = Literal["float32", "bfloat16"]


class Models:
    """Tiny models, built once a machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, variant: str, *, dtype: Dtype = "float32", seed: int = 0) -> Path:
        return build_model(
            variant, self._folder / f"{variant}-{dtype}-{seed}", dtype=dtype, seed=seed
        )

    def lora(self, *, seed: int, dtype: Dtype = "float32") -> Path:
        """An adapter for ``llama-tiny``; other seeds are other adapters."""
        return build_lora(self._folder / f"lora-{dtype}-{seed}", dtype=dtype, seed=seed)


class Running(msgspec.Struct, frozen=True):
    """A healthy server and a client for it."""

    server: Server
    client: Client

    def close(self) -> None:
        self.client.close()
        self.server.stop()


class Pool:
    """Servers by their arguments; the one used longest ago makes room for a new one."""

    def __init__(self, models: Models, logs: Path, *, live: int = _LIVE) -> None:
        self._models = models
        self._logs = logs
        self._live = live
        self._started = 0
        self._running: OrderedDict[ServeSpec, Running] = OrderedDict()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        while self._running:
            self._running.popitem()[1].close()

    def get(self, variant: str = "llama-tiny", **options: Any) -> Client:
        """The client of :meth:`running`'s server."""
        return self.running(variant, **options).client

    def running(
        self,
        variant: str = "llama-tiny",
        *,
        extra_config: Mapping[str, Any] | None = None,
        blocks: int | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        dtype: Dtype = "float32",
        model_seed: int = 0,
        kv_transfer_config: Mapping[str, Any] | None = None,
    ) -> Running:
        """A server with just these arguments, started if there is none.

        Its caches hold what other tests left there: use prompts of your own.

        Args:
            extra_config: ``kv_connector_extra_config``; None for no connector.
            blocks: device KV blocks (one is never used); None for plenty.
            args: further arguments of ``vllm serve``.
            kv_transfer_config: the whole of it, instead of ``extra_config``.

        Raises:
            ServerFailed: it did not start.
        """
        spec = self.spec(
            variant,
            extra_config=extra_config,
            blocks=blocks,
            args=args,
            env=env,
            dtype=dtype,
            model_seed=model_seed,
            kv_transfer_config=kv_transfer_config,
        )
        found = self._running.pop(spec, None)
        if found is not None and not found.server.alive():
            found.close()
            found = None
        if found is None:
            while len(self._running) >= self._live:
                self._running.popitem(last=False)[1].close()
            found = self._start(spec)
        self._running[spec] = found
        return found

    @contextlib.contextmanager
    def private(self, variant: str = "llama-tiny", **options: Any) -> Iterator[Running]:
        """A server for one test alone: to kill it, restart it, or look at its process."""
        running = self._start(self.spec(variant, **options))
        try:
            yield running
        finally:
            running.close()

    def spec(
        self,
        variant: str = "llama-tiny",
        *,
        extra_config: Mapping[str, Any] | None = None,
        blocks: int | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        dtype: Dtype = "float32",
        model_seed: int = 0,
        kv_transfer_config: Mapping[str, Any] | None = None,
    ) -> ServeSpec:
        """What :meth:`get` would serve."""
        if kv_transfer_config is None and extra_config is not None:
            kv_transfer_config = tiered(extra_config)
        defaults = [f"--dtype={dtype}", "--enforce-eager", "--enable-prompt-tokens-details"]
        if blocks is not None:
            defaults.append(f"--num-gpu-blocks-override={blocks}")
        if not any(arg.startswith("--max-model-len") for arg in args):
            most = 4096 if blocks is None else min(4096, (blocks - 1) * BLOCK_TOKENS)
            defaults.append(f"--max-model-len={most}")
        return ServeSpec.make(
            self._models.path(variant, dtype=dtype, seed=model_seed),
            [*defaults, *args],
            env={"VLLM_SERVER_DEV_MODE": "1", **(env or {})},
            kv_transfer_config=kv_transfer_config,
        )

    def _start(self, spec: ServeSpec) -> Running:
        self._started += 1
        server = Server(spec, self._logs / f"server-{self._started}.log")
        return Running(server, Client(server.url))


def tiered(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """``--kv-transfer-config`` for the connector; who tests hits must not depend on luck."""
    return {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"gate": "always", **extra_config},
    }


def leftovers() -> set[Path]:
    """Files of ours that outlive an engine."""
    folders = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    return {path for folder in folders for path in folder.glob("*tiered*kv*")}


def prompt(seed: int | str, tokens: int) -> list[int]:
    """Random token ids, the same for the same seed; no special tokens among them."""
    rng = random.Random(str(seed))
    return [rng.randrange(8, 4096) for _ in range(tokens)]


def stored(client: Client) -> None:
    """Wait until no chunk is on its way into the tier any more.

    Nothing wakes an idle engine, so its figures move with requests only: tiny ones are sent,
    too short to store anything.

    Raises:
        TimeoutError: stores did not end.
    """
    deadline = time.monotonic() + 60
    while True:
        client.complete([9, 8, 9], max_tokens=1)
        if not client.metrics().value("vllm:tiered_kv_jobs_in_flight", direction="store"):
            return
        if time.monotonic() > deadline:
            raise TimeoutError("stores did not end within a minute")


def flushed(client: Client) -> bool:
    """Empty the device's prefix cache, once all that was computed is in the tier."""
    stored(client)
    return client.reset_prefix_cache()


def assert_same_output(expected: Completion, actual: Completion) -> None:
    """Same tokens, and log-probabilities within :data:`LOGPROB_TOLERANCE`."""
    assert actual.token_ids == expected.token_ids
    pairs = zip(expected.logprobs, actual.logprobs, strict=True)
    worst = max((abs(a - b) for a, b in pairs), default=0.0)
    assert worst <= LOGPROB_TOLERANCE
