# SPDX-License-Identifier: Apache-2.0
"""Tiers for vLLM's KV cache: a KV connector that saves blocks to host memory and loads them back.

vLLM finds the connector by itself once this package is installed (see :mod:`.plugin`); it is
chosen by name, ``"kv_connector": "TieredKVConnector"``. Importing this package imports neither
vLLM nor torch.
"""

__version__ = "0.1.0"
