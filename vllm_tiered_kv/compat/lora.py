# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters: what a request says of one, and what a worker has loaded."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from vllm_tiered_kv.identity.adapter import Registered


def lora_of(request: Request) -> tuple[int, str, str, bool] | None:
    """``(number, name, path, loaded in place)`` of a request's adapter; None: the base model."""
    lora = request.lora_request
    if lora is None:
        return None
    return int(lora.lora_int_id), str(lora.lora_name), str(lora.lora_path), bool(lora.load_inplace)


def find_adapters(vllm_config: VllmConfig) -> Callable[[], Registered | None] | None:
    """What finds this worker's adapters once its model is loaded; None where LoRA is off."""
    config = vllm_config.lora_config
    if config is None:
        return None
    return lambda: _registered(config)


def _registered(config: object) -> Registered | None:
    """The adapters of the manager that was built with ``config``.

    A connector is not told of it, so it is looked for among this process's objects: once, and
    before the first request. (Later ``gc.freeze()``, which vLLM calls, has put it out of sight.)
    """
    try:
        from vllm.lora.model_manager import LoRAModelManager
    except ImportError:  # a vLLM that keeps its adapters elsewhere
        return None

    # By type(): isinstance() asks an object for its __class__, which raises in a dead weak
    # proxy and runs whatever code others have put there.
    found: list[LoRAModelManager] = [
        manager for manager in gc.get_objects() if issubclass(type(manager), LoRAModelManager)
    ]
    found = [manager for manager in found if manager.lora_config is config]
    if len(found) != 1:
        return None
    manager = found[0]

    def registered() -> Mapping[int, object]:
        adapters: Mapping[int, object] = manager.list_adapters()
        return adapters

    return registered
