# SPDX-License-Identifier: Apache-2.0
"""What is asked to end cleans up as after Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, too."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
