# SPDX-License-Identifier: Apache-2.0
"""Which folders of objects there are, as far as is known: what a write makes anew takes room."""

from __future__ import annotations

from vllm_tiered_kv.tiers.disk.entries import FileName
from vllm_tiered_kv.tiers.disk.survey import PAGE

NAMESPACE_PAGES = 4
"""A namespace's folder, the file that says what it is, its rank's folder and that one's `tmp`."""


class Folders:
    """A folder that was once there is taken to stay."""

    def __init__(self) -> None:
        self._shards: dict[str, int] = {}
        """By namespace the first bytes of keys that have a folder, as bits."""

    def new_bytes(self, file: FileName) -> int:
        """Bytes of the folders that a file needs and that were not there; they are from now on."""
        shards, bit = self._shards.get(file.namespace, 0), 1 << file.key[0]
        if shards & bit:
            return 0
        self._shards[file.namespace] = shards | bit
        return PAGE if shards else (NAMESPACE_PAGES + 1) * PAGE
