# SPDX-License-Identifier: Apache-2.0
"""``vllm-router`` processes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from typing_extensions import Self

from tools.serving.process import free_port
from vllm_tiered_kv.bench.group import ProcessGroup

READY_SECONDS = 60.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class RouterFailed(RuntimeError):
    """The router did not become ready; the message ends with what it printed."""


def binary() -> str:
    """``vllm-router`` of this environment (``requirements/dev.txt``), or ``$VLLM_ROUTER``."""
    return os.environ.get("VLLM_ROUTER", str(Path(sys.executable).with_name("vllm-router")))


class RouterProcess:
    """A router that is ready; leaving the ``with`` block ends it.

    Args:
        options: its arguments, beyond the ports.
        log: file for everything it prints.

    Raises:
        RouterFailed: it is not ready in time.
    """

    def __init__(self, options: Sequence[str], log: Path) -> None:
        self.log = log
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [binary(), *options, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port())]
        command += ["--worker-startup-check-interval", "1"]
        self._group = ProcessGroup(command, log, {})
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._group.stop(10.0)

    def text(self) -> str:
        """What it has printed so far, without colours."""
        return _COLOUR.sub("", self.log.read_text(errors="replace"))

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self._group.status is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/readiness", trust_env=False).status_code == 200:
                    return
            time.sleep(0.1)
        raise RouterFailed(f"the router is not ready:\n{self.text()[-5000:]}")


class PrefillRouter(RouterProcess):
    """Routes each request to a prefill engine first.

    Args:
        prefill: URLs of engines that hand KV over.
        decode: URLs of engines that go on from it.
        log: file for everything it prints.
    """

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], *, log: Path) -> None:
        options = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        for url in prefill:
            options += ["--prefill", url]
        for url in decode:
            options += ["--decode", url]
        super().__init__(options, log)
