# SPDX-License-Identifier: Apache-2.0
"""The identity of stored chunks: what they mean and how their bytes lie.

``collect`` reads it from vLLM's configuration, ``start_weights`` adds the digest of the
weights in the background, and ``Identity.namespace`` puts both together.
"""

from vllm_tiered_kv.identity.collect import collect
from vllm_tiered_kv.identity.layout_id import FORMAT_VERSION, GroupLayout, LayoutIdentity
from vllm_tiered_kv.identity.namespace import (
    Established,
    Identity,
    Namespace,
    Unestablished,
    WeightsResult,
)
from vllm_tiered_kv.identity.semantic import DraftIdentity, SemanticIdentity
from vllm_tiered_kv.identity.weights import WeightsDigester, start_weights

__all__ = [
    "FORMAT_VERSION",
    "DraftIdentity",
    "Established",
    "GroupLayout",
    "Identity",
    "LayoutIdentity",
    "Namespace",
    "SemanticIdentity",
    "Unestablished",
    "WeightsDigester",
    "WeightsResult",
    "collect",
    "start_weights",
]
