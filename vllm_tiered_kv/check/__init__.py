# SPDX-License-Identifier: Apache-2.0
"""What an engine would say of its options, and what this machine says, before one is started.

Nothing here imports vLLM or torch, and nothing is made or changed that outlasts the check.
"""
