# SPDX-License-Identifier: Apache-2.0
"""How much room there is: what lies in the folder, what is on its way there, what must stay free.

No I/O. With one writer the folder never holds more than its capacity: a write begins when its files
fit beside all that is there and all that is under way, and what a failed one may have left behind
counts until a scan has looked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from vllm_tiered_kv.tiers.disk.catalogue import Catalogue
from vllm_tiered_kv.tiers.disk.orders import WriteOrder
from vllm_tiered_kv.tiers.disk.settings import ENTRY_BYTES, FOLDER_BYTES, TierSettings


class Quota:
    """Bytes.

    Args:
        settings: the limits.
        catalogue: counts the files of chunks.
    """

    def __init__(self, settings: TierSettings, catalogue: Catalogue) -> None:
        self._settings = settings
        self._catalogue = catalogue
        self._sizes = [settings.file_bytes] * settings.ranks
        self.reserved = 0
        """Kept for writes under way."""
        self._other = 0
        self._doubtful = 0
        self._doubts: deque[tuple[float, int]] = deque()
        self._free: int | None = None

    @property
    def used(self) -> int:
        """Bytes that lie in the folder, may lie there, or are on their way. Any thread."""
        return self._catalogue.used + self._other + self._doubtful + self.reserved

    @property
    def doubtful(self) -> int:
        """Bytes of files that may have been left behind."""
        return self._doubtful

    def sized(self, sizes: Sequence[tuple[int, ...]]) -> None:
        """By rank and KV cache group: the bytes of a file."""
        self._sizes = [*sizes]

    def shares(self, order: WriteOrder) -> list[int]:
        """The most bytes that each rank's files of a chunk take."""
        return [
            sum(sizes[part.group] for part in order.parts if part.group < len(sizes))
            for sizes in self._sizes
        ]

    def need(self, order: WriteOrder | None) -> int:
        """The most bytes that all ranks' files of a chunk take."""
        return 0 if order is None else sum(self.shares(order))

    def has_room(self, nbytes: int) -> bool:
        if self.used + self._overhead + nbytes > self._settings.capacity:
            return False
        return self._free is None or self._free - self.reserved - nbytes >= self._settings.min_free

    def excess(self, coming: int) -> int:
        """Bytes of chunks that have to go so that so many can come; 0 if none."""
        settings = self._settings
        used = self.used + self._overhead + coming
        over = 0
        if used > settings.high_water * settings.capacity:
            over = int(used - settings.low_water * settings.capacity)
        if self._free is not None:
            over = max(over, settings.min_free + self.reserved + coming - self._free)
        return max(0, over)

    # -- what happens ------------------------------------------------------------------

    def reserve(self, nbytes: int) -> None:
        """A write begins."""
        self.reserved += nbytes

    def settle(self, nbytes: int) -> None:
        """A rank has answered, and what it wrote is in the catalogue."""
        self.reserved -= nbytes

    def wrote(self, nbytes: int) -> None:
        """New files take so many bytes."""
        if self._free is not None:
            self._free -= nbytes

    def removed(self, nbytes: int) -> None:
        """Files that took so many bytes are gone."""
        if self._free is not None:
            self._free += nbytes

    def measured(self, free: int) -> None:
        """So many bytes of the file system are free."""
        self._free = free

    def doubt(self, nbytes: int, now: float) -> None:
        """Something failed that may have left files of so many bytes which nobody knows of."""
        if nbytes > 0:
            self._doubtful += nbytes
            self._doubts.append((now, nbytes))

    def scanned(self, other: int, began: float) -> None:
        """A scan has been through.

        Args:
            other: bytes of all but chunks; not of temporary files of our namespace that were so
                young that they might have been those of writes under way.
            began: by the agent's clock, when what was older than that counted.
        """
        self._other = other
        while self._doubts and self._doubts[0][0] < began:
            self._doubtful -= self._doubts.popleft()[1]

    @property
    def _overhead(self) -> int:
        return FOLDER_BYTES * self._settings.ranks + ENTRY_BYTES * self._catalogue.files
