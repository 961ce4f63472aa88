# SPDX-License-Identifier: Apache-2.0
"""Looking for the adapters must not stumble over whatever else lies in the process."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

from vllm_tiered_kv import compat


class Gone:
    pass


def test_a_dead_weak_proxy_does_not_end_the_start() -> None:
    gone = Gone()
    proxy = weakref.proxy(gone)
    del gone
    config: Any = SimpleNamespace(lora_config=object())
    find = compat.find_adapters(config)
    assert find is not None
    assert find() is None  # no manager here; and no exception out of register_kv_caches
    assert type(proxy) is weakref.ProxyType
