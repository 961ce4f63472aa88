# SPDX-License-Identifier: Apache-2.0
"""An adapter that cannot be digested must not end the thread that digests all others."""

from __future__ import annotations

import time
from types import SimpleNamespace

from vllm_tiered_kv.protocol import AdapterReport, AdapterState
from vllm_tiered_kv.worker.adapters import AdapterWatch


class Weights(SimpleNamespace):
    pass


def settled(watch: AdapterWatch, adapter: int) -> AdapterReport:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for report in watch.take():
            if report.adapter == adapter and report.state is not AdapterState.DIGESTING:
                return report
        time.sleep(0.001)
    raise AssertionError(f"nothing was said of adapter {adapter}")


def test_a_name_that_is_not_text_costs_its_adapter_only() -> None:
    loaded: dict[int, object] = {1: Weights(parts={"\udcff": 1})}  # as os.fsdecode() gives
    watch = AdapterWatch(0, lambda: loaded)
    watch.follow([1, 2], ())
    watch.observe()
    assert settled(watch, 1).state is AdapterState.OPAQUE
    loaded[2] = Weights(folder="/adapters/two")
    watch.observe()
    assert settled(watch, 2).state is AdapterState.KNOWN
    watch.close(10)
