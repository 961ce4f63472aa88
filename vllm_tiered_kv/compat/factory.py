# SPDX-License-Identifier: Apache-2.0
"""vLLM's table of connectors."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register_connector(name: str, module_path: str, class_name: str) -> None:
    """Make a connector known by name; doing it twice is harmless."""
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module_path, class_name)
