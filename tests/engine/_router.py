# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm-router`` process in front of engines that publish KV events."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.serving.router import RouterProcess

_APPLIED = re.compile(r"sequence advanced.* source=(\S+).* seq=(\d+)")


class Router(RouterProcess):
    """Routes to ``workers``.

    Args:
        workers: for each engine's URL its event sources (``/kv_event_sources``), or None for an
            engine whose events the router is not told of.
        block_tokens: tokens a block, in the engines and in their events.
        log: file for everything it prints.
    """

    def __init__(
        self, workers: Mapping[str, dict[str, Any] | None], *, block_tokens: int, log: Path
    ) -> None:
        options = ["--policy=kv_aware", "--log-level=debug", "--worker-urls", *workers]
        for url, source in workers.items():
            if source is not None:
                options += [f"--kv-event-source={url}={source['endpoint']}"]
                options += [f"--kv-event-replay-source={url}={source['replay_endpoint']}"]
        if any(workers.values()):
            options += [f"--kv-event-block-size={block_tokens}", "--kv-event-model=tiny"]
        super().__init__(options, log)

    def complete(self, prompt: Sequence[int], max_tokens: int = 2) -> None:
        """One completion. With a field it does not know in it, the router would only balance."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
        url = f"{self.url}/v1/completions"
        httpx.post(url, json=body, timeout=120.0, trust_env=False).raise_for_status()

    def applied(self, worker: str) -> int:
        """Number of the last batch of an engine's events that it has taken in; -1 for none."""
        seen = _APPLIED.findall(self.text())
        return max((int(number) for source, number in seen if source == worker), default=-1)

    def wait_until_applied(self, worker: str, number: int) -> None:
        deadline = time.monotonic() + 30
        while self.applied(worker) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(self.text()[-5000:])
            time.sleep(0.05)
