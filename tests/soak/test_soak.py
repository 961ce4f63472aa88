# SPDX-License-Identifier: Apache-2.0
"""Hours of mixed load on real engines; a minute of it every time.

The long run goes on where it stopped: ``build/soak.json`` holds what was done. Its length in
minutes is in ``SOAK_MINUTES``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.engine._server import Models, Pool
from tests.soak._pieces import Record, soak


@pytest.fixture(scope="module")
def servers(models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    return Pool(Models(models_folder), tmp_path_factory.mktemp("soak"))


def check(record: Record) -> None:
    print(record.summary())
    assert [piece.wrong for piece in record.pieces if piece.wrong] == []
    assert all(piece.counts["checked"] for piece in record.pieces)
    assert any("loaded" in name for piece in record.pieces for name in piece.metrics)


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_minute(servers: Pool, tmp_path: Path) -> None:
    check(soak(servers, tmp_path / "soak.json", minutes=1, piece_minutes=1))


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(0)
def test_two_hours(servers: Pool) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "120"))
    check(soak(servers, ROOT / "build" / "soak.json", minutes=minutes, piece_minutes=4))
