# SPDX-License-Identifier: Apache-2.0
"""What the host has asked for, and what came of it. No I/O."""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping, Sequence

import msgspec

from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.objects.memory import Claim, Memory
from vllm_tiered_kv.tiers.objects.names import ObjectId


class Kind(enum.Enum):
    STORE = "store"
    LOOK_UP = "look_up"
    LOAD = "load"


class Ended(msgspec.Struct, frozen=True):
    """A task is over; it is told once."""

    task: int
    kind: Kind
    done: tuple[bool, ...]
    """For each object, in order: stored, found or loaded."""
    nbytes: int = 0
    """Bytes of objects that new files hold, or that were loaded."""


class Wanted(msgspec.Struct, frozen=True):
    """One object to store or load."""

    file: FileName
    memory: Memory


class LookUp(msgspec.Struct, frozen=True):
    """Which of these objects are there? Those that are stay until they are unlocked."""

    task: int
    objects: tuple[ObjectId | None, ...]
    """None for one that cannot be there."""
    namespaces: tuple[tuple[str, ...], ...]
    """For each, where it may be; empty for anywhere in its family."""


class Delete:
    """Objects to remove; whoever waits is woken when it is known what came of it."""

    def __init__(self, objects: Sequence[ObjectId]) -> None:
        self.objects = objects
        self.left: set[FileName] = set()
        self.over = threading.Event()


class Task:
    """Counts what comes of each of its objects."""

    __slots__ = ("_done", "_files", "_left", "_nbytes", "_told", "id", "kind")

    def __init__(self, task: int, kind: Kind, count: int) -> None:
        self.id = task
        self.kind = kind
        self._files: dict[int, tuple[FileName, int]] = {}
        self._done = [False] * count
        self._left = count
        self._nbytes = 0
        self._told = False

    def note(self, index: int, *, done: bool, nbytes: int) -> None:
        """What came of one object; once for each."""
        self._done[index] = done
        self._nbytes += nbytes
        self._left -= 1

    def keep(self, part: Part) -> None:
        """Its object was stored or loaded, and that is to be told of."""
        self._files[part.index] = (part.file, part.nbytes)

    def take(self) -> list[tuple[FileName, int]]:
        """What was kept since the last call, in the host's order, with the objects' bytes."""
        files, self._files = self._files, {}
        return [files[index] for index in sorted(files)]

    def end(self) -> Ended | None:
        """How it ended, once, when all is known."""
        if self._left or self._told:
            return None
        self._told = True
        return Ended(self.id, self.kind, tuple(self._done), self._nbytes)


class Part:
    """One object of a task: waiting, or with a thread that reads or writes its file."""

    __slots__ = (
        "answered",
        "claim",
        "file",
        "give_up_at",
        "identity",
        "index",
        "memory",
        "nbytes",
        "reserved",
        "since",
        "task",
        "used_ns",
    )

    def __init__(
        self,
        task: Task,
        index: int,
        wanted: Wanted,
        give_up_at: float,
        identity: Mapping[str, object] | None = None,
        used_ns: int = 0,
    ) -> None:
        self.task = task
        self.index = index
        self.file = wanted.file
        self.memory = wanted.memory
        self.nbytes = wanted.memory.nbytes
        self.give_up_at = give_up_at
        """If it has not begun by then, it is dropped."""
        self.identity = identity
        """Of the namespace it is written to, in plain words."""
        self.used_ns = used_ns
        self.claim = Claim()
        self.since = 0.0
        """When a thread was given it."""
        self.reserved = 0
        """Bytes of the quota that are kept for it."""
        self.answered = False
        """Whether the task knows what came of it; a thread may still be at the file."""
