# SPDX-License-Identifier: Apache-2.0
"""Reads traces of requests: JSON lines as published with the Mooncake paper (FAST 2025)."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, cast

import msgspec

from vllm_tiered_kv.mistakes import explain_json

BLOCK_TOKENS = 512
"""Tokens that one of ``hash_ids`` stands for in traces as published."""

MAX_LINE = 1 << 20
MAX_BLOCKS = 1 << 16

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """When it arrived, in ms."""
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: Annotated[tuple[_BlockId, ...], msgspec.Meta(max_length=MAX_BLOCKS)]
    """One id a block of the prompt; equal ids mean an equal prefix up to there."""


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names the file and the line."""


def read_trace(path: Path, block_tokens: int = BLOCK_TOKENS) -> Iterator[Request]:
    """The requests of a file, one by one; ``.gz`` and ``.xz`` are unpacked.

    Raises:
        TraceError: a line is not a request, gives a block another prefix than before, or more
            blocks of ``block_tokens`` tokens than its prompt has.
        OSError: the file cannot be read.
    """
    try:
        with _open(path) as lines:
            yield from decode_trace(_bounded(lines), str(path), block_tokens)
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: cannot be unpacked: {error}") from None


def decode_trace(
    lines: Iterable[bytes], name: str, block_tokens: int = BLOCK_TOKENS
) -> Iterator[Request]:
    """The requests of lines of JSON; empty lines are passed over.

    Raises:
        TraceError: see :func:`read_trace`; ``name`` is the file that it names.
    """
    decoder = msgspec.json.Decoder(Request)
    parents: dict[int, int | None] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(line) > MAX_LINE:
            raise TraceError(f"{name}, line {number}: longer than {MAX_LINE} bytes")
        try:
            request = decoder.decode(line)
        except msgspec.ValidationError as error:
            why = explain_json(error, line, Request, "the line")
            raise TraceError(f"{name}, line {number}: {why}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{name}, line {number}: the line is not JSON: {error}") from None
        parent = None
        for block in request.hash_ids:
            if parents.setdefault(block, parent) != parent:
                raise TraceError(
                    f"{name}, line {number}: block {block} follows {parent} here and followed "
                    f"{parents[block]} before; equal ids have to mean equal prefixes"
                )
            parent = block
        if (len(request.hash_ids) - 1) * block_tokens >= max(request.input_length, 1):
            raise TraceError(
                f"{name}, line {number}: {len(request.hash_ids)} blocks of a prompt of "
                f"{request.input_length} tokens, so they do not stand for {block_tokens} each"
            )
        yield request


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    if path.suffix == ".xz":
        return cast(BinaryIO, lzma.open(path))
    return path.open("rb")


def _bounded(lines: BinaryIO) -> Iterator[bytes]:
    while line := lines.readline(MAX_LINE + 1):
        yield line
