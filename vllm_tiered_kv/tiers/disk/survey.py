# SPDX-License-Identifier: Apache-2.0
"""What a scan makes of what it meets: chunks, bytes of all else, what was left behind. Pure."""

from __future__ import annotations

from vllm_tiered_kv.tiers.disk.chores import Scan
from vllm_tiered_kv.tiers.disk.entries import MAX_GROUPS, MAX_RANKS, FileName, FoundFile
from vllm_tiered_kv.tiers.disk.names import is_models_namespace
from vllm_tiered_kv.tiers.disk.walk import (
    FolderMade,
    Foreign,
    Found,
    FoundIdentity,
    FoundMark,
    FoundTemp,
    Item,
    Unreadable,
)

PAGE = 4096
"""What a folder takes, and a small file."""
TEMP_AGE = 600.0
"""Seconds after which a temporary file belongs to nobody any more."""
MAX_SEEN = 4096
"""Files that are remembered from one scan to the next."""
MAX_VACANT = 1024
"""Namespaces without files that one scan remembers."""


class Survey:
    """One scan.

    Args:
        scan: what was asked for.
        now_ns: the time, nanoseconds since the epoch.
    """

    def __init__(self, scan: Scan, now_ns: int) -> None:
        self._scan = scan
        self._now_ns = now_ns
        self.other = 0
        """Bytes of all that is no chunk; see :class:`~.chores.Scan`."""
        self.missed = 0
        """Folders and files that could not be looked at."""
        self.vacant: set[str] = set()
        """Other models' namespaces in which nothing was met but folders and their identity."""

    def meet(self, item: Item) -> FoundFile | None:
        """Note an item; the file, if it is one of a chunk."""
        if self.vacant and not isinstance(item, FolderMade | FoundIdentity):
            self.vacant.discard(_namespace_of(item))
        match item:
            case Found() if item.group < MAX_GROUPS and item.rank < MAX_RANKS:
                name = FileName(item.namespace, item.rank, item.group, item.key)
                return FoundFile(name, item.size, item.mtime_ns)
            case Found():
                self.other += item.size
            case FoundTemp():
                self.other += 0 if self._may_be_written(item) else item.size
            case FoundIdentity():
                self.other += max(PAGE, item.size)
            case FoundMark():
                pass  # an empty file
            case FolderMade():
                self.other += 0 if self._is_reserved(item) else PAGE
                if item.rank is None:
                    self._note_vacant(item.namespace)
            case Unreadable():
                self.missed += 1
        return None

    def _note_vacant(self, namespace: str) -> None:
        """Until anything is met in it."""
        is_other = namespace != self._scan.namespace and is_models_namespace(namespace)
        if is_other and len(self.vacant) < MAX_VACANT:
            self.vacant.add(namespace)

    def _may_be_written(self, temp: FoundTemp) -> bool:
        """Whether it may be that of a write under way, for which room is kept."""
        # What is from the future is not new: the clock was set back.
        age = self._now_ns - temp.changed_ns
        return temp.namespace == self._scan.namespace and 0 <= age < self._scan.young * 1e9

    def _is_reserved(self, folder: FolderMade) -> bool:
        """Whether room is kept for it before it is made."""
        rank = folder.rank
        own = folder.namespace == self._scan.namespace
        return own and rank is not None and rank < self._scan.ranks


def _namespace_of(item: Found | FoundTemp | FoundMark | Foreign | Unreadable) -> str:
    if isinstance(item, Foreign | Unreadable):
        return item.path.partition("/")[0]
    return item.namespace


class Leftovers:
    """Which temporary files belong to nobody any more, told over several scans."""

    def __init__(self) -> None:
        self._before: dict[FoundTemp, float] = {}
        self._seen: dict[FoundTemp, float] = {}
        self._now_ns = 0
        self._now = 0.0

    def begin(self, now_ns: int, now: float) -> None:
        """Another scan begins.

        Args:
            now_ns: the time, nanoseconds since the epoch.
            now: by a clock that nobody sets, seconds.
        """
        self._before, self._seen = self._seen, {}
        self._now_ns, self._now = now_ns, now

    def has(self, temp: FoundTemp) -> bool:
        """Whether this file is one of them."""
        age = self._now_ns - temp.changed_ns
        if age >= 0:
            return age >= TEMP_AGE * 1e9
        # The clock was set back, or the file's server has another: it is as old as we know it.
        first = self._before.get(temp, self._now)
        if len(self._seen) < MAX_SEEN:
            self._seen[temp] = first
        return self._now - first >= TEMP_AGE
