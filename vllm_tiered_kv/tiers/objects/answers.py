# SPDX-License-Identifier: Apache-2.0
"""What the host is told: how its tasks end, and which objects have come and gone. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.objects.tasks import Ended, Kind, LookUp, Part, Task

COUNTED = (
    *("stored", "existed", "loaded", "damaged", "missing"),
    *("dropped_stores", "dropped_loads", "locks_expired"),
)


class Listener(Protocol):
    """Hears of objects: each that was stored is later told removed, once. Must not raise."""

    def stored(self, task: int, files: Sequence[tuple[FileName, int]]) -> None:
        """These are there now; with each the bytes of its object, 0 if that was told before."""

    def loaded(self, task: int, files: Sequence[FileName]) -> None: ...

    def removed(self, files: Sequence[tuple[FileName, int]]) -> None:
        """These are gone; with each the bytes of its object."""


class Answers:
    """Tells each thing once.

    Args:
        catalogue: what lies in the folder.
        listener: hears of objects.
        tell: takes the end of each task.
    """

    def __init__(
        self, catalogue: Catalogue, listener: Listener, tell: Callable[[Ended], None]
    ) -> None:
        self._catalogue = catalogue
        self._listener = listener
        self._tell = tell
        self._told: dict[FileName, int] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTED, 0))
        """What has happened so far, by kind. Any thread may look."""

    def give(self, part: Part, *, done: bool, nbytes: int = 0) -> None:
        """This came of an object, unless its task has been told already."""
        if part.answered:
            if part.task.kind is Kind.STORE:  # given up, and has come through after all
                self._stored(part.task)
            return
        part.answered = True
        part.task.note(part.index, done=done, nbytes=nbytes)
        self.over(part.task)

    def drop(self, part: Part) -> None:
        """Nothing comes of an object, and nothing is known to be wrong."""
        if not part.answered:
            self.counts["dropped_stores" if part.task.kind is Kind.STORE else "dropped_loads"] += 1
        self.give(part, done=False)

    def abandon(self, part: Part) -> bool:
        """Answer for a part that a thread is at; False while it copies the host's memory."""
        if part.answered:
            return True
        if not part.claim.give_up():
            return False
        self.drop(part)
        return True

    def over(self, task: Task) -> None:
        """Tell of a task, if all of it is known."""
        ended = task.end()
        if ended is None:
            return
        if task.kind is Kind.STORE:
            self._stored(task)
        elif loaded := task.take():
            self._listener.loaded(task.id, [file for file, _ in loaded])
        self._tell(ended)

    def found(self, wanted: LookUp, there: Iterable[bool]) -> None:
        """A look-up is over."""
        self._tell(Ended(wanted.task, Kind.LOOK_UP, tuple(there)))

    def none_found(self, wanted: LookUp) -> None:
        """A look-up is over that was not made."""
        self.found(wanted, [False] * len(wanted.objects))

    def removed(self, files: Iterable[FileName]) -> None:
        """These are gone, whether they were told of or not."""
        gone = [(file, self._told.pop(file)) for file in files if file in self._told]
        if gone:
            self._listener.removed(gone)

    def scanned(self) -> None:
        """All is known of the folder: what is not there any more?"""
        self.removed([file for file in self._told if not self._catalogue.has(file)])

    def _stored(self, task: Task) -> None:
        files = [
            (file, 0 if file in self._told else nbytes)
            for file, nbytes in task.take()
            if self._catalogue.has(file)  # not evicted since
        ]
        if not files:
            return
        self._told.update((file, nbytes) for file, nbytes in files if nbytes)
        self._catalogue.touch([file for file, _ in reversed(files)])
        self._listener.stored(task.id, files)
