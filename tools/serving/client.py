# SPDX-License-Identifier: Apache-2.0
"""Requests to a vLLM server, timed at the client."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from tools.serving.metrics import Metrics


class RequestFailed(RuntimeError):
    """The server refused a request, or its answer broke off."""


class Completion(msgspec.Struct, frozen=True):
    """One finished completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token of ``token_ids``."""
    text: str
    ttft_s: float
    """From sending the request to the first token's arrival."""
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens not computed, by the server's own account (every tier together)."""
    finish_reason: str


class Client:
    """Talks to one server; safe to use from several threads.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        timeout_s: longest silence of the server within one request.
    """

    def __init__(self, url: str, *, timeout_s: float = 120.0) -> None:
        self.url = url
        # Loopback only: a proxy from the environment must not get in between.
        self._http = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def models(self) -> list[str]:
        """Names the server answers to: the base model first, then its LoRA adapters."""
        response = self._http.get("/v1/models")
        response.raise_for_status()
        return [model["id"] for model in response.json()["data"]]

    def healthy(self) -> bool:
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 16,
        model: str | None = None,
        seed: int | None = 0,
        ignore_eos: bool = True,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        **body: Any,
    ) -> Completion:
        """One greedy, streamed completion.

        Args:
            prompt: text or token ids.
            model: a name from :meth:`models`; None for the base model.
            body: further fields of the request, over the ones set here.

        Raises:
            RequestFailed: an error status, an error in the stream, or no end of it.
        """
        request: dict[str, Any] = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "seed": seed,
            "ignore_eos": ignore_eos,
            "logprobs": 0,
            "return_tokens_as_token_ids": True,
            "add_special_tokens": False,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"model": model} if model is not None else {}),
            **({"cache_salt": cache_salt} if cache_salt is not None else {}),
            **({"kv_transfer_params": kv_transfer_params} if kv_transfer_params else {}),
            **body,
        }
        content = msgspec.json.encode(request)
        started = time.perf_counter()
        first: float | None = None
        tokens: list[int] = []
        logprobs: list[float] = []
        text: list[str] = []
        usage: dict[str, Any] = {}
        finish = ""
        for event in self._events(content):
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                found = choice.get("logprobs") or {}
                if found.get("tokens") and first is None:
                    first = time.perf_counter()
                tokens += [int(name.removeprefix("token_id:")) for name in found.get("tokens", ())]
                logprobs += found.get("token_logprobs", ())
                text.append(choice.get("text", ""))
                finish = choice.get("finish_reason") or finish
        if first is None or not finish or not usage:
            raise RequestFailed("the stream ended early")
        details = usage.get("prompt_tokens_details") or {}
        return Completion(
            token_ids=tuple(tokens),
            logprobs=tuple(logprobs),
            text="".join(text),
            ttft_s=first - started,
            total_s=time.perf_counter() - started,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=details.get("cached_tokens") or 0,
            finish_reason=finish,
        )

    def abandon(self, prompt: Sequence[int], *, after: int, max_tokens: int) -> None:
        """Ask for a completion and go away after so many events of its stream.

        Raises:
            RequestFailed: an error status.
        """
        request = {"prompt": list(prompt), "max_tokens": max_tokens, "stream": True}
        events = self._events(msgspec.json.encode(request | {"ignore_eos": True}))
        with contextlib.closing(events):
            for _ in itertools.islice(events, after + 1):
                pass

    def metrics(self) -> Metrics:
        response = self._http.get("/metrics")
        response.raise_for_status()
        return Metrics(response.text)

    def wait_for_metrics(
        self, done: Callable[[Metrics], bool], *, timeout_s: float = 30.0
    ) -> Metrics:
        """Scrape until ``done`` holds; returns that scrape.

        Raises:
            TimeoutError: it did not hold within ``timeout_s``; carries our and the cache's samples.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            if done(metrics):
                return metrics
            if time.monotonic() > deadline:
                seen = metrics.as_dict("vllm:tiered_kv") | metrics.as_dict("vllm:prefix_cache")
                raise TimeoutError(f"metrics after {timeout_s} s: {seen}")
            time.sleep(0.05)

    def reset_prefix_cache(self, *, external: bool = False) -> bool:
        """Empty the device's prefix cache, with ``external`` the connector's tiers as well.

        Needs a server with ``VLLM_SERVER_DEV_MODE=1``; False when blocks are still held.
        """
        response = self._http.post(
            "/reset_prefix_cache", params={"reset_external": str(external).lower()}
        )
        response.raise_for_status()
        return bool(response.json()["success"])

    def post(self, path: str, **params: str) -> dict[str, Any]:
        """POST to one of the server's own endpoints; returns what it answers.

        Raises:
            httpx.HTTPStatusError: an error status.
        """
        response = self._http.post(path, params=params)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def _events(self, content: bytes) -> Generator[dict[str, Any], None, None]:
        headers = {"content-type": "application/json"}
        try:
            with self._http.stream(
                "POST", "/v1/completions", content=content, headers=headers
            ) as response:
                if response.status_code != 200:
                    response.read()
                    raise RequestFailed(f"HTTP {response.status_code}: {response.text[:2000]}")
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if not data or data == "[DONE]":
                        continue
                    event: dict[str, Any] = msgspec.json.decode(data)
                    if "error" in event:
                        raise RequestFailed(str(event["error"]))
                    yield event
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error
