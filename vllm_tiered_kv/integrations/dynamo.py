# SPDX-License-Identifier: Apache-2.0
"""The connector by a name that NVIDIA Dynamo's workers know.

They ask prefill for a hand-over in a way that depends on the connector's name, and fail every
request of one they have not heard of (``KV_CONNECTOR_PROTOCOLS`` in dynamo/vllm/
kv_connector_protocols.py, 1.6.1). What they do for ``NixlConnector`` is what ours needs. vLLM takes
the class of this name from ``kv_connector_module_path``, before any that it has itself.
"""

from vllm_tiered_kv.connector import TieredKVConnector as NixlConnector

__all__ = ["NixlConnector"]
