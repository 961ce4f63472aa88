# SPDX-License-Identifier: Apache-2.0
"""The command ``vllm-tiered-kv``. One module a command; none imports vLLM or torch."""
