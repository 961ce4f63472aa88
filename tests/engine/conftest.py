# SPDX-License-Identifier: Apache-2.0
"""Real engines for the tests: tiny models and servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine._server import Models, Pool

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs an engine and may wait for a server to start."""
    for item in items:
        if _HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.engine)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def models(models_folder: Path) -> Models:
    """Builds tiny models on demand: ``models.path("llama-tiny")``."""
    return Models(models_folder)


@pytest.fixture(scope="session")
def servers(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Running servers, shared by equal arguments: ``servers.get("llama-tiny", ...)``."""
    with Pool(models, tmp_path_factory.mktemp("servers")) as pool:
        yield pool
