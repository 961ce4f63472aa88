# SPDX-License-Identifier: Apache-2.0
"""Streamed completions from one server, over many connections at once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec
import xxhash

from vllm_tiered_kv.bench.config import Compared, PromptFormat
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.records import Answer, Failed, Failure, printable
from vllm_tiered_kv.bench.scrape import read_bounded, scrape
from vllm_tiered_kv.bench.sse import EventParser, EventTooLong
from vllm_tiered_kv.bench.stream import Completion, EndedEarly, Malformed, StreamError
from vllm_tiered_kv.bench.workloads.content import words

_CONNECT_S = 30.0


class Asking(msgspec.Struct, frozen=True):
    """What all requests to a server have in common."""

    model: str
    format: PromptFormat = PromptFormat.TOKENS
    compare: Compared = Compared.TOKENS
    seed: int = 0
    further: Mapping[str, Any] = {}
    """Fields over the ones set here."""

    def body(self, prompt: Sequence[int], output_tokens: int) -> bytes:
        """The request for a greedy completion of so many tokens, encoded."""
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt if self.format is PromptFormat.TOKENS else words(prompt),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.compare is Compared.TOKENS:
            fields |= {"logprobs": 0, "return_tokens_as_token_ids": True}
        return msgspec.json.encode({**fields, **self.further})


class Client:
    """Asks one server; many requests may be under way."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, timeout: float, key: str | None = None
    ) -> None:
        self._session = session
        self._base = url.rstrip("/")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=_CONNECT_S)

    async def complete(self, body: bytes) -> Answer | Failed:
        """One completion; whatever goes wrong is part of the result."""
        sent = time.perf_counter()

        def failed(kind: Failure, reason: object) -> Failed:
            return Failed(kind, printable(str(reason)[:500]), time.perf_counter() - sent)

        try:
            return await self._stream(body, sent)
        except _Refused as error:
            return failed(Failure.REFUSED, error)
        except StreamError as error:
            return failed(Failure.ERROR, error)
        except (Malformed, EventTooLong) as error:
            return failed(Failure.MALFORMED, error)
        except EndedEarly as error:
            return failed(Failure.BROKEN, f"the stream ended {error}")
        except asyncio.TimeoutError:
            return failed(Failure.TIMEOUT, f"no end after {self._timeout.total:g} s")
        except (aiohttp.ClientError, OSError) as error:
            return failed(Failure.BROKEN, f"{type(error).__name__}: {error}")

    async def first_model(self) -> str:
        """The first name that the server answers to.

        Raises:
            BenchError: it does not say.
        """
        url = f"{self._base}/v1/models"
        try:
            async with self._session.get(
                url, headers=self._headers, timeout=self._timeout
            ) as response:
                content = await read_bounded(response)
            return msgspec.json.decode(content, type=_Models).data[0].id
        except (aiohttp.ClientConnectorError, asyncio.TimeoutError) as error:
            why = str(error) or "it takes too long"
            raise BenchError(f"{url} cannot be reached: {why}") from None
        except (
            *(aiohttp.ClientError, OSError, IndexError),
            *(msgspec.DecodeError, UnicodeDecodeError),
        ) as error:
            raise BenchError(
                f"{url} does not say what model it serves ({error!r}); name it: the arm's model"
            ) from None

    async def scrape(self, urls: Sequence[str]) -> dict[str, float] | None:
        """See :func:`scrape.scrape`."""
        return await scrape(self._session, urls)

    async def _stream(self, body: bytes, sent: float) -> Answer:
        headers = {"content-type": "application/json", **self._headers}
        parser, completion = EventParser(), Completion(sent)
        async with self._session.post(
            f"{self._base}/v1/completions", data=body, headers=headers, timeout=self._timeout
        ) as response:
            if response.status != 200:
                content = await response.content.read(2000)
                raise _Refused(f"HTTP {response.status}: {content.decode(errors='replace')}")
            async for chunk in response.content.iter_any():
                now = time.perf_counter()
                for event in parser.feed(chunk):
                    completion.take(event, now)
        return completion.answer()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: tuple[_Model, ...]


class _Refused(RuntimeError):
    """An HTTP status other than 200."""


@contextlib.asynccontextmanager
async def connected(url: str, timeout: float, key: str | None = None) -> AsyncIterator[Client]:
    """A client with connections of its own, without limit and without a proxy.

    Args:
        key: that the server asks for; sent with requests alone.
    """
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        yield Client(session, url, timeout, key)


def digest(prompt: Sequence[int]) -> str:
    """Equal prompts, equal digests."""
    return xxhash.xxh3_64_hexdigest(msgspec.msgpack.encode(prompt))
