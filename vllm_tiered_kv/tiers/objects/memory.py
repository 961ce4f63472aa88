# SPDX-License-Identifier: Apache-2.0
"""The host's memory: copied to and from, never handed to the file system.

A file call that hangs goes on with its memory for as long as it likes. So it is given memory of
ours, and the host's is touched only while a :class:`Claim` is held: once a task has been answered,
its memory is the host's again.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from typing import Protocol


class Memory(Protocol):
    """The bytes of one object, in the host's memory."""

    @property
    def nbytes(self) -> int: ...

    def read(self, into: memoryview) -> bool:
        """Copy out all :attr:`nbytes`; False if they may not be the object's any more."""

    def write(self, content: memoryview) -> bool:
        """Copy in all :attr:`nbytes`; False, and nothing is copied, if nobody waits for them."""


class _State(enum.Enum):
    FREE = enum.auto()
    COPYING = enum.auto()
    OVER = enum.auto()


class Claim:
    """Who may touch an object's memory: a thread of ours while it copies, until all is over."""

    __slots__ = ("_lock", "_state")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = _State.FREE

    def begin(self) -> bool:
        """Whether to go on and copy; :meth:`end` has to follow."""
        with self._lock:
            if self._state is not _State.FREE:
                return False
            self._state = _State.COPYING
            return True

    def end(self) -> None:
        with self._lock:
            self._state = _State.FREE

    def give_up(self) -> bool:
        """Nobody copies from now on; False if somebody is at it, for as long as a copy takes."""
        with self._lock:
            if self._state is _State.COPYING:
                return False
            self._state = _State.OVER
            return True


def copy(into: memoryview, content: memoryview) -> None:
    """Copy as many bytes as ``content`` has; other threads run meanwhile if both can be written.

    Args:
        into: contiguous bytes, at least as many.
        content: contiguous bytes.
    """
    nbytes = content.nbytes
    if content.readonly or not nbytes:
        into[:nbytes] = content
        return
    target = ctypes.addressof(ctypes.c_char.from_buffer(into))
    ctypes.memmove(target, ctypes.addressof(ctypes.c_char.from_buffer(content)), nbytes)
