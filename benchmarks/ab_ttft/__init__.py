# SPDX-License-Identifier: Apache-2.0
"""Time to first token of the same prompts through several KV connectors, side by side.

Every arm is a real ``vllm serve`` process. All are up at once, requests go to one at a time, and
the order rotates from round to round, so that whatever the machine does to one it does to all.
"""
