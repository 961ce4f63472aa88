# SPDX-License-Identifier: Apache-2.0
"""What a test tells engines that have the connector of :mod:`tests.engine._held`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

VARIABLE = "TIERED_KV_HELD"


class Held:
    """Stops reads and renewals, and slows an engine down.

    Args:
        folder: of this object's alone.
    """

    def __init__(self, folder: Path) -> None:
        self._hold, self._reached, self._mute, self._slow = files(folder)
        self.env = {VARIABLE: str(folder), "PYTHONPATH": str(ROOT)}

    @contextlib.contextmanager
    def reads(self) -> Iterator[None]:
        """Reads stand still within this block, or until :meth:`go_on`."""
        self._reached.unlink(missing_ok=True)
        self._hold.touch()
        try:
            yield
        finally:
            self.go_on()

    def go_on(self) -> None:
        self._hold.unlink(missing_ok=True)

    def wait_reached(self) -> None:
        """Until a read stands still in its middle."""
        deadline = time.monotonic() + 60
        while not self._reached.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("no read has begun")
            time.sleep(0.01)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """Within this block leases are not renewed."""
        with _there(self._mute):
            yield

    @contextlib.contextmanager
    def slowed(self) -> Iterator[None]:
        """Within this block each step takes a hundredth of a second more."""
        with _there(self._slow):
            yield


@contextlib.contextmanager
def _there(file: Path) -> Iterator[None]:
    file.touch()
    try:
        yield
    finally:
        file.unlink()


def files(folder: Path) -> tuple[Path, Path, Path, Path]:
    return folder / "hold", folder / "reached", folder / "mute", folder / "slow"
