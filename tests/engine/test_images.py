# SPDX-License-Identifier: Apache-2.0
"""Images in prompts: their tokens are all alike, so only their content tells prompts apart."""

from __future__ import annotations

import base64
import io
import itertools

import pytest
from PIL import Image

from tests.engine._server import BLOCK_TOKENS, Pool, assert_same_output, flushed
from tests.engine.test_cpu_tier import CPU, arrived
from tools.serving import Client, Completion

IMAGE_TOKENS = 196
_salts = itertools.count()


@pytest.fixture
def client(servers: Pool) -> Client:
    return servers.get("blip2-tiny", extra_config=CPU)


def picture(shade: int) -> dict[str, object]:
    """A plain picture with one line in it, as a part of a message."""
    image = Image.new("RGB", (56, 56), (shade, 255 - shade, 128))
    for x in range(56):
        image.putpixel((x, 20), (255, 255, 255))
    data = io.BytesIO()
    image.save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def ask(client: Client, text: str, *pictures: dict[str, object], fresh: bool = False) -> Completion:
    """One greedy answer; ``fresh``: where nothing can be found."""
    body = {
        "model": client.models()[0],
        "messages": [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}],
        "max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "logprobs": True,
        "return_tokens_as_token_ids": True,
        **({"cache_salt": f"images {next(_salts)}"} if fresh else {}),
    }  # fmt: skip
    response = client._http.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    answer = response.json()
    choice, usage = answer["choices"][0], answer["usage"]
    tokens = choice["logprobs"]["content"]
    return Completion(
        token_ids=tuple(int(t["token"].removeprefix("token_id:")) for t in tokens),
        logprobs=tuple(t["logprob"] for t in tokens),
        text=choice["message"]["content"],
        ttft_s=0.0,
        total_s=0.0,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        finish_reason=choice["finish_reason"],
    )


def test_an_image_comes_back_and_another_does_not(client: Client) -> None:
    # The first chunk ends inside the image, the second behind it.
    text = "def compare(left, right): return left == right\n" * 12
    want = {shade: ask(client, text, picture(shade), fresh=True) for shade in (10, 200)}
    assert want[10].logprobs != want[200].logprobs
    whole = want[10].prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert BLOCK_TOKENS < IMAGE_TOKENS < whole
    assert_same_output(want[10], ask(client, text, picture(10)))
    for shade, expected in ((200, 0), (10, whole)):
        assert flushed(client)
        got, from_cpu = arrived(client, lambda s=shade: ask(client, text, picture(s)))
        assert from_cpu == expected
        assert_same_output(want[shade], got)
    assert flushed(client)
