# SPDX-License-Identifier: Apache-2.0
"""Paths that all tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# No test fails because a machine is busy; each has pytest's own limit.
settings.register_profile("untimed", deadline=None)
# The same examples in every run: whether a change is good must not hang on what another one drew.
settings.register_profile("repeatable", settings.get_profile("untimed"), derandomize=True)
settings.load_profile("untimed")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def models_folder() -> Path:
    """Where tiny models are built and found again by the next run."""
    return ROOT / "build" / "models"
