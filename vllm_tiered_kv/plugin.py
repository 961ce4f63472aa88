# SPDX-License-Identifier: Apache-2.0
"""The entry point through which vLLM learns of the connector (group ``vllm.general_plugins``).

vLLM calls :func:`register` in every one of its processes: the server, the engine core, the
workers.
"""

from __future__ import annotations

from vllm_tiered_kv.log import get_logger

NAME = "TieredKVConnector"
MODULE = "vllm_tiered_kv.connector"

logger = get_logger(__name__)


def register() -> None:
    """Make the connector known by name; its module is imported only when it is used.

    Safe to call again. Where vLLM is absent or not of a version this package knows, the
    connector stays unregistered and one line is logged, so that an engine which does not use it
    still starts.
    """
    try:
        from vllm_tiered_kv.compat import register_connector

        register_connector(NAME, MODULE, NAME)
    except Exception as error:  # noqa: BLE001 - vLLM calls this in engines that do not use us
        logger.warning("%s is not available with this vLLM: %s", NAME, error)
