# SPDX-License-Identifier: Apache-2.0
"""Paths that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """Where tiny models are built and found again by the next run."""
    return ROOT / "build" / "models"
