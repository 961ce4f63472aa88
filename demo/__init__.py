# SPDX-License-Identifier: Apache-2.0
"""The same requests to two real ``vllm serve`` processes, without and with the connector.

Run it with ``make demo`` or ``python -m demo``.
"""
