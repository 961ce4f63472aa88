# SPDX-License-Identifier: Apache-2.0
"""The entry point through which vLLM learns of the connector (group ``vllm.general_plugins``).

vLLM calls :func:`register` in every one of its processes: the server, the engine core, the
workers.
"""

from __future__ import annotations

from vllm_tiered_kv.log import get_logger

NAME = "TieredKVConnector"
MODULE = "vllm_tiered_kv.connector"
ENTRY_POINT = "tiered_kv"
"""What ``VLLM_PLUGINS`` has to name where it is set."""

logger = get_logger(__name__)


def register() -> None:
    """Make the connector known by name; its module is imported only when it is used.

    Safe to call again. Nothing of vLLM is checked here: that is for the connector's module, so
    that who uses the connector is told what is wrong, and who does not is not bothered. Where
    vLLM has no table of connectors, one line is logged and the engine starts without us.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if NAME not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except Exception as error:  # noqa: BLE001 - vLLM calls this in engines that do not use us
        logger.warning("%s is not available with this vLLM: %s", NAME, error)
