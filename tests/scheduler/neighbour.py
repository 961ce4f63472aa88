# SPDX-License-Identifier: Apache-2.0
"""Another connector beside ours in vLLM's ``MultiConnector``: it has what it is told to have.

Its loads are asynchronous, write to the device pages themselves, and end when they are told to.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tests.scheduler.rank import places
from tests.scheduler.tokens import BLOCK, prefix_names

if TYPE_CHECKING:
    from tests.scheduler.sim import Sim


@dataclasses.dataclass(frozen=True)
class Loading:
    request_id: str
    tables: tuple[list[int], ...]
    start: int
    end: int


class Desk:
    """Where a test and one engine's neighbour meet."""

    def __init__(self) -> None:
        self.claim = 0
        """Blocks beyond the device's that it says it has, for whoever asks."""
        self.offers: dict[str, int] = {}
        self.loading: list[Loading] = []
        self.ended: dict[int, KVConnectorTransferResults] = {}
        self.count = 0
        """Loads that have ended."""

    def finish(self, sim: Sim, at: int, *, well: bool) -> None:
        """A load ends: its bytes are there, or it failed."""
        if not self.loading:
            return
        load = self.loading.pop(at % len(self.loading))
        self.count += 1
        tokens = sim.requests[load.request_id].all_token_ids[: load.end]
        names = np.array(prefix_names(tokens, sim.salts[load.request_id]), dtype=np.int64)
        for rank in sim.ranks:
            for group, table in enumerate(load.tables):
                if well:
                    self._fill(rank, group, table, names, load)
            results = self.ended.setdefault(rank.number, KVConnectorTransferResults())
            results.finished_recving.add(load.request_id)
            if not well:
                results.failed_recving.add(load.request_id)

    def _fill(
        self, rank: Any, group: int, table: list[int], names: np.ndarray, load: Loading
    ) -> None:
        for block in range(load.start // BLOCK, load.end // BLOCK):
            if table[block]:  # 0 is vLLM's null block: the window has moved on
                first = block * BLOCK
                at = places(table, first, first + BLOCK)
                rank.fill(group, at, names[first : first + BLOCK])


DESKS: weakref.WeakValueDictionary[str, Desk] = weakref.WeakValueDictionary()


def beside(place: str, desk: Desk) -> dict[str, Any]:
    """For ``Sim(beside=...)``: a neighbour at this desk, "first" or "second" to our connector."""
    name = f"desk {id(desk)}"
    DESKS[name] = desk
    return {
        place: {
            "kv_connector": "Neighbour",
            "kv_connector_module_path": "tests.scheduler.neighbour",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"desk": name},
        }
    }


class NeighbourMetadata(KVConnectorMetadata):
    pass


class Neighbour(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._desk = DESKS[self._kv_transfer_config.kv_connector_extra_config["desk"]]
        self._rank = vllm_config.parallel_config.rank
        self._spare = int(any(_has_window(g) for g in kv_cache_config.kv_cache_groups))

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        room = (request.num_tokens - self._spare - computed) // BLOCK
        tokens = BLOCK * max(0, min(room, self._desk.claim))
        self._desk.offers[request.request_id] = computed
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None:
        if tokens:
            start = self._desk.offers[request.request_id]
            tables = blocks.get_block_ids()
            self._desk.loading.append(Loading(request.request_id, tables, start, start + tokens))

    def build_connector_meta(self, output: Any) -> NeighbourMetadata:
        return NeighbourMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._desk.ended.pop(self._rank, None) or KVConnectorTransferResults()


def _has_window(group: Any) -> bool:
    return bool(getattr(group.kv_cache_spec, "sliding_window", None))
