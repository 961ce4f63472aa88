# SPDX-License-Identifier: Apache-2.0
"""What a prompt's KV depends on besides its tokens: LoRA adapters, embeddings given as input.

On a worker in a process of its own (``mp``); the other tests with one rank run on ``uni``.
"""

from __future__ import annotations

import base64
import io
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine._server import Models, Pool, assert_same_output, flushed, prompt
from tests.engine.test_cpu_tier import CPU, arrived, cold, counter
from tools.serving import Client, Completion

ARGS = (
    "--enable-lora",
    "--max-loras=2",
    "--max-cpu-loras=3",
    "--enable-prompt-embeds",
    "--distributed-executor-backend=mp",
)
_names = itertools.count()


class Adapter:
    """One adapter name on a server, and the folder it is loaded from."""

    def __init__(self, client: Client, models: Models, folder: Path) -> None:
        self.client = client
        self.name = f"adapter-{next(_names)}"
        self.folder = folder
        self._models = models

    def write(self, seed: int) -> None:
        """Put other weights into the folder."""
        shutil.copytree(self._models.lora(seed=seed), self.folder, dirs_exist_ok=True)

    def load(self, **body: Any) -> None:
        request = {"lora_name": self.name, "lora_path": str(self.folder), **body}
        self.client._http.post("/v1/load_lora_adapter", json=request).raise_for_status()

    def unload(self) -> None:
        request = {"lora_name": self.name}
        self.client._http.post("/v1/unload_lora_adapter", json=request).raise_for_status()

    def exchange(self, seed: int) -> None:
        """Load other weights from the same folder under the same name."""
        self.unload()
        self.write(seed)
        self.load()

    def cold(self, tokens: list[int]) -> Completion:
        return cold(self.client, tokens, model=self.name)

    def run(self, tokens: list[int]) -> tuple[Completion, float]:
        """Once, with nothing on the device; also the tokens that came from the tier."""
        assert flushed(self.client)
        return arrived(self.client, lambda: self.client.complete(tokens, model=self.name))


@pytest.fixture
def client(servers: Pool) -> Iterator[Client]:
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    client = servers.get(extra_config=CPU, args=ARGS, env=env)
    yield client
    assert counter(client.metrics(), "failures_total", kind="internal") == 0


@pytest.fixture
def adapter(client: Client, models: Models, tmp_path: Path) -> Iterator[Adapter]:
    adapter = Adapter(client, models, tmp_path / "adapter")
    adapter.write(seed=1)
    adapter.load()
    yield adapter
    adapter.unload()


def test_adapters_keep_to_themselves(adapter: Adapter, models: Models, tmp_path: Path) -> None:
    other = Adapter(adapter.client, models, tmp_path / "other")
    other.write(seed=2)
    other.load()
    tokens = prompt(adapter.name, 600)
    want = [each.cold(tokens) for each in (adapter, other)]
    assert want[0].logprobs != want[1].logprobs
    adapter.run(tokens)
    second, found = other.run(tokens)
    assert found == 0
    assert_same_output(want[1], second)
    first, found = adapter.run(tokens)
    assert found == 512
    assert_same_output(want[0], first)
    other.unload()


def test_loaded_from_another_folder(adapter: Adapter, tmp_path: Path) -> None:
    tokens = prompt(adapter.name, 600)
    old, first = adapter.run(tokens)
    assert first == 0
    adapter.unload()
    adapter.folder = tmp_path / "another"
    adapter.write(seed=2)
    adapter.load()
    want = adapter.cold(tokens)
    new, found = adapter.run(tokens)
    assert found == 0
    assert_same_output(want, new)
    assert new.logprobs != old.logprobs
    again, found = adapter.run(tokens)
    assert found == 512
    assert_same_output(want, again)


def test_overwritten_and_loaded_again(adapter: Adapter) -> None:
    tokens = prompt(adapter.name, 600)
    was = adapter.cold(tokens)
    adapter.run(tokens)
    adapter.exchange(seed=2)
    want = adapter.cold(tokens)
    assert want.logprobs != was.logprobs
    new, found = adapter.run(tokens)
    assert found == 0
    assert_same_output(want, new)
    again, found = adapter.run(tokens)
    assert found == 512
    assert_same_output(want, again)
    adapter.exchange(seed=1)  # the first weights are back, and so is their KV
    back, found = adapter.run(tokens)
    assert found == 512
    assert_same_output(was, back)


def test_overwritten_while_the_device_still_holds_the_old(adapter: Adapter) -> None:
    """What vLLM computes on stale blocks of its own must not come back as the new weights'."""
    tokens = prompt(adapter.name, 600)
    longer = [*tokens, *prompt("more", 300)]
    adapter.run(tokens)
    adapter.exchange(seed=2)
    want = adapter.cold(longer)
    adapter.client.complete(longer, model=adapter.name)  # on the old weights' blocks
    new, found = adapter.run(longer)
    assert found == 0
    assert_same_output(want, new)
    again, found = adapter.run(longer)
    assert found == 896
    assert_same_output(want, again)


def test_loaded_in_place(adapter: Adapter) -> None:
    tokens = prompt(adapter.name, 600)
    old, _ = adapter.run(tokens)
    adapter.write(seed=2)
    adapter.load(load_inplace=True)
    want = adapter.cold(tokens)
    assert want.logprobs != old.logprobs
    for _ in range(2):  # vLLM reads its files in every step: nothing is kept of it
        new, found = adapter.run(tokens)
        assert found == 0
        assert_same_output(want, new)
    adapter.unload()
    adapter.load()
    adapter.run(tokens)
    again, found = adapter.run(tokens)
    assert found == 512
    assert_same_output(want, again)


def embedded(models: Models, tokens: list[int], scale: float = 1.0) -> dict[str, Any]:
    """A request's body with the tokens' own embeddings in the place of the tokens."""
    weights = load_file(models.path("llama-tiny") / "model.safetensors")
    data = io.BytesIO()
    torch.save(weights["model.embed_tokens.weight"][tokens] * scale, data)
    return {"prompt_embeds": base64.b64encode(data.getvalue()).decode()}


def test_embeddings_as_input(client: Client, models: Models) -> None:
    tokens = prompt("embedded", 600)
    bodies = [embedded(models, tokens), embedded(models, tokens, scale=0.5)]
    want = [cold(client, [], **body) for body in bodies]
    assert want[0].logprobs != want[1].logprobs
    assert_same_output(cold(client, tokens), want[0])
    client.complete([], **bodies[0])
    for body, expected, found in zip(bodies, want, (512, 0), strict=True):
        assert flushed(client)
        got, from_cpu = arrived(client, lambda b=body: client.complete([], **b))
        assert from_cpu == found
        assert_same_output(expected, got)
    assert flushed(client)
    _, from_cpu = arrived(client, lambda: client.complete(tokens))
    assert from_cpu == 0  # tokens are another kind of input
