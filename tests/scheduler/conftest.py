# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.scheduler.sim import Sim


@pytest.fixture
def sim() -> Iterator[Callable[..., Sim]]:
    """Makes engines that are closed when the test ends."""
    made: list[Sim] = []

    def make(**options: Any) -> Sim:
        engine = Sim(**options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()
