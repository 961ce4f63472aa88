# SPDX-License-Identifier: Apache-2.0
"""Where objects are: in which namespace of their family. No I/O and no clock of its own."""

from __future__ import annotations

from collections.abc import Callable

from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import Probe
from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.objects.names import ObjectId, family_of
from vllm_tiered_kv.tiers.objects.tasks import LookUp

PROBE_PATIENCE = 0.2
"""Seconds a look-up waits for the file system; then it goes by what is known."""
MAX_PROBED = 512
"""Files asked about at once."""
MAX_WAITING = 256
"""Look-ups that wait for the file system; others go by what is known."""


class LookUps:
    """Those under way, and what is known of namespaces.

    Args:
        catalogue: what lies in the folder.
        is_leaving: whether a file is being removed.
    """

    def __init__(self, catalogue: Catalogue, is_leaving: Callable[[FileName], bool]) -> None:
        self._catalogue = catalogue
        self._is_leaving = is_leaving
        self._namespaces: dict[str, list[str]] = {}
        self._known: set[str] = set()
        self._waiting: dict[int, tuple[LookUp, float]] = {}

    def learn(self, namespace: str) -> bool:
        """There are objects in this namespace; whether that is news."""
        if namespace in self._known:
            return False
        self._known.add(namespace)
        self._namespaces.setdefault(family_of(namespace), []).append(namespace)
        return True

    def find(self, wanted: LookUp) -> list[FileName | None]:
        """The file of each object that is there."""
        pairs = zip(wanted.objects, wanted.namespaces, strict=True)
        return [self._find(name, namespaces) for name, namespaces in pairs]

    def places(self, name: ObjectId) -> list[FileName]:
        """Every file that an object may have."""
        return [name.file(namespace) for namespace in self._namespaces.get(name.family, ())]

    def probe(self, wanted: LookUp, now: float) -> Probe | None:
        """What to ask the file system for a look-up, which waits from now on; None if nothing."""
        files: list[FileName] = []
        for name, namespaces in zip(wanted.objects, wanted.namespaces, strict=True):
            if name is None or self._find(name, namespaces) is not None:
                continue
            places = namespaces or self._namespaces.get(name.family, ())
            files.extend(name.file(namespace) for namespace in places)
            if len(files) >= MAX_PROBED:
                break
        if not files or len(self._waiting) >= MAX_WAITING:
            return None
        self._waiting[wanted.task] = (wanted, now + PROBE_PATIENCE)
        return Probe(wanted.task, files[:MAX_PROBED])

    def take(self, task: int) -> LookUp | None:
        """A look-up that waits, which waits no more; None if it does not."""
        entry = self._waiting.pop(task, None)
        return None if entry is None else entry[0]

    def take_all(self) -> list[LookUp]:
        waiting, self._waiting = self._waiting, {}
        return [wanted for wanted, _ in waiting.values()]

    def expired(self, now: float) -> list[LookUp]:
        """Those that have waited long enough; they wait no more."""
        late = [task for task, (_, until) in self._waiting.items() if until <= now]
        return [self._waiting.pop(task)[0] for task in late]

    def _find(self, name: ObjectId | None, namespaces: tuple[str, ...]) -> FileName | None:
        if name is None:
            return None
        for namespace in namespaces or self._namespaces.get(name.family, ()):
            file = name.file(namespace)
            if self._catalogue.has(file) and not self._is_leaving(file):
                return file
        return None
