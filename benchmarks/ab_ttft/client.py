# SPDX-License-Identifier: Apache-2.0
"""One kept-alive connection to a server, with as little in the timed path as possible.

The time to the first token is that of a whole completion of one token, not streamed: the same
moment as a stream's first event, one parse less at the client, and no difference between arms.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tools.serving import Metrics

_JSON = {"content-type": "application/json"}


class BenchmarkFailed(RuntimeError):
    """Something happened that would make the figures untrue."""


class Answer(msgspec.Struct, frozen=True):
    """One completion."""

    seconds: float
    """From sending the request to the end of the response."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens not computed, by the server's own account."""


def completion_body(
    model: str,
    prompt: Sequence[int],
    tokens: int = 1,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> bytes:
    """The request for so many tokens after ``prompt``, encoded before the clock runs."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "add_special_tokens": False,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    return msgspec.json.encode(body)


class Connection:
    """Talks to one server on loopback.

    Args:
        port: the server's.
        timeout_s: longest wait for one answer.
    """

    def __init__(self, port: int, *, timeout_s: float = 120.0) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)

    def close(self) -> None:
        self._http.close()

    def complete(self, body: bytes) -> Answer:
        """Send one request made by :func:`completion_body`.

        Raises:
            BenchmarkFailed: the server refused it.
        """
        return self.exchange(body)[0]

    def exchange(self, body: bytes) -> tuple[Answer, dict[str, Any]]:
        """The same, and what the answer's ``kv_transfer_params`` are; empty where it has none."""
        started = time.perf_counter()
        content = self._send("POST", "/v1/completions", body)
        seconds = time.perf_counter() - started
        answer: dict[str, Any] = msgspec.json.decode(content)
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        found = Answer(seconds, usage["prompt_tokens"], details.get("cached_tokens") or 0)
        return found, answer.get("kv_transfer_params") or {}

    def get(self, path: str) -> bytes:
        return self._send("GET", path)

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics").decode())

    def reset_device_cache(self, *, timeout_s: float = 10.0) -> None:
        """Empty the device's prefix cache and leave the connector's tiers alone.

        Raises:
            BenchmarkFailed: blocks were still held after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not msgspec.json.decode(self._send("POST", "/reset_prefix_cache"))["success"]:
            if time.monotonic() > deadline:
                raise BenchmarkFailed(f"device cache not reset after {timeout_s:.0f} s")
            time.sleep(0.02)

    def _send(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._http.request(method, path, body=body, headers=_JSON)
        response = self._http.getresponse()
        content = response.read()
        if response.status != 200:
            text = content[:1000].decode(errors="replace")
            raise BenchmarkFailed(f"{method} {path}: HTTP {response.status}: {text}")
        return content
