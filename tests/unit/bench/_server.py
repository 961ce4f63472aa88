# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server that speaks the completions API, with faults where a test wants them.

``python -m tests.unit.bench._server PORT`` runs it as a process of its own, with a child beside it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec


class Part(msgspec.Struct, frozen=True):
    """Bytes to write, and what to wait for before."""

    data: bytes
    after: threading.Event | None = None


class Refuse(msgspec.Struct, frozen=True):
    """An error status instead of a stream."""

    status: int
    text: str


class Break(msgspec.Struct, frozen=True):
    """These parts, and then no end: the connection is cut."""

    parts: list[Part]


Plan = Callable[[dict[str, Any]], "list[Part] | Refuse | Break"]


def event(body: Any) -> Part:
    return Part(b"data: " + json.dumps(body).encode() + b"\n\n")


DONE = Part(b"data: [DONE]\n\n")


def token(number: int, *, text: str = " x", logprob: float = -0.5, end: bool = False) -> Part:
    logprobs = {"tokens": [f"token_id:{number}"], "token_logprobs": [logprob]}
    choice = {"text": text, "logprobs": logprobs, "finish_reason": "length" if end else None}
    return event({"choices": [choice]})


def usage(prompt: int, output: int, cached: int | None = None) -> Part:
    details = None if cached is None else {"cached_tokens": cached}
    found = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    return event({"choices": [], "usage": found})


def answered(request: dict[str, Any], *, shift: int = 0) -> list[Part]:
    """What depends on the prompt alone, as a greedy model's answer does."""
    prompt, count = request["prompt"], request["max_tokens"]
    base = sum(prompt) if isinstance(prompt, list) else len(prompt)
    parts = [token((base + i) % 1000 + shift, end=i == count - 1) for i in range(count)]
    return [*parts, usage(len(prompt), count, cached=len(prompt) // 2), DONE]


class SseServer:
    """Leaving the ``with`` block ends it.

    Args:
        plan: what to answer; by default :func:`answered`.
        metrics: what ``/metrics`` says for so many prompt tokens; None: 404.
    """

    def __init__(
        self,
        plan: Plan = answered,
        *,
        metrics: Callable[[int], str] | None = None,
        models: bytes = b'{"data": [{"id": "tiny"}]}',
        port: int = 0,
        seen: list[str] | None = None,
        name: str = "",
    ) -> None:
        self.plan = plan
        self.metrics = metrics
        self.models = models
        self.requests: list[dict[str, Any]] = []
        self.keys: dict[str, set[str | None]] = {}
        """What was asked for with which authorization."""
        self.prompt_tokens = 0
        self.under_way = self.most = 0
        self.lock = threading.Lock()
        self.seen = seen
        self.name = name
        self._http = _Http(("127.0.0.1", port), _Handler)
        self._http.owner = self
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> SseServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @contextlib.contextmanager
    def taken(self, request: dict[str, Any]) -> Iterator[None]:
        with self.lock:
            self.requests.append(request)
            self.prompt_tokens += len(request["prompt"])
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            if self.seen is not None:
                self.seen.append(self.name)
        try:
            yield
        finally:
            with self.lock:
                self.under_way -= 1


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: SseServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    @property
    def owner(self) -> SseServer:
        assert isinstance(self.server, _Http)
        return self.server.owner

    def do_GET(self) -> None:
        self._note_key()
        if self.path == "/v1/models":
            self._reply(200, self.owner.models)
        elif self.path == "/metrics" and self.owner.metrics is not None:
            self._reply(200, self.owner.metrics(self.owner.prompt_tokens).encode())
        else:
            self._reply(200 if self.path == "/health" else 404, b"")

    def _note_key(self) -> None:
        self.owner.keys.setdefault(self.path, set()).add(self.headers.get("authorization"))

    def do_POST(self) -> None:
        self._note_key()
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        # A request is over before its last byte is sent: what comes next is not beside it.
        with self.owner.taken(request):
            plan = self.owner.plan(request)
            if not isinstance(plan, Refuse):
                self._stream(plan.parts if isinstance(plan, Break) else plan)
        if isinstance(plan, Refuse):
            self._reply(plan.status, plan.text.encode())
        elif isinstance(plan, Break):
            self.close_connection = True
        else:
            with contextlib.suppress(ConnectionError):
                self.wfile.write(b"0\r\n\r\n")

    def _stream(self, parts: list[Part]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            for part in parts:
                if part.after is not None:
                    part.after.wait(30)
                self.wfile.write(b"%x\r\n%s\r\n" % (len(part.data), part.data))
                self.wfile.flush()

    def _reply(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def scrape(prompt_tokens: int) -> str:
    """As vLLM with this connector would: half of all from the CPU tier, a tenth from the device."""
    labels = 'model_name="tiny",engine="0"'
    return "\n".join(
        (
            "# TYPE vllm:prompt_tokens counter",
            f"vllm:prompt_tokens_total{{{labels}}} {prompt_tokens}",
            "# TYPE vllm:prefix_cache_hits counter",
            f"vllm:prefix_cache_hits_total{{{labels}}} {0.1 * prompt_tokens}",
            "# TYPE vllm:external_prefix_cache_hits counter",
            f"vllm:external_prefix_cache_hits_total{{{labels}}} {0.5 * prompt_tokens}",
            "# TYPE vllm:tiered_kv_hit_tokens counter",
            f'vllm:tiered_kv_hit_tokens_total{{{labels},tier="cpu"}} {0.5 * prompt_tokens}',
            f'vllm:tiered_kv_hit_tokens_total{{{labels},tier="disk"}} 0',
            "",
        )
    )


def main() -> None:
    port, *children = sys.argv[1:]
    for path in children:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(path).write_text(str(child.pid))
    print("ready", flush=True)  # before: whoever asks meanwhile finds it in the log
    with SseServer(metrics=scrape, port=int(port)):
        threading.Event().wait()


if __name__ == "__main__":
    main()
