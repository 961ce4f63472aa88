# SPDX-License-Identifier: Apache-2.0
"""Whether a stored prefix is worth loading: models learned while serving, and the choice by them.

Pure: no vLLM, no clock, no I/O. Whoever uses it says what happened and what time it is.
"""

from vllm_tiered_kv.gate.choice import Choice, Decision, Option, Question, Reason
from vllm_tiered_kv.gate.gate import Gate
from vllm_tiered_kv.gate.mode import GateMode
from vllm_tiered_kv.gate.prefill import Work

__all__ = ["Choice", "Decision", "Gate", "GateMode", "Option", "Question", "Reason", "Work"]
