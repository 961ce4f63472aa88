# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.disk import _files


@pytest.fixture(autouse=True)
def close_folders() -> Iterator[None]:
    yield
    while _files.opened:
        _files.opened.pop().close()
