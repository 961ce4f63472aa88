# SPDX-License-Identifier: Apache-2.0
"""What the tiers would serve of a trace of requests: the real index and policies, no engine."""

from vllm_tiered_kv.replay.bounds import belady, endless
from vllm_tiered_kv.replay.run import Outcome, Settings, replay
from vllm_tiered_kv.replay.trace import BLOCK_TOKENS, Request, TraceError, read_trace

__all__ = [
    "BLOCK_TOKENS",
    "Outcome",
    "Request",
    "Settings",
    "TraceError",
    "belady",
    "endless",
    "read_trace",
    "replay",
]
