# SPDX-License-Identifier: Apache-2.0
"""Which files go, and which are on their way out. No I/O: the keeper removes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.chores import BATCH, Chore, Remove, Removed
from vllm_tiered_kv.tiers.disk.entries import FileName, PolicyKey
from vllm_tiered_kv.tiers.disk.quota import Quota


class Removal:
    """Has chunks removed, one batch after the other.

    A file is counted until it is gone, and nobody may write it meanwhile: it might be written
    between its removal and the news of that, and would then be on disk without being counted.

    Args:
        catalogue: what there is.
        quota: how much of it is too much.
        ask: leaves the keeper a chore; False if it has too many.
    """

    def __init__(self, catalogue: Catalogue, quota: Quota, ask: Callable[[Chore], bool]) -> None:
        self._catalogue = catalogue
        self._quota = quota
        self._ask = ask
        self._leaving: set[FileName] = set()
        self.evicted = 0
        """Chunks of any namespace evicted so far."""

    def __contains__(self, name: FileName) -> bool:
        """Whether a file is being removed."""
        return name in self._leaving

    @property
    def is_under_way(self) -> bool:
        """Whether any file is being removed."""
        return bool(self._leaving)

    def concerns(self, names: Iterable[FileName]) -> bool:
        """Whether any of these files is being removed."""
        return bool(self._leaving) and any(name in self._leaving for name in names)

    def make_room(self, coming: int, writing: Collection[PolicyKey]) -> None:
        """Have chunks evicted where the folder or the file system is too full.

        Args:
            coming: bytes that wait for room.
            writing: chunks that are being written or held; they stay for now.
        """
        if self._leaving:
            return
        excess = self._quota.excess(coming)
        if excess == 0:
            return
        files = self._catalogue.victims(excess, BATCH, writing)
        self.evicted += len({(name.namespace, name.key) for name in files})
        self._remove(files)

    def remove_distrusted(self) -> None:
        """Have removed what may be wrong."""
        if not self._leaving:
            self._remove(self._catalogue.distrusted(BATCH))

    def remove_all_distrusted(self) -> None:
        """Have it removed at once, also what is being removed: nothing is heard of it any more."""
        self._remove(self._catalogue.distrusted(self._catalogue.files))

    def remove(self, files: Sequence[FileName]) -> None:
        """Have files removed, whatever their turn; those already on their way out are left out."""
        self._remove([name for name in files if name not in self._leaving])

    def _remove(self, files: Sequence[FileName]) -> None:
        for i in range(0, len(files), BATCH):
            piece = files[i : i + BATCH]
            if self._ask(Remove(piece)):
                self._leaving.update(piece)
            else:
                self._keep(piece)

    # -- what came of it ---------------------------------------------------------------

    def removed(self, news: Removed) -> None:
        self._leaving.difference_update(news.gone)
        for name in news.gone:
            self._quota.removed(self._catalogue.forget(name))
        self._keep(news.stuck)

    def failed(self, chore: Remove) -> None:
        """Nothing is known of these files but that they may be there."""
        self._keep(chore.files)

    def _keep(self, files: Sequence[FileName]) -> None:
        self._leaving.difference_update(files)
        for name in files:
            self._catalogue.keep(name)
