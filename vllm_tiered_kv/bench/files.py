# SPDX-License-Identifier: Apache-2.0
"""The files of a comparison: ``report.json``, ``.md`` and ``.html``, plots, every request."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import msgspec

from vllm_tiered_kv.bench import html, markdown
from vllm_tiered_kv.bench.errors import BenchError
from vllm_tiered_kv.bench.report import Report
from vllm_tiered_kv.bench.summary import Measured

PLOTS = ("ttft.png", "percentiles.png", "blocks.png", "hits.png")


def make_folder(folder: Path) -> None:
    """For one's own eyes: logs and outputs may hold what others must not read.

    Raises:
        BenchError: it cannot be made, or nothing can be written there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"{folder} cannot be made: {error.strerror or error}") from None
    try:
        # Now, and not when hours of measuring are to be kept.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BenchError(f"{folder} cannot be written to: {error.strerror or error}") from None


def write_all(report: Report, found: Sequence[Measured], folder: Path, *, plots: bool) -> None:
    """Write them, over those of an earlier run.

    Raises:
        BenchError: one cannot be written.
    """
    pictures: dict[str, bytes] = {}
    if plots:
        from vllm_tiered_kv.bench.plots import draw

        pictures = draw(report, found)
    names = dict(zip(PLOTS, pictures.values(), strict=False))
    records = chain.from_iterable(arm.records for arm in found)
    lines = [msgspec.json.encode(record) for record in records]
    contents = {
        "report.json": msgspec.json.format(msgspec.json.encode(report)),
        "report.md": markdown.render(report, tuple(names)).encode(),
        "report.html": html.render(report, pictures).encode(),
        "requests.jsonl": b"\n".join([*lines, b""]),
        **names,
    }
    try:
        for name in PLOTS:
            (folder / name).unlink(missing_ok=True)
        for name, content in contents.items():
            _write(folder / name, content)
    except OSError as error:
        raise BenchError(f"{error.filename or folder}: {error.strerror or error}") from None


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
