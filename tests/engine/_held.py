# SPDX-License-Identifier: Apache-2.0
"""The connector with reads from peers that stand still while a file is there.

Given to ``vllm serve`` by its module path. In the folder named by ``TIERED_KV_HELD`` a file
``hold`` stops every other piece of a read before it is posted. So the read stands in its middle, as
one of a peer that stands still, and these bytes land when the file is gone, whatever was decided
meanwhile. A file ``mute`` keeps leases from being renewed, and a file ``slow`` makes steps longer.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.engine._hold import VARIABLE, files
from vllm_tiered_kv import compat
from vllm_tiered_kv.connector import TieredKVConnector
from vllm_tiered_kv.remote.transport import Options, Region
from vllm_tiered_kv.remote.transport.agent import Agent
from vllm_tiered_kv.remote.transport.nixl_transport import NixlTransport

PIECE_BYTES = 256 << 10
SLOWER = 0.01
"""Seconds a step."""


class HeldKVConnector(TieredKVConnector):
    """Stands between the transport and NIXL, and between the agent and its clock."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._files = files(Path(os.environ[VARIABLE]))
        if role is compat.KVConnectorRole.WORKER:
            self._worker.remote.open_transport = HeldTransport
            return
        mute = self._files[2]
        client = self._scheduler.remote.agent._client
        renew = client._renew
        client._renew = lambda peer, now: None if mute.exists() else renew(peer, now)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._files[3].exists():
            time.sleep(SLOWER)
        super().start_load_kv(forward_context, **kwargs)


class HeldTransport(NixlTransport):
    """Reads in small pieces, of which every other one waits."""

    def __init__(self, regions: Sequence[Region], options: Options, **others: Any) -> None:
        super().__init__(
            regions, msgspec.structs.replace(options, piece_bytes=PIECE_BYTES), **others
        )

    def _reading_agent(self) -> Agent:
        agent = super()._reading_agent()
        hold, reached, *_ = files(Path(os.environ[VARIABLE]))
        post, posts = agent.post, itertools.count()

        def held(handle: int) -> Any:
            if next(posts) % 2:
                while hold.exists():
                    reached.touch()
                    time.sleep(0.005)
            return post(handle)

        agent.post = held  # type: ignore[method-assign]
        return agent
