# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.remote._reader import Reader

MIB = 1 << 20


@pytest.fixture(params=["", "tcp"], ids=["all transports", "tcp"])
def transports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transports that UCX may use. Over tcp nothing moves without the peer's help."""
    chosen: str = request.param
    if chosen:
        monkeypatch.setenv("UCX_TLS", chosen)
    else:
        monkeypatch.delenv("UCX_TLS", raising=False)
    return chosen


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    """Only tcp, where a read can be caught in the middle."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    return "tcp"


@pytest.fixture
def reader() -> Iterator[Reader]:
    with Reader(64 * MIB) as opened:
        yield opened
