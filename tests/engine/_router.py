# SPDX-License-Identifier: Apache-2.0
"""A real ``vllm-router`` process in front of engines that publish KV events."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.serving.process import free_port
from tools.serving.router import binary

_APPLIED = re.compile(r"sequence advanced.* source=(\S+).* seq=(\d+)")


class Router:
    """Routes to ``workers``; leaving the ``with`` block ends it.

    Args:
        workers: for each engine's URL its event sources (``/kv_event_sources``), or None for an
            engine whose events the router is not told of.
        block_tokens: tokens a block, in the engines and in their events.
        log: file for everything it prints.
    """

    def __init__(
        self, workers: Mapping[str, dict[str, Any] | None], *, block_tokens: int, log: Path
    ) -> None:
        self._log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [binary(), "--host=127.0.0.1", f"--port={port}", "--policy=kv_aware"]
        command += [f"--prometheus-port={free_port()}", "--log-level=debug"]
        command += ["--worker-startup-check-interval=1", "--worker-urls", *workers]
        for url, source in workers.items():
            if source is not None:
                command += [f"--kv-event-source={url}={source['endpoint']}"]
                command += [f"--kv-event-replay-source={url}={source['replay_endpoint']}"]
        if any(workers.values()):
            command += [f"--kv-event-block-size={block_tokens}", "--kv-event-model=tiny"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            self._wait_healthy()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Router:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)

    def complete(self, prompt: Sequence[int], max_tokens: int = 2) -> None:
        """One completion. With a field it does not know in it, the router would only balance."""
        body = {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0.0}
        url = f"{self.url}/v1/completions"
        httpx.post(url, json=body, timeout=120.0, trust_env=False).raise_for_status()

    def applied(self, worker: str) -> int:
        """Number of the last batch of an engine's events that it has taken in; -1 for none."""
        seen = _APPLIED.findall(self._text())
        return max((int(number) for source, number in seen if source == worker), default=-1)

    def wait_until_applied(self, worker: str, number: int) -> None:
        deadline = time.monotonic() + 30
        while self.applied(worker) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(self._text()[-5000:])
            time.sleep(0.05)

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readiness", trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise RuntimeError(f"the router is not ready:\n{self._text()[-5000:]}")

    def _text(self) -> str:
        text = self._log.read_text(errors="replace")
        return re.sub(r"\x1b\[[0-9;]*m", "", text)
