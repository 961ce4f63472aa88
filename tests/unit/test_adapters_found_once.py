# SPDX-License-Identifier: Apache-2.0
"""Pages may be registered again; vLLM has frozen its older objects out of sight by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vllm_tiered_kv.geometry import GroupGeometry, GroupKind
from vllm_tiered_kv.worker.half import WorkerHalf


def test_adapters_once_found_stay_found_when_pages_are_registered_again() -> None:
    found: list[Callable[[], Mapping[int, object]]] = [dict]
    half = WorkerHalf(
        0,
        [("layer",)],
        8,
        [GroupGeometry(GroupKind.FULL, 16, 0)],
        report_blocks=True,
        find_adapters=lambda: found.pop() if found else None,  # as after gc.freeze()
    )
    pages = {"layer": torch.zeros((8, 1, 16, 8), dtype=torch.uint8)}
    half.register(pages)
    half.unregister()
    half.register(pages)
    assert half.adapters.registered is not None
    half.shutdown()
