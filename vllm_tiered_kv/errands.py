# SPDX-License-Identifier: Apache-2.0
"""What a thread that sleeps on sockets is told to do by others, who never wait for it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

MAX_ERRANDS = 1 << 16
"""That the thread has not come to."""


class Errands:
    """A queue of calls without a lock: appending to it and taking from it are atomic.

    Args:
        wake: interrupts the thread's sleep; any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._calls: deque[Callable[[], None]] = deque()
        self._is_asleep = False
        self._is_closed = False

    # -- any thread --------------------------------------------------------------------

    def tell(self, call: Callable[..., None], *args: object) -> bool:
        """Have something done; False if it will not be: there is too much to do, or an end."""
        if self._is_closed or len(self._calls) >= MAX_ERRANDS:
            return False
        self.insist(call, *args)
        return True

    def insist(self, call: Callable[..., None], *args: object) -> None:
        """Have done what must not be lost."""
        self._calls.append(lambda: call(*args))
        if self._is_asleep:
            self._wake()

    def close(self) -> None:
        """The thread ends."""
        self._is_closed = True
        self._wake()

    # -- the thread --------------------------------------------------------------------

    @contextlib.contextmanager
    def sleep(self) -> Iterator[bool]:
        """Within this the thread sleeps, and is woken by what it is told.

        Yields:
            Whether there is nothing to do yet; else it must not sleep.
        """
        self._is_asleep = True  # before the look at the queue: who comes later wakes us
        try:
            yield not self._calls
        finally:
            self._is_asleep = False

    def take(self) -> Iterator[Callable[[], None]]:
        """What it was told until now, in order; each once."""
        for _ in range(len(self._calls)):
            yield self._calls.popleft()
