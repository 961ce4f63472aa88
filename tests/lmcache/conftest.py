# SPDX-License-Identifier: Apache-2.0
"""The environment that LMCache is installed in: `make peers-env` makes it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.serving.lmcache import ENVIRONMENT, PEERS_PYTHON

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs an environment that only `make test-full` sets up."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter beside LMCache, where there is one that also has what we import."""
    python = ROOT / PEERS_PYTHON
    if not python.exists():
        pytest.skip(".venv-peers does not exist: `make peers-env` makes it")
    found = subprocess.run(
        [str(python), "-c", "import lmcache, msgspec, xxhash"],
        env=peers_environment(),
        timeout=120,
        check=False,
    )
    if found.returncode:
        pytest.skip(".venv-peers is out of date: `make peers-env` brings it up to date")
    return python


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's process finds this project's package."""
    monkeypatch.setenv("PYTHONPATH", peers_environment()["PYTHONPATH"])


def peers_environment() -> dict[str, str]:
    """With this project's package to be found; no usage reports."""
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, path))}
