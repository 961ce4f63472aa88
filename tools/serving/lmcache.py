# SPDX-License-Identifier: Apache-2.0
"""LMCache's server, in the environment that ``make peers-env`` makes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tools.serving.process import ServerFailed, free_port
from vllm_tiered_kv.bench.group import ProcessGroup

PEERS_PYTHON = Path(".venv-peers/bin/python")
ENVIRONMENT = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "HF_HUB_OFFLINE": "1",
}


class LMCacheServer:
    """A running ``lmcache server`` on loopback ports; leaving the ``with`` block ends it.

    Args:
        log: file for everything it prints, replaced if there.
        gib: its host memory.
        l2_adapters: one ``--l2-adapter`` each.
        python: the interpreter of its environment.

    Raises:
        ServerFailed: it ended or did not answer in time. Nothing is left running.
    """

    def __init__(
        self,
        log: Path,
        *,
        gib: int = 1,
        l2_adapters: Sequence[Mapping[str, Any]] = (),
        python: Path = PEERS_PYTHON,
        timeout_s: float = 120.0,
    ) -> None:
        self.log = log
        self.port = free_port()
        self.http_port = free_port()
        command = [
            *(str(python.absolute().with_name("lmcache")), "server"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--http-host", "127.0.0.1", "--http-port", str(self.http_port)),
            *("--l1-size-gb", str(gib), "--l1-init-size-gb", str(gib), "--eviction-policy", "LRU"),
        ]
        for adapter in l2_adapters:
            command += ["--l2-adapter", json.dumps(adapter)]
        self._group = ProcessGroup(command, log, ENVIRONMENT)
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.http_port}", timeout=10.0, trust_env=False
        )
        try:
            self._wait_healthy(timeout_s)
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> LMCacheServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Of the process, and of its session."""
        return self._group.pid

    def alive(self) -> bool:
        return self._group.status is None

    def get(self, path: str) -> Any:
        """What its HTTP interface says.

        Raises:
            httpx.HTTPError: it says nothing, or an error.
        """
        response = self._http.get(path)
        response.raise_for_status()
        return response.json()

    def l2_status(self) -> Mapping[str, Any]:
        """What its first L2 adapter reports."""
        status: Mapping[str, Any] = _first_adapters(self.get("/status"))[0]
        return status

    def stop(self) -> None:
        """A polite signal, then a kill of its whole process group."""
        self._group.stop(30.0)
        self._http.close()

    def _wait_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.alive() and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                self.get("/healthcheck")
                return
            time.sleep(0.2)
        raise ServerFailed(f"LMCache's server did not start; see {self.log}")


def connector(port: int) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of a vLLM that uses the server on this port."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }


def remove_shared_memory(processes: Iterable[int]) -> None:
    """What vLLM's workers with LMCache's connector leave behind when they are ended by SIGTERM."""
    for pid in processes:
        for left in Path("/dev/shm").glob(f"lmcache_kv_{pid}_*"):
            left.unlink(missing_ok=True)


def _first_adapters(status: Any) -> list[Any]:
    """The list of adapters, wherever it is in the status."""
    if not isinstance(status, dict):
        return []
    adapters = status.get("l2_adapters")
    if isinstance(adapters, list):
        return adapters
    return next((found for value in status.values() if (found := _first_adapters(value))), [])
