# SPDX-License-Identifier: Apache-2.0
"""The servers of the demo: one alone, or one that prefills, one that decodes, and the router."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec

from demo.scenario import BLOCK_TOKENS, DEVICE_BLOCKS, MAX_TOKENS
from tools.serving import Client, Server, ServeSpec, compute_cpus
from tools.serving.router import PrefillRouter
from vllm_tiered_kv.remote import keys

READY_SECONDS = 60.0


class Pair(msgspec.Struct, frozen=True):
    """Clients of the three."""

    router: Client
    producer: Client
    consumer: Client


@contextlib.contextmanager
def single(model: Path, build: Path) -> Iterator[Client]:
    """A server without any connector, warmed up."""
    server = Server(_spec(model, None, None), build / "demo" / "single.log")
    with server, Client(server.url) as client:
        warm_up(client)
        yield client


@contextlib.contextmanager
def pair(model: Path, build: Path) -> Iterator[Pair]:
    """A producer, a consumer and the router, warmed up."""
    logs = build / "demo"
    key = _key(build)
    with contextlib.ExitStack() as stack:
        producer = stack.enter_context(
            Server(_spec(model, "kv_producer", key), logs / "prefill.log")
        )
        consumer = stack.enter_context(
            Server(_spec(model, "kv_consumer", key), logs / "decode.log")
        )
        clients = [stack.enter_context(Client(url)) for url in (producer.url, consumer.url)]
        for client in clients:
            warm_up(client)
        router = stack.enter_context(
            PrefillRouter([producer.url], [consumer.url], log=logs / "router.log")
        )
        through = stack.enter_context(Client(router.url))
        _wait_ready(clients[0])
        warm_up(through)
        yield Pair(through, *clients)


def warm_up(client: Client) -> None:
    """A first request pays for what a server sets up lazily; it is not part of any figure."""
    client.complete("def main():", max_tokens=2, cache_salt="warm-up")


def _key(build: Path) -> Path:
    """A key of this run's own."""
    folder = (build / "demo" / "keys").resolve()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "fleet.key"
    path.unlink(missing_ok=True)
    keys.write(path, keys.generate())
    return path


def _spec(model: Path, role: str | None, key: Path | None) -> ServeSpec:
    args = (
        "--dtype=float32",
        "--enforce-eager",
        f"--block-size={BLOCK_TOKENS}",
        f"--max-model-len={MAX_TOKENS}",
        f"--num-gpu-blocks-override={DEVICE_BLOCKS}",
        "--served-model-name=tiny",
    )
    env = {"VLLM_CPU_OMP_THREADS_BIND": compute_cpus()}
    if role is None:
        return ServeSpec.make(model, args, env=env)
    extra = {
        "cpu": {"capacity": "512MiB"},
        "gate": "always",
        "remote": {"listen": "127.0.0.1:0", "key_file": str(key)},
    }
    config = {
        "kv_connector": "TieredKVConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    return ServeSpec.make(model, args, env=env, kv_transfer_config=config)


def _wait_ready(producer: Client) -> None:
    """Until the producer hands over: its weights' digest is known.

    Raises:
        TimeoutError: it does not.
    """
    deadline = time.monotonic() + READY_SECONDS
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"prompt": "ready?", "max_tokens": 1, "kv_transfer_params": asked}
    while time.monotonic() < deadline:
        answer = httpx.post(
            f"{producer.url}/v1/completions", json=body, timeout=60.0, trust_env=False
        )
        params = answer.json().get("kv_transfer_params") if answer.is_success else None
        if params and params["do_remote_prefill"]:
            return
        time.sleep(0.1)
    raise TimeoutError("the prefill server hands nothing over")
